"""From hints to what the teacher reads: one hinted prompt per row, or the reason why there is none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import HintError
from ..hints import insert_hint

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
