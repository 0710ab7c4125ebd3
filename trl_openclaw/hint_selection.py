"""Which of several hint candidates a row, or a token, is taught with. Ties go to the candidate that came first."""

import random
from collections.abc import Callable, Sequence

import torch

SUPPORTS = ("student", "teacher", "overlap")

TEXT_RULES: dict[str, Callable[[Sequence[str], random.Random], int]] = {
    "longest": lambda hints, _: max(range(len(hints)), key=lambda i: len(hints[i])),
    "shortest": lambda hints, _: min(range(len(hints)), key=lambda i: len(hints[i])),
    "random": lambda hints, generator: generator.randrange(len(hints)),
}
"""Rules that look at the texts alone, before any teacher has scored."""

OVERLAP_RULES = ("sequence", "token")
"""Rules that compare the best tokens of teacher and student, so that every candidate is scored first."""


def topk_overlap(student_ids: torch.Tensor, teacher_ids: torch.Tensor) -> torch.Tensor:
    """Share of the student's best k tokens that are also among the teacher's best k.

    Args:
        student_ids (`(..., k)`): Distinct token ids.
        teacher_ids (`(..., k)`): Distinct token ids; leading dimensions broadcast.

    Returns:
        Shares in `[0, 1]`, shape `(...)`.
    """
    return is_in(student_ids, teacher_ids).float().mean(dim=-1)


def is_in(ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Which of `ids` `(..., k)` are among `others` `(..., j)`, position by position: `(..., k)`."""
    return (ids.unsqueeze(-1) == others.unsqueeze(-2)).any(dim=-1)


def select_by_overlap(overlap: torch.Tensor, mask: torch.Tensor, rule: str) -> torch.Tensor:
    """The candidate with the largest overlap with the student, among M.

    Args:
        overlap (`(..., M, T)`): Overlap of each candidate's teacher with the student, per token.
        mask (`(..., M, T)`): Where the candidate has a score. One without any is chosen only if all are without.
        rule: `"sequence"`: one candidate for the whole row, by its mean overlap. `"token"`: one per token.

    Returns:
        The chosen candidate of each token, `(..., T)`.
    """
    if rule == "token":
        return overlap.masked_fill(~mask, -1.0).argmax(dim=-2)
    counts = mask.sum(dim=-1)
    means = (overlap.double() * mask).sum(dim=-1) / counts.clamp(min=1)
    best = means.masked_fill(counts == 0, -1.0).argmax(dim=-1)
    return best.unsqueeze(-1).expand(*best.shape, overlap.size(-1))


def alike(mask: torch.Tensor) -> torch.Tensor:
    """The candidates that one can be chosen from for a whole row, without a token losing its score by the choice.

    Args:
        mask (`(..., M, T)`): Where a candidate has a score.

    Returns:
        Those with scores for the most tokens, `(..., M)`; where these differ, those like the first of them.
    """
    fullest = mask.sum(dim=-1).argmax(dim=-1)
    first = mask.take_along_dim(fullest[..., None, None], dim=-2)
    return (mask == first).all(dim=-1)


def support(student_ids: torch.Tensor, teacher_ids: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that a top-k objective compares.

    Args:
        student_ids (`(..., k)`): The student's best tokens.
        teacher_ids (`(..., k)`): The teacher's best tokens.
        kind: `"student"`, `"teacher"`, or `"overlap"` (those of the student that are also the teacher's).

    Returns:
        Ids and mask, both `(..., k)`.
    """
    if kind == "overlap":
        return student_ids, is_in(student_ids, teacher_ids)
    ids = student_ids if kind == "student" else teacher_ids
    return ids, torch.ones_like(ids, dtype=torch.bool)
