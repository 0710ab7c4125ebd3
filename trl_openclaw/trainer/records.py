"""What the trainers log about hints and gaps. All are collectives."""

import math
from collections.abc import Sequence

import torch

from .._trl import SeamGRPOTrainer
from ..leakage import leakage_metrics
from ..types import Feedback
from .hint_rows import DROP_REASONS, HintCandidates
from .teacher_pass import Lesson


def record_candidates(trainer: SeamGRPOTrainer, found: Sequence[HintCandidates]) -> None:
    """Log which share of the hints that were found held control tokens."""
    changed, hinted = _sum(trainer, [sum(hint.had_control_tokens for hint in found), sum(hint.found for hint in found)])
    if hinted:
        trainer.record_metric("hint/control_tokens", changed / hinted)


def record_lesson(trainer: SeamGRPOTrainer, lesson: Lesson) -> None:
    """Log what was accepted, why the rest was dropped, and what was chosen among how many."""
    counts = [sum(row.drop == reason for row in lesson.rows) for reason in DROP_REASONS]
    candidates = [sum(lesson.candidates), sum(number > 0 for number in lesson.candidates)]
    *dropped, scored, asked, total = _sum(trainer, [*counts, *candidates, len(lesson.rows)])
    accepted = total - sum(dropped)
    trainer.record_metric("hint/accepted", accepted / total)
    for reason, count in zip(DROP_REASONS, dropped, strict=True):
        trainer.record_metric(f"hint/dropped/{reason}", count / total)
    if asked:
        trainer.record_metric("hint/candidates", scored / asked)
    trainer.record_column("hint", [row.hint for row in lesson.rows])
    trainer.record_column("hint_drop", [row.drop for row in lesson.rows])
    if lesson.overlap is not None:
        known = lesson.overlap.isfinite()
        total_overlap, tokens = _sum(trainer, [lesson.overlap.nansum().item(), known.sum().item()])
        if tokens:
            trainer.record_metric("opd/overlap", total_overlap / tokens)
        rows = lesson.overlap.nanmean(dim=1).tolist()
        trainer.record_column("hint_candidates", lesson.candidates)
        trainer.record_column("hint_overlap", [None if math.isnan(value) else value for value in rows])


def record_leakage(trainer: SeamGRPOTrainer, lesson: Lesson, feedback: Sequence[Feedback]) -> None:
    """Log which share of the replies speaks of hints that the student was never shown."""
    prompts = [row.turn.prompt_text for row in feedback]
    found = leakage_metrics([row.turn.reply for row in feedback], [row.hint for row in lesson.rows], prompts)
    sums = _sum(trainer, [number for values in found.values() for number in (sum(values), len(values))])
    for name, total, count in zip(found, sums[::2], sums[1::2], strict=True):
        if count:
            trainer.record_metric(name, total / count)


def record_gap(trainer: SeamGRPOTrainer, local: torch.Tensor) -> None:
    """Log the statistics of this rank's gaps, from `gap_statistics`."""
    world = trainer.accelerator.gather(local).view(-1, len(local))
    total, absolute, clipped, tokens = world[:, :4].sum(0).tolist()
    if tokens:
        trainer.record_metric("opd/gap_mean", total / tokens)
        trainer.record_metric("opd/gap_abs_mean", absolute / tokens)
        trainer.record_metric("opd/gap_abs_max", world[:, 4].max().item())
        trainer.record_metric("opd/clipped", clipped / tokens)


def record_token_losses(trainer: SeamGRPOTrainer, losses: torch.Tensor) -> None:
    """Log the mean of an objective's losses over the positions that have one."""
    total, tokens = _sum(trainer, [losses.sum().item(), losses.numel()])
    if tokens:
        trainer.record_metric("opd/loss", total / tokens)


def _sum(trainer: SeamGRPOTrainer, local: Sequence[float]) -> list[float]:
    """Sums over all ranks."""
    values = torch.tensor(local, dtype=torch.float64, device=trainer.accelerator.device)
    return trainer.accelerator.gather(values).view(-1, len(values)).sum(0).tolist()
