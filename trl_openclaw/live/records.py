"""What the live system writes down and reads back: frozen values, no input or output."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..types import Vote

BASE_VERSION = "base"
"""The `model_version` of the model without an adapter."""

DEFAULT_USER = "default"
"""The owner of every turn where no keys are configured."""

LOGPROBS_TEMPERATURE = "logprobs_temperature"
_LARGEST = 3.4028234e38  # of 32-bit floats, in which log-probs are kept

TurnKind = Literal["main", "side"]

TurnState = Literal[
    "side",  # titles, summaries, pings: never trained nor judged
    "open",  # nothing followed it yet
    "answered",  # something followed, and no verdict is there yet
    "judged",  # a verdict without a score and without a hint, so there is nothing to learn
    "ready",  # a verdict with a score or a hint
    "claimed",  # in a batch that has not ended
    "trained",
    "rejected",  # trained, and the version that came of it was not published
    "expired",  # sampled too many versions ago
    "unusable",  # no token ids or log-probs, cut by a disconnect, or set aside by the learner
    "held_out",  # kept for checks
    "opted_out",  # its owner does not want to be trained on
]
"""What has become of a turn. The store derives it from its tables (the view `turn_states`); it is written nowhere."""

TURN_STATES: tuple[TurnState, ...] = get_args(TurnState)

VerdictSource = Literal["judge", "feedback", "edit"]
"""Who said so. People outrank judges: of the scores the latest from `feedback` counts, else the latest from `judge`;
of the hints the latest from `edit` (even an empty one), else the correction of the latest `feedback`, if it has one,
else the latest from `judge`."""

BatchOutcome = Literal["trained", "rejected", "released"]

VersionEventName = Literal["checked", "published", "rejected", "rolled_back", "load_failed"]


@dataclass(frozen=True)
class NewTurn:
    """One reply, recorded when it is complete or was cut.

    Args:
        turn_id: The completion's own id (`chatcmpl-` and 32 hex digits), by which a client can name it.
        user: The owner.
        session_id: The header's, else the matched parent's, else the `turn_id` of the first turn.
        parent: The turn whose reply is the last one in this request's history that was matched, if any was.
        kind: `"side"` for traffic that is neither trained nor judged, and whose requests are no feedback.
        side_reason: What kind of side traffic it is.
        messages: The request's messages as the client sent them, but for `developer`, which is `system` here.
        tools: The request's tools.
        reply: The assistant message as the client got it.
        finish_reason: The engine's, or `"disconnect"`.
        prompt_ids: The ids that the engine was given. Empty where it does not tell: such a turn is never trained.
        completion_ids: The ids that it sampled. Empty likewise.
        logprobs: Their log-probs in nats under the model's distribution at `logprobs_temperature`. Empty likewise.
        sampling: The sampling settings as used, under OpenAI's names, and `logprobs_temperature` where that is not 1.
        model: The model's name.
        model_version: `"base"`, or a version such as `"v000007"`.

    Raises:
        ValueError: When ids and log-probs do not fit each other, or are no ids and log-probs.
    """

    turn_id: str
    user: str
    session_id: str
    parent: str | None
    kind: TurnKind
    side_reason: str | None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    reply: dict[str, Any]
    finish_reason: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampling: dict[str, Any]
    model: str
    model_version: str

    @property
    def logprobs_temperature(self) -> float:
        """The temperature at which `logprobs` are taken, and the turn is trained."""
        return self.sampling.get(LOGPROBS_TEMPERATURE, 1.0)

    def __post_init__(self):
        if self.kind not in get_args(TurnKind):
            raise ValueError(f"A turn's kind is one of {list(get_args(TurnKind))}, got {self.kind!r}.")
        if self.logprobs and len(self.logprobs) != len(self.completion_ids):
            raise ValueError(
                f"Each sampled id has one log-prob, got {len(self.logprobs)} for {len(self.completion_ids)} ids."
            )
        if any(min(ids) < 0 or max(ids) >= 2**31 for ids in (self.prompt_ids, self.completion_ids) if ids):
            raise ValueError("A token id is an integer from 0 to 2**31 - 1.")
        if not all(math.isfinite(logprob) and abs(logprob) <= _LARGEST for logprob in self.logprobs):
            raise ValueError("A log-prob is a finite number of 32 bits.")
        temperature = self.logprobs_temperature
        if type(temperature) not in (int, float) or not 0 < temperature < math.inf:
            raise ValueError(f"`{LOGPROBS_TEMPERATURE}` is a number above 0, got {temperature!r}.")


@dataclass(frozen=True)
class StoredVerdict:
    """The verdict that counts for a turn (see `VerdictSource`).

    Args:
        score: +1, -1, 0 or `None`.
        outcome: What the votes came to (see `trl_openclaw.types.Outcome`).
        hints: The hints, possibly none.
        votes: The judge's votes; none where a person gave the score.
        source: Who gave the score; `"edit"` where only hints are known.
        hint_source: Who gave the hints; `None` where there are none.
        created: When, by the wall clock.
    """

    score: int | None
    outcome: str
    hints: tuple[str, ...]
    votes: tuple[Vote, ...]
    source: VerdictSource
    hint_source: VerdictSource | None
    created: float


@dataclass(frozen=True)
class Use:
    """The batch that a turn is in. `outcome` is `"open"` until the batch ends."""

    batch_id: str
    outcome: str
    version: str | None


@dataclass(frozen=True)
class StoredTurn(NewTurn):
    """A turn with all that is known about it since.

    Args:
        number: Its place in the order of recording.
        created: When it was recorded, by the wall clock, which may jump. Order is by `number`.
        state: What has become of it.
        lag: How many versions have been published since the one that sampled it.
        next_state: The messages that followed its reply, or `None`.
        next_state_source: Where they come from.
        next_state_told_by: The `turn_id` of the request they were found in.
        verdict: The verdict that counts, or `None`.
        use: The batch it is in, or `None`. A released batch does not count.
    """

    number: int = 0
    created: float = 0.0
    state: TurnState = "open"
    lag: int = 0
    next_state: list[dict[str, Any]] | None = None
    next_state_source: str | None = None
    next_state_told_by: str | None = None
    verdict: StoredVerdict | None = None
    use: Use | None = None


@dataclass(frozen=True)
class TurnHashes:
    """By what a later request finds a turn.

    Args:
        history: Of the request's messages and the reply.
        tail: Of the request's last message and the reply, for histories that were cut or edited further up.
        reply: Of the reply alone, for clients that change the message before it; `None` where it is short.
    """

    history: bytes
    tail: bytes
    reply: bytes | None = None


@dataclass(frozen=True)
class HistoryHit:
    """A turn that a hash found.

    Args:
        index: Which of the hashes found it.
        number: The turn's place in the order of recording.
        turn_id: The turn.
        session_id: Its session.
        kind: Main or side traffic.
        next_state_hash: The hash of its next state, or `None` while it has none.
    """

    index: int
    number: int
    turn_id: str
    session_id: str
    kind: TurnKind
    next_state_hash: bytes | None

    @property
    def has_next_state(self) -> bool:
        """Whether something is known to have followed it."""
        return self.next_state_hash is not None


@dataclass(frozen=True)
class Batch:
    """Turns that one learner has taken for one optimizer step. Deleted ones are missing."""

    batch_id: str
    user: str
    created: float
    turns: tuple[StoredTurn, ...]


@dataclass(frozen=True)
class TokenScores:
    """What a training step computed for the sampled tokens of one turn, all of the same length.

    Args:
        student: The policy's log-probs at the sampled ids, in nats.
        teacher: The teacher's; `nan` where it gave none.
        advantages: What the tokens were trained with.
        prefers: For each token up to a few `[text, p_teacher, p_student]`, where the trainer kept them.
        tokens: The text of each sampled id, one by one (`[tokenizer.decode([i]) for i in completion_ids]`), which the
            status page shows: it has no tokenizer.
    """

    student: Sequence[float]
    teacher: Sequence[float]
    advantages: Sequence[float]
    prefers: list[Any] | None = None
    tokens: Sequence[str] | None = None


@dataclass(frozen=True)
class VersionEvent:
    """Something that happened to an adapter version."""

    event: VersionEventName
    detail: dict[str, Any]
    created: float


@dataclass(frozen=True)
class VersionInfo:
    """An adapter version.

    Args:
        user: Whose.
        version: Its name, such as `"v000007"`.
        parent: The version it was trained from.
        path: The folder of the adapter.
        created: When, by the wall clock.
        published: Whether it answers requests now.
        events: What happened to it, oldest first.
    """

    user: str
    version: str
    parent: str
    path: str
    created: float
    published: bool = False
    events: tuple[VersionEvent, ...] = field(default=())


@dataclass(frozen=True)
class Deletion:
    """What was deleted: ids and counts, no text."""

    turns: int
    sessions: int
    exports: tuple[str, ...] = ()
