"""From hints to what the teacher reads before each turn, or the reason why there is nothing."""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import HintError
from ..hint_selection import TEXT_RULES
from ..hints import clean_hint, without_special_tokens
from ..types import Feedback

DropReason = Literal[
    "no_hint",
    "no_feedback",
    "unreadable_hint",
    "no_user_message",
    "too_long",
    "no_teacher_score",
    "empty_completion",
    "masked_completion",
    "unmatched_turn",
]
"""`no_hint`: nobody had one. `no_feedback`: the judge or the next state failed. `unreadable_hint`: the privileged
context is no text. `no_user_message`: no place for it. `too_long`: the hinted prompt and the completion do not fit into
the teacher's window. `no_teacher_score`: the teacher had no finite log-prob for it. `empty_completion`: nothing was
sampled. `masked_completion`: TRL masked the truncated completion (`mask_truncated_completions`). `unmatched_turn`: the
row's messages do not tell as many turns as its tokens."""

DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)


@dataclass(frozen=True)
class HintCandidates:
    """What a turn may be taught with, before anything is placed, or why there is nothing.

    Args:
        texts: The candidates, cleaned. `None` among them: the plain prompt, for a teacher that needs no hint.
        drop: Why there are none, or `None`.
        found: Whether anybody had a hint for the turn, before cleaning.
        had_control_tokens: Whether such a hint held special tokens, which were removed.
    """

    texts: tuple[str | None, ...] = ()
    drop: DropReason | None = None
    found: bool = False
    had_control_tokens: bool = False


def find_hints(
    source: str, row: Mapping[str, Any], feedback: Feedback | None, special_tokens: Collection[str]
) -> HintCandidates:
    """Take a turn's hints from where they come from, and clean them. A privileged context keeps its layout.

    Args:
        source: `"judge"`, `"privileged_context"`, or `"none"` where the teacher needs no hint.
        row: The dataset's row.
        feedback: What the judge said about the turn; only hints of the judge need it.
        special_tokens: What a hint must not hold, since the chat template gives it a meaning.
    """
    if source == "none":
        return HintCandidates((None,))
    found: Any = row.get("privileged_context")
    if source == "judge":
        assert feedback is not None, "the judge is heard before its hints are read"
        found = feedback.hints
    if isinstance(found, str) or found is None:
        found = [found] if found else []
    elif source == "privileged_context":
        return HintCandidates(drop="unreadable_hint")
    said = source == "judge"
    plain = [without_special_tokens(hint, special_tokens, tidy=said) for hint in found]
    changed = any(hint != without_special_tokens(raw, (), tidy=said) for raw, hint in zip(found, plain, strict=True))
    texts = tuple(dict.fromkeys(filter(None, map(clean_hint if said else _as_written, plain))))
    if texts:
        return HintCandidates(texts, None, bool(found), changed)
    missing: DropReason = "no_feedback" if said and feedback and feedback.failure is not None else "no_hint"
    return HintCandidates((), missing, bool(found), changed)


def _as_written(text: str) -> str | None:
    """The text with its layout, since it may be code; `None` where `clean_hint` would leave nothing."""
    return text.strip("\n") if clean_hint(text) else None


@dataclass(frozen=True)
class HintedTurn:
    """One turn as the teacher may see it.

    Args:
        hint: The hint; `None` when the turn was dropped, or is scored without a hint.
        context_ids: Ids of all that the teacher reads before the turn: the prompt and earlier turns, with the hint in
            its place. `None` when dropped.
        drop: Why there is nothing to score, or `None`.
    """

    hint: str | None = None
    context_ids: list[int] | None = None
    drop: DropReason | None = None


@dataclass(frozen=True)
class PlainTurn:
    """One turn as it was sampled.

    Args:
        row: The row of the batch.
        prompt: The row's prompt.
        prompt_ids: Its ids, which a prompt without a hint in it has, too.
        history: Ids between the prompt and the turn: earlier turns, and what was said in between.
        length: Tokens of the turn.
    """

    row: int
    prompt: Any
    prompt_ids: Sequence[int]
    history: Sequence[int]
    length: int


@dataclass(frozen=True)
class Placement:
    """How hints get into what the teacher reads.

    Args:
        in_prompt: Puts a hint into a prompt, or gives back the prompt itself.
        tokenize: Renders and tokenizes prompts, given the rows that they belong to, as the sampled ones were.
        before_turn: Puts a hint behind the ids that came before a later turn; `None` where hints go into the prompt.
    """

    in_prompt: Callable[[Any, str], Any]
    tokenize: Callable[[list, list[int]], list[list[int]]]
    before_turn: Callable[[list[int], str], list[int]] | None = None


def render_candidates(
    turns: Sequence[PlainTurn], hints: Sequence[HintCandidates], placement: Placement, max_length: int | None
) -> list[list[HintedTurn]]:
    """Place all candidates. All prompts that have to be tokenized are, in one call.

    Args:
        turns: The turns as they were sampled.
        hints: The candidates of each turn.
        placement: Where a hint goes.
        max_length: The window of teacher and reference in tokens, if known. A turn that ends behind it, with the hint
            or without it, is dropped, never cut.

    Returns:
        The rendered candidates of each turn, at least one; a dropped one says why.
    """
    later = placement.before_turn is not None
    placed = [
        [None if later and turn.history else _in_prompt(turn.prompt, hint, placement) for hint in found.texts]
        for turn, found in zip(turns, hints, strict=True)
    ]
    changed = [
        (turn.row, prompt)
        for turn, found in zip(turns, placed, strict=True)
        for prompt in found
        if prompt is not None and prompt is not turn.prompt
    ]
    ids = iter(placement.tokenize([prompt for _, prompt in changed], [row for row, _ in changed]))
    rendered: list[list[HintedTurn]] = []
    for turn, found, prompts in zip(turns, hints, placed, strict=True):
        candidates = []
        for hint, prompt in zip(found.texts, prompts, strict=True):
            if later and turn.history:
                context = _before_turn(turn, hint, placement)
            elif prompt is None:
                context = None
            else:
                context = [*(turn.prompt_ids if prompt is turn.prompt else next(ids)), *turn.history]
            candidates.append(_candidate(turn, hint, context, max_length))
        rendered.append([HintedTurn(drop=found.drop)] if found.drop else candidates)
    return rendered


def _in_prompt(prompt: Any, hint: str | None, placement: Placement) -> Any:
    """The prompt with the hint in it; the prompt itself without one; `None` where there is no place for it."""
    if hint is None:
        return prompt
    try:
        return placement.in_prompt(prompt, hint)
    except HintError:
        return None


def _before_turn(turn: PlainTurn, hint: str | None, placement: Placement) -> list[int] | None:
    """Everything before a later turn, with the hint at its end; `None` where there is no place for it."""
    plain = [*turn.prompt_ids, *turn.history]
    if hint is None:
        return plain
    assert placement.before_turn is not None
    try:
        return placement.before_turn(plain, hint)
    except HintError:
        return None


def _candidate(turn: PlainTurn, hint: str | None, context: list[int] | None, max_length: int | None) -> HintedTurn:
    if context is None:
        return HintedTurn(drop="no_user_message")
    longest = max(len(context), len(turn.prompt_ids) + len(turn.history)) + turn.length
    return HintedTurn(hint, context) if max_length is None or longest <= max_length else HintedTurn(drop="too_long")


def shortlist(candidates: Sequence[HintedTurn], rule: str, generator: random.Random) -> list[HintedTurn]:
    """The candidates that a teacher has to score: of those that fit, one where a rule of texts decides."""
    fitting = [turn for turn in candidates if turn.context_ids is not None]
    if len(fitting) > 1 and rule in TEXT_RULES:
        return [fitting[TEXT_RULES[rule]([turn.hint or "" for turn in fitting], generator)]]
    return list(candidates)
