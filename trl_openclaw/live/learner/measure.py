"""Log-probs of given replies under the new version, the published one and the base model."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelerate.utils import gather_object

from ...scoring import TeacherRow, TeacherScores
from ...teachers.weights import adapter_switched
from ..records import BASE_VERSION, NewTurn
from .snapshot import Snapshot, other_weights

if TYPE_CHECKING:
    from .trainer import LiveTrainer

Logps = dict[str, list[float]]
"""By key: the log-probs, in nats, of each token of a reply."""


@dataclass(frozen=True)
class Item:
    """A reply to score.

    Args:
        key: Its name among all items.
        prompt_ids: What comes before it.
        completion_ids: Its ids.
        temperature: At which it is scored.
    """

    key: str
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    temperature: float = 1.0

    @classmethod
    def of(cls, turn: NewTurn) -> "Item":
        """A recorded turn, scored as it was when it was recorded."""
        return cls(turn.turn_id, turn.prompt_ids, turn.completion_ids, turn.logprobs_temperature)

    @property
    def row(self) -> TeacherRow:
        """What is scored."""
        return TeacherRow(self.prompt_ids, self.completion_ids, self.temperature)


class Measures:
    """Scores items, each at most once per version, shared out over the processes.

    Args:
        trainer: The trainer, between two steps.
    """

    def __init__(self, trainer: "LiveTrainer"):
        self.trainer = trainer
        self._known: dict[str, Logps] = {}

    def __call__(self, version: str, items: Sequence[Item], weights: Callable[[], AbstractContextManager]) -> Logps:
        """The log-probs of items under a version. A collective.

        Args:
            version: The version.
            items: The same on all processes.
            weights: Opens a context in which the model has the version's weights.
        """
        known = self._known.setdefault(version, {})
        missing = [item for item in items if item.key not in known]
        if missing:
            with weights():
                known.update(self.of_policy(missing))
        return {item.key: known[item.key] for item in items}

    def of_policy(self, items: Sequence[Item]) -> Logps:
        """The log-probs of items under the weights that the model has at this moment. A collective."""
        accelerator = self.trainer.accelerator
        own = items[accelerator.process_index :: accelerator.num_processes]
        scores = self.trainer.scorer.score(self.trainer.model, [item.row for item in own])
        return gathered_logps(own, scores)

    def of_base(self, items: Sequence[Item]) -> Logps:
        """The log-probs of items under the base model. A collective."""
        return self(BASE_VERSION, items, self.base_weights)

    def base_weights(self) -> AbstractContextManager:
        """The model without its adapter."""
        return adapter_switched(self.trainer.accelerator.unwrap_model(self.trainer.model), None)

    def forget(self, *kept: str) -> None:
        """Keep nothing but the numbers of the base model and of these versions."""
        self._known = {name: known for name, known in self._known.items() if name in (BASE_VERSION, *kept)}


@dataclass(frozen=True)
class Versions:
    """The three that are compared.

    Args:
        measures: Scores.
        new: The name of the version in training.
        published: The name of the version it was trained from.
        before: The weights of that.
    """

    measures: Measures
    new: str
    published: str
    before: Snapshot

    def of_new(self, items: Sequence[Item]) -> Logps:
        """Under the version in training."""
        return self.measures(self.new, items, nullcontext)

    def of_published(self, items: Sequence[Item]) -> Logps:
        """Under the version it was trained from."""
        trainer = self.measures.trainer
        return self.measures(self.published, items, lambda: other_weights(trainer, self.before.weights))


def gathered_logps(items: Sequence[Item], scores: TeacherScores) -> Logps:
    """The log-probs of all processes' items. A collective.

    Args:
        items: This process's.
        scores: Theirs.
    """
    rows = zip(items, scores.per_token_logps.tolist(), strict=True)
    return dict(gather_object([(item.key, row[: len(item.completion_ids)]) for item, row in rows]))


def mean(values: Sequence[float]) -> float:
    """The mean; not a number without any."""
    return sum(values) / len(values) if values else float("nan")
