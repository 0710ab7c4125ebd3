"""From hints to what the teacher reads: one hinted prompt per row, or the reason why there is none."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import HintError
from ..hints import clean_hint, insert_hint, longest_hint, without_special_tokens
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
class ChosenHint:
    """A row's hint before it is placed, or why there is none.

    Args:
        text: The hint, cleaned; `None` where there is none, or none is needed.
        drop: Why there is none although one is needed, or `None`.
        found: Whether anybody had a hint for the row, before cleaning.
        had_control_tokens: Whether such a hint held special tokens, which were removed.
    """

    text: str | None = None
    drop: DropReason | None = None
    found: bool = False
    had_control_tokens: bool = False


def choose_hint(source: str, row: Mapping[str, Any], feedback: Feedback, special_tokens: Collection[str]) -> ChosenHint:
    """Take a row's hint from where it comes from, clean it, and choose the longest.

    Args:
        source: `"judge"`, `"privileged_context"`, or `"none"` where the teacher needs no hint.
        row: The dataset's row.
        feedback: What the judge said about the row.
        special_tokens: What a hint must not hold, since the chat template gives it a meaning.
    """
    if source == "none":
        return ChosenHint()
    found = feedback.hints if source == "judge" else row.get("privileged_context")
    if isinstance(found, str) or found is None:
        found = [found] if found else []
    elif source == "privileged_context":
        return ChosenHint(drop="unreadable_hint")
    plain = [without_special_tokens(hint, special_tokens) for hint in found]
    changed = any(hint != without_special_tokens(raw, ()) for raw, hint in zip(found, plain, strict=True))
    hints = [hint for hint in map(clean_hint, plain) if hint]
    missing: DropReason = "no_feedback" if source == "judge" and feedback.failure is not None else "no_hint"
    return ChosenHint(longest_hint(hints) if hints else None, None if hints else missing, bool(found), changed)


@dataclass(frozen=True)
class HintedRow:
    """One row as the teacher will see it.

    Args:
        hint: The accepted hint; `None` when the row was dropped, or is scored without a hint.
        prompt_ids: Ids of the hinted prompt, or `None` when dropped.
        drop: Why there is nothing to score, or `None`.
    """

    hint: str | None = None
    prompt_ids: list[int] | None = None
    drop: DropReason | None = None


def render_hinted_rows(
    prompts: Sequence[Any],
    hints: Sequence[str | None],
    drops: Sequence[DropReason | None],
    completion_lengths: Sequence[int],
    *,
    tokenize: Callable[[list], list[list[int]]],
    placement: str,
    template: str,
    max_length: int | None,
) -> list[HintedRow]:
    """Place the hints and tokenize the prompts in one call, exactly as the sampled prompts were.

    Args:
        prompts: The prompts that were sampled from, one per row.
        hints: The hint of each row; `None` scores the plain prompt.
        drops: Rows that are out already, and why.
        completion_lengths: Tokens sampled per row.
        tokenize: Renders and tokenizes one prompt per row.
        max_length: The teacher's window in tokens, if known. A longer row is dropped, never cut.
    """
    texts, reasons = list(prompts), list(drops)
    for i, hint in enumerate(hints):
        if reasons[i] is None and hint is not None:
            try:
                texts[i] = insert_hint(prompts[i], hint, placement, template)
            except HintError:
                reasons[i] = "no_user_message"
    if all(reasons):
        return [HintedRow(drop=reason) for reason in reasons]
    rows = []
    for ids, hint, reason, length in zip(tokenize(texts), hints, reasons, completion_lengths, strict=True):
        if reason is None and max_length is not None and len(ids) + length > max_length:
            reason = "too_long"
        rows.append(HintedRow(drop=reason) if reason else HintedRow(hint, list(ids)))
    return rows
