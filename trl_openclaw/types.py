"""The values that flow from a sampled turn to its verdict: frozen, and free of torch.

A `Turn` is what the policy said and what happened next; a judge turns it into a `Verdict` made of `Vote`s;
`Feedback` keeps both, plus what went wrong, for one row of a batch.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

Message = Mapping[str, Any]
"""One chat message: `role`, `content` (text or a list of parts), and whatever else the template reads."""

Messages = Sequence[Message]

VoteFailure = Literal["unparseable", "truncated", "timeout", "unreachable", "denied", "refused", "unreadable", "error"]
"""Why a vote has no score. `denied` is a server that does not take the key, has no such model, or wants to be paid;
`refused` is an answer from it that a retry of the same request cannot mend (a transcript longer than its window, say);
`unreadable` is a next state that the judge cannot be shown (images alone, for a judge of text)."""

VOTE_FAILURES: tuple[VoteFailure, ...] = get_args(VoteFailure)

HintFailure = Literal[
    "unparseable",
    "unterminated",
    "too_long",
    "truncated",
    "timeout",
    "unreachable",
    "denied",
    "refused",
    "unreadable",
    "error",
]
"""Why a judge that was asked for a hint gave none that can be used. Saying that there is none is not a failure."""

HINT_FAILURES: tuple[HintFailure, ...] = get_args(HintFailure)

Outcome = Literal["positive", "negative", "neutral", "tied", "failed", "unasked"]
"""What the votes came to. `tied`, `failed` (no valid vote) and `unasked` carry no score and are not `neutral`."""


@dataclass(frozen=True)
class NextState:
    """What followed a reply: the user's next message, a tool's output, a test verdict.

    Args:
        content: Text, or a list of content parts.
        role: `"user"` or `"tool"`.
        satisfied: Whether the reply pleased, where the provider knows it for sure; else `None`.
        info: Anything else worth keeping with the turn.
    """

    content: str | Sequence[Mapping[str, Any]]
    role: Literal["user", "tool"] = "user"
    satisfied: bool | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if isinstance(self.content, str):
            object.__setattr__(self, "content", valid_text(self.content))

    @property
    def text(self) -> str:
        """The text of `content`, parts joined by newlines.

        Raises:
            TypeError: When the content is neither text nor parts, so that nobody knows what it says.
        """
        if not isinstance(self.content, str) and not is_parts(self.content):
            raise TypeError(
                f"The content of a next state must be text or a list of parts, got {str(self.content)[:80]}."
            )
        return message_text({"content": self.content})


class ToolResult(str):
    """What a tool answers: text for the policy, and beside it what is known of the call for judges.

    A tool, or the method of an environment, returns one in place of a plain text. To chat templates and to the policy
    it is its text; the next state that is made of it has `satisfied` and `info`.

    Args:
        text: What the policy reads.
        satisfied: Whether the call pleased (all tests passed, say), where the tool knows for sure.
        info: Anything else worth keeping, such as the `wish` that [`~trl_openclaw.judges.OutcomeJudge`] hints with.

    Raises:
        TypeError: When `satisfied` is something else than `True`, `False` or `None`, or the wish is no text.
    """

    satisfied: bool | None
    info: Mapping[str, Any]

    def __new__(cls, text: str, *, satisfied: bool | None = None, info: Mapping[str, Any] | None = None) -> Self:
        """Make one of `text`."""
        known = dict(info or {})
        if not isinstance(satisfied, bool | None):
            raise TypeError(f"`satisfied` must be True, False or None, got {type(satisfied).__name__}.")
        if not isinstance(known.get("wish", ""), str):
            raise TypeError(f"`info['wish']` must be text, got {type(known['wish']).__name__}.")
        result = super().__new__(cls, valid_text(text))
        result.satisfied, result.info = satisfied, known
        return result

    def __deepcopy__(self, memo: dict) -> Self:
        """Itself: nobody changes what is known, and some of it may not be copied."""
        return self

    def __str__(self) -> str:
        """Itself: TRL makes messages of `str(result)`, which must not lose what is known."""
        return self


@dataclass(frozen=True)
class Turn:
    """One sampled reply with what came before it and, once known, what came after.

    Args:
        prompt: The messages, or the plain text, that the policy was given.
        completion: The messages, or the plain text, that it sampled.
        next_state: What followed, or `None` before it is known.
        truncated: Whether sampling stopped at the length limit, before an end-of-sequence token.
        session_id: The conversation the turn belongs to, where there is one.
        step: Its place among the assistant's turns of one trajectory, from 0.
    """

    prompt: str | Messages
    completion: str | Messages
    next_state: NextState | None = None
    truncated: bool = False
    session_id: str | None = None
    step: int = 0

    @property
    def prompt_text(self) -> str:
        """The text of all messages of the prompt."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(message_text(message) for message in self.prompt)

    @property
    def reply(self) -> str:
        """The text of the completion's assistant messages."""
        if isinstance(self.completion, str):
            return self.completion
        texts = (message_text(m) for m in self.completion if m.get("role") == "assistant")
        return "\n".join(text for text in texts if text)


_RAW_CHARS = 10_000


@dataclass(frozen=True)
class Vote:
    """One answer of a judge.

    Args:
        score: +1 (good), -1 (bad), 0 (neutral), or `None` when the answer gives no valid score.
        failure: Why `score` is `None`; `None` when it is valid or was not asked for.
        hint: The hint this answer gave, or `None`.
        hint_failure: Why a hint that was asked for could not be read; `None` when it was, or when there is none.
        raw: The answer as received, for the logs. Only its first 10,000 characters are kept.
    """

    score: int | None = None
    failure: VoteFailure | None = None
    hint: str | None = None
    hint_failure: HintFailure | None = None
    raw: str = ""

    def __post_init__(self):
        if self.score not in (-1, 0, 1, None):
            raise ValueError(f"A vote's score is -1, 0, 1 or None, got {self.score!r}.")
        if self.score is not None and self.failure is not None:
            raise ValueError("A vote with a score cannot also carry a failure.")
        object.__setattr__(self, "hint", None if self.hint is None else valid_text(self.hint))
        object.__setattr__(self, "raw", valid_text(self.raw[:_RAW_CHARS]))


@dataclass(frozen=True)
class Verdict:
    """What a judge's votes came to.

    Args:
        score: +1, -1, 0, or `None` when `outcome` is `tied`, `failed` or `unasked`.
        outcome: What the votes came to, in a word.
        hints: The usable hint candidates, in the order of the votes, without repeats.
        votes: The single votes.
    """

    score: int | None
    outcome: Outcome
    hints: tuple[str, ...] = ()
    votes: tuple[Vote, ...] = ()

    @classmethod
    def from_votes(cls, votes: Sequence[Vote]) -> "Verdict":
        """Plurality of the valid votes; a draw for first place is `tied`, no valid vote is `failed`."""
        hints = tuple(dict.fromkeys(vote.hint for vote in votes if vote.hint))
        counts = Counter(vote.score for vote in votes if vote.score is not None).most_common(2)
        if not counts:
            outcome: Outcome = "failed" if any(vote.failure for vote in votes) else "unasked"
            return cls(None, outcome, hints, tuple(votes))
        if len(counts) == 2 and counts[0][1] == counts[1][1]:
            return cls(None, "tied", hints, tuple(votes))
        score = counts[0][0]
        names: dict[int | None, Outcome] = {1: "positive", -1: "negative", 0: "neutral"}
        return cls(score, names[score], hints, tuple(votes))

    @property
    def mean_vote(self) -> float | None:
        """The mean of the valid votes, between -1 and 1; `None` when there is none. A verdict without votes is one."""
        scores = [vote.score for vote in self.votes if vote.score is not None]
        if not self.votes and self.score is not None:
            scores = [self.score]
        return sum(scores) / len(scores) if scores else None

    @property
    def failed(self) -> bool:
        """Whether the judge failed outright: every vote failed, and there is no hint either."""
        return self.outcome == "failed" and not self.hints


FeedbackFailure = Literal["next_state_failed", "next_state_timeout", "judge_failed", "judge_timeout"]


@dataclass(frozen=True)
class Feedback:
    """Everything learned about one row.

    Args:
        turn: The turn, with its next state when there was one.
        verdict: The judge's verdict, or `None` when the judge was not asked or did not answer.
        failure: What broke, or `None`. A verdict whose votes all failed is `judge_failed`. A turn that simply has no
            next state has neither verdict nor failure.
        seconds: How long the judge took.
        detail: The error's text, for the logs.
        next_state_seconds: How long the next state took.
    """

    turn: Turn
    verdict: Verdict | None = None
    failure: FeedbackFailure | None = None
    seconds: float = 0.0
    detail: str = ""
    next_state_seconds: float = 0.0

    @property
    def score(self) -> int | None:
        """The judge's score, or `None`."""
        return self.verdict.score if self.verdict else None

    @property
    def hints(self) -> tuple[str, ...]:
        """The usable hints, possibly none."""
        return self.verdict.hints if self.verdict else ()


def valid_text(text: str) -> str:
    """Text that can be encoded: half an emoji, which a cut answer may end in, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def finite_float(text: str) -> float:
    """A number of JSON that can be written as one again.

    Raises:
        ValueError: When it is beyond all floats.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


def is_parts(content: Any) -> bool:
    """Whether content is a list of parts, each with its type, whose texts are text."""
    return isinstance(content, list | tuple) and all(
        isinstance(part, Mapping)
        and "type" in part
        and (part["type"] != "text" or isinstance(part.get("text"), str | None))
        for part in content
    )


def message_text(message: Message) -> str:
    """The text of a message's content: text parts joined by newlines; parts of other kinds are named in brackets.

    Content that is neither text nor parts, such as a list of numbers that a tool gave, is shown as Python writes it.
    """
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        return valid_text(str(content))
    return "\n".join(map(_part_text, content))


def _part_text(part: Mapping[str, Any]) -> str:
    if part.get("type") != "text":
        return f"[{part.get('type', 'part')}]"
    text = part.get("text")
    return "" if text is None else text if isinstance(text, str) else valid_text(str(text))
