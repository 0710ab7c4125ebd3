"""What the trainer needs of a teacher."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..scoring import TeacherRow, TeacherScores


class Teacher(Protocol):
    """Re-scores sampled tokens under other prompts.

    `topk` is passed only where hints are chosen by overlap, so a teacher for one hint may do without it. Objectives
    that compare more than the sampled token need a teacher in this process ([`~trl_openclaw.teachers.LocalTeacher`]).
    """

    def score(self, rows: Sequence[TeacherRow], *, topk: int = 0) -> TeacherScores:
        """Score `rows`. A collective: every rank calls it, with as many rows as it has, even none.

        Args:
            topk: How many of the most likely tokens to name at each position (`TeacherScores.topk_ids`).
        """
        ...


class SelfTeacher(Protocol):
    """A kind of teacher that is made from the policy itself."""

    @classmethod
    def build(cls, trainer: Any, scorer: Any, initial: Any) -> Teacher:
        """Make the teacher after TRL's set-up; `initial` is what is left of the policy before it."""
        ...


LOGP_TOLERANCE = 1e-3
"""How far above 0 rounding may lift a log-prob, in nats."""


def problem_with_scores(scores: Any, rows: Sequence[TeacherRow], topk: int = 0) -> str | None:
    """What is wrong with a teacher's answer, or `None`.

    Args:
        scores: The answer.
        rows: What was asked.
        topk: How many of the most likely tokens were asked for.
    """
    if not isinstance(scores, TeacherScores):
        return f"gave {type(scores).__name__}, not `TeacherScores`"
    logps, mask = scores.per_token_logps, scores.mask
    if not isinstance(logps, torch.Tensor) or not isinstance(mask, torch.Tensor):
        return "gave scores that are no tensors"
    if not logps.is_floating_point() or mask.dtype != torch.bool:
        return f"gave log-probs of {logps.dtype} and a mask of {mask.dtype}, not floats and `torch.bool`"
    if len(logps) != len(rows):
        return f"scored {len(logps)} rows, but was given {len(rows)}"
    if not rows:
        return None
    lengths = torch.tensor([len(row.completion_ids) for row in rows], device=mask.device)
    if logps.dim() != 2 or logps.shape != mask.shape or logps.size(1) > lengths.max():
        return (
            f"gave log-probs {tuple(logps.shape)} and a mask {tuple(mask.shape)}, not both ({len(rows)}, T) with at "
            f"most T={int(lengths.max())} tokens"
        )
    if (mask & (torch.arange(mask.size(1), device=mask.device) >= lengths.unsqueeze(1))).any():
        return "has set the mask after the end of a completion"
    ids = scores.topk_ids
    if topk and not (isinstance(ids, torch.Tensor) and ids.dtype == torch.long and ids.shape == (*mask.shape, topk)):
        given = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        return f"gave `topk_ids` {given}, not torch.int64 {(*mask.shape, topk)}"
    found = logps[mask.to(logps.device)]
    if not found.isfinite().all():
        return "gave NaN or infinite log-probs where the mask is set"
    if (found > LOGP_TOLERANCE).any():
        return f"gave a log-prob of {found.max().item():.3g} nats; the logarithm of a probability is never above 0"
    return None
