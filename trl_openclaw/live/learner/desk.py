"""The learner's dealings with the store. Only the main process has them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import LearnerError
from ..canonical import NO_HISTORY, extended
from ..records import BASE_VERSION, Batch, StoredTurn
from ..store import Store
from .checkpoints import Progress
from .patient import patient
from .rollouts import LiveTurn

logger = logging.getLogger(__name__)

LEFT_BEHIND = "the learner ended before it was checked"
OVERTAKEN = "another version was published before this one could be"
WITHDRAWN = "turns it was trained on were deleted or corrected, or their user opted out"


@dataclass(frozen=True)
class LiveBatch:
    """A claimed batch whose turns can all be trained."""

    batch_id: str
    turns: tuple[LiveTurn, ...]


@dataclass(frozen=True)
class GoTo:
    """Another version answers than the one in the learner's hands.

    Args:
        version: That version.
        path: Its adapter, `None` for the base model.
        refused: Why the engine could not load the one in the learner's hands; `None` where somebody chose another.
    """

    version: str
    path: str | None
    refused: str | None = None


@dataclass(frozen=True)
class Waiting:
    """There are too few turns, `ready` of them; `None` where that has to be found out anew."""

    ready: int | None


class Desk:
    """Takes batches and gives them back.

    Args:
        store: The store.
        user: Whose turns.
        count: Turns of a batch.
        max_lag: How many versions may have been published since a turn was sampled.
        model: The name under which turns of this model are recorded.
    """

    def __init__(self, store: Store, user: str, count: int, max_lag: int, model: str):
        self.store, self.user = patient(store), user
        self.count, self.max_lag, self.model = count, max_lag, model
        self.open: str | None = None
        """The batch that was claimed and has not ended."""
        self._back_at: str | None = None
        """The version that the learner was sent back to when the engine refused a later one."""

    def reconcile(self, progress: Progress) -> int:
        """Bring the store in line with the weights that training goes on from.

        A batch that a learner left open is trained if it is in them, and free again if not. A version that it left
        unpublished is published if it is these weights, and rejected if not.

        Returns:
            How many batches were freed.
        """
        released = self.store.reconcile(self.user, progress.batches)
        for version in self.store.versions(self.user):
            if {event.event for event in version.events} & {"published", "rejected"}:
                continue
            if version.version != progress.version:
                reason = LEFT_BEHIND
            elif self.store.publish(self.user, version.version, if_published=version.parent):
                continue
            else:
                reason = OVERTAKEN
            self.store.add_version_event(self.user, version.version, "rejected", {"reason": reason})
        return released

    def other_users(self) -> list[str]:
        """Who has turns, where this user has none."""
        users = self.store.users()
        return [] if self.user in users else users

    def next(self, version: str, read: Callable[[StoredTurn], LiveTurn | str]) -> LiveBatch | GoTo | Waiting:
        """What to do next.

        Args:
            version: The version in the learner's hands.
            read: Tells whether a turn can be trained.

        Raises:
            LearnerError: If the turns are of another model, or the engine takes no version.
        """
        published = self.store.published_version(self.user)
        if published != version:
            return self._go_to(version, published)
        ready = self.store.ready_count(self.user, self.max_lag)
        batch = self.store.claim(self.user, self.count, self.max_lag) if ready >= self.count else None
        if batch is None:
            return Waiting(ready)
        self.open = batch.batch_id
        usable, unusable = self._sorted(batch, read)
        if not unusable:
            return LiveBatch(batch.batch_id, tuple(usable))
        if not usable and len(unusable) > 1 and not {"too_long", "cut", "temperature"} & set(unusable.values()):
            self.release()
            raise LearnerError(
                f"None of {len(unusable)} turns can be trained ({', '.join(sorted(set(unusable.values())))}): chat "
                "template or tokenizer of the engine are not those of the model that is trained."
            )
        self.set_aside(unusable)
        return Waiting(None)

    def set_aside(self, unusable: dict[str, str]) -> None:
        """Give back the batch at hand but for turns that cannot be trained, each with the reason in a word."""
        self.release()
        for reason in set(unusable.values()):
            self.store.set_aside([turn for turn, why in unusable.items() if why == reason], reason)
        logger.warning("%d turns cannot be trained and were set aside: %s.", len(unusable), _counted(unusable))

    def withdrawn(self, batch: LiveBatch) -> bool:
        """Whether people have taken back anything of the batch at hand since it was claimed.

        That is a turn, what followed it, what was made of that, or their will to be trained.
        """
        held = [one for one in self.store.open_batches(self.user) if one.batch_id == batch.batch_id]
        now = {turn.turn_id: turn for one in held for turn in one.turns}
        return self.store.opted_out(self.user) or any(
            one.turn.turn_id not in now or taken_back(one.turn, now[one.turn.turn_id]) for one in batch.turns
        )

    def _sorted(
        self, batch: Batch, read: Callable[[StoredTurn], LiveTurn | str]
    ) -> tuple[list[LiveTurn], dict[str, str]]:
        """The turns that can be trained, and why the others cannot."""
        usable, unusable = [], {}
        for turn in batch.turns:
            if not same_model(turn.model, self.model):
                self.release()
                raise LearnerError(
                    f"Turns of user {self.user!r} are recorded from the model {turn.model!r}, not from {self.model!r}: "
                    "train that model, or say with `engine_model` that it is this one."
                )
            found = read(turn)
            if isinstance(found, LiveTurn):
                usable.append(found)
            else:
                unusable[turn.turn_id] = found
        return usable, unusable

    def _go_to(self, version: str, published: str) -> GoTo:
        """Where to go on from, now that the version in the learner's hands does not answer.

        Raises:
            LearnerError: If the engine has refused what was trained from there before.
        """
        last = [one.events[-1] for one in self.store.versions(self.user) if one.version == version and one.events]
        refused = next((str(event.detail.get("error")) for event in last if event.event == "load_failed"), None)
        if refused is not None and published == self._back_at:
            raise LearnerError(
                f"The engine refused two versions in a row that were trained from {published!r}, the last of them "
                f"{version!r} ({refused}). Engine and adapter do not fit each other: change the settings of either."
            )
        self._back_at = None if refused is None else published
        return GoTo(published, self._path_of(published), refused)

    def _path_of(self, version: str) -> str | None:
        if version == BASE_VERSION:
            return None
        return next(one.path for one in self.store.versions(self.user) if one.version == version)

    def release(self) -> None:
        """Give back the batch at hand, if there is one."""
        if self.open is not None:
            self.store.end_batch(self.open, "released")
            self.open = None


def taken_back(before: StoredTurn, now: StoredTurn) -> bool:
    """Whether a turn has lost what followed it, or its score or hints are no longer what they were.

    What a judge adds to what a person said takes nothing back, nor does the same said again.
    """
    if before.next_state is not None and _hash(now.next_state) != _hash(before.next_state):
        return True
    said, says = before.verdict, now.verdict
    if said is None or says is None:
        return said is not None
    other_score = says.score != said.score and (said.score is not None or says.source != "judge")
    other_hints = says.hints != said.hints and (bool(said.hints) or says.hint_source != "judge")
    return other_score or other_hints


def _hash(messages: list[dict[str, Any]] | None) -> bytes | None:
    """By what next states are told apart: the store may keep another request's wording of the same."""
    return None if messages is None else extended(NO_HISTORY, messages)


def same_model(recorded: str, wanted: str) -> bool:
    """Whether two names are those of one model: equal, or paths of one folder."""
    return recorded == wanted or (Path(recorded).is_dir() and Path(recorded).resolve() == Path(wanted).resolve())


def _counted(reasons: dict[str, str]) -> str:
    values = list(reasons.values())
    return ", ".join(f"{values.count(reason)} {reason}" for reason in sorted(set(values)))
