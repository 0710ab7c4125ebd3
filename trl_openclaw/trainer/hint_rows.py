"""From hints to what the teacher reads: the hinted prompts of each row, or the reason why there is none."""

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
]
"""`no_hint`: nobody had one. `no_feedback`: the judge or the next state failed. `unreadable_hint`: the privileged
context is no text. `no_user_message`: no place for it. `too_long`: the hinted prompt and the completion do not fit into
the teacher's window. `no_teacher_score`: the teacher had no finite log-prob for it. `empty_completion`: nothing was
sampled. `masked_completion`: TRL masked the truncated completion (`mask_truncated_completions`)."""

DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)


@dataclass(frozen=True)
class HintCandidates:
    """What a row may be taught with, before anything is placed, or why there is nothing.

    Args:
        texts: The candidates, cleaned. `None` among them: the plain prompt, for a teacher that needs no hint.
        drop: Why there are none, or `None`.
        found: Whether anybody had a hint for the row, before cleaning.
        had_control_tokens: Whether such a hint held special tokens, which were removed.
    """

    texts: tuple[str | None, ...] = ()
    drop: DropReason | None = None
    found: bool = False
    had_control_tokens: bool = False


def find_hints(
    source: str, row: Mapping[str, Any], feedback: Feedback | None, special_tokens: Collection[str]
) -> HintCandidates:
    """Take a row's hints from where they come from, and clean them. A privileged context keeps its layout.

    Args:
        source: `"judge"`, `"privileged_context"`, or `"none"` where the teacher needs no hint.
        row: The dataset's row.
        feedback: What the judge said about the row; only hints of the judge need it.
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
class HintedRow:
    """One row as the teacher may see it.

    Args:
        hint: The hint; `None` when the row was dropped, or is scored without a hint.
        prompt_ids: Ids of the hinted prompt, or `None` when dropped.
        drop: Why there is nothing to score, or `None`.
    """

    hint: str | None = None
    prompt_ids: list[int] | None = None
    drop: DropReason | None = None


def render_candidates(
    prompts: Sequence[Any],
    plain_ids: Sequence[Sequence[int]],
    hints: Sequence[HintCandidates],
    completion_lengths: Sequence[int],
    *,
    tokenize: Callable[[list, list[int]], list[list[int]]],
    place: Callable[[Any, str], Any],
    max_length: int | None,
) -> list[list[HintedRow]]:
    """Place all candidates and tokenize the prompts, exactly as the sampled prompts were. All in one call.

    Args:
        prompts: The prompts that were sampled from, one per row.
        plain_ids: Their ids, which a prompt without a hint in it has, too.
        hints: The candidates of each row.
        completion_lengths: Tokens sampled per row.
        tokenize: Renders and tokenizes prompts, given the rows that they belong to.
        place: Puts a hint into a prompt, or gives back the prompt itself.
        max_length: The window of teacher and reference in tokens, if known. A row that is longer, with the hint or
            without it, is dropped, never cut.

    Returns:
        The rendered candidates of each row, at least one; a dropped one says why.
    """
    placed = [[_placed(prompt, hint, place) for hint in row.texts] for prompt, row in zip(prompts, hints, strict=True)]
    changed = [
        (i, prompt)
        for i, found in enumerate(placed)
        for prompt in found
        if prompt is not None and prompt is not prompts[i]
    ]
    ids = iter(tokenize([prompt for _, prompt in changed], [i for i, _ in changed]))
    rendered: list[list[HintedRow]] = []
    for i, row in enumerate(hints):
        room = None if max_length is None else max_length - completion_lengths[i]
        found = []
        for hint, prompt in zip(row.texts, placed[i], strict=True):
            if prompt is None:
                found.append(HintedRow(drop="no_user_message"))
                continue
            prompt_ids = list(plain_ids[i] if prompt is prompts[i] else next(ids))
            fits = room is None or max(len(prompt_ids), len(plain_ids[i])) <= room
            found.append(HintedRow(hint, prompt_ids) if fits else HintedRow(drop="too_long"))
        rendered.append([HintedRow(drop=row.drop)] if row.drop else found)
    return rendered


def _placed(prompt: Any, hint: str | None, place: Callable[[Any, str], Any]) -> Any:
    """The prompt with the hint in it; the prompt itself without one; `None` where there is no place for it."""
    if hint is None:
        return prompt
    try:
        return place(prompt, hint)
    except HintError:
        return None


def shortlist(candidates: Sequence[HintedRow], rule: str, generator: random.Random) -> list[HintedRow]:
    """The candidates that a teacher has to score: of those that fit, one where a rule of texts decides."""
    fitting = [row for row in candidates if row.prompt_ids is not None]
    if len(fitting) > 1 and rule in TEXT_RULES:
        return [fitting[TEXT_RULES[rule]([row.hint or "" for row in fitting], generator)]]
    return list(candidates)
