"""What the trainers log about hints and gaps. All are collectives."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from .._trl import SeamGRPOTrainer
from ..feedback import step_texts
from ..leakage import leakage_metrics
from ..types import Feedback
from .hint_rows import DROP_REASONS, HintCandidates, HintedTurn
from .teacher_pass import Lesson
from .turns import BatchTurns


def record_candidates(trainer: SeamGRPOTrainer, found: Sequence[HintCandidates]) -> None:
    """Log which share of the hints that were found held control tokens."""
    changed, hinted = _sum(trainer, [sum(hint.had_control_tokens for hint in found), sum(hint.found for hint in found)])
    if hinted:
        trainer.record_metric("hint/control_tokens", changed / hinted)


def record_lesson(trainer: SeamGRPOTrainer, lesson: Lesson, turns: BatchTurns, *, counts_candidates: bool) -> None:
    """Log which share of the turns was accepted, why the rest was dropped, and how many candidates there are."""
    found = lesson.chosen([0] * len(lesson.candidates))
    counts = [sum(one.drop == reason for one in found) for reason in DROP_REASONS]
    numbers = [len(candidates) for candidates in lesson.candidates]
    local = [*counts, sum(numbers), sum(number > 0 for number in numbers), len(found)]
    *dropped, scored, asked, total = _sum(trainer, local)
    accepted = total - sum(dropped)
    trainer.record_metric("hint/accepted", accepted / max(total, 1))
    for reason, count in zip(DROP_REASONS, dropped, strict=True):
        trainer.record_metric(f"hint/dropped/{reason}", count / max(total, 1))
    if asked:
        trainer.record_metric("hint/candidates", scored / asked)
    trainer.record_column("hint_drop", list(map(step_texts, turns.by_row([one.drop for one in found]))))
    if counts_candidates:
        totals = [0] * turns.rows
        for turn, number in zip(turns.turns, numbers, strict=True):
            totals[turn.row] += number
        trainer.record_column("hint_candidates", totals)


class ChoiceRecord:
    """Collects which candidate each turn of a generation batch is taught with, and logs it when all rows are known.

    Micro-batches are compared one after another where the student's states are those of the loss. They come in any
    order; `row_index` says where their rows belong.

    Args:
        lesson: What the teacher knows.
        turns: The turns of the batch.
        feedback: Of the turns, for the texts of prompts and replies.
        batch: The generation batch, before it is compared.
    """

    def __init__(self, lesson: Lesson, turns: BatchTurns, feedback: Sequence[Feedback], batch: dict[str, Any]):
        self.lesson, self.turns, self.feedback = lesson, turns, feedback
        mask = batch["teacher_mask"]
        self.uses_overlap = "candidate_topk_ids" in batch
        self._choice = torch.zeros_like(batch["step_advantages"], dtype=torch.long)
        self._overlap = torch.full(mask.shape, float("nan"), device=mask.device)
        self._open = len(mask)
        self._reserved = False

    @property
    def is_complete(self) -> bool:
        """Whether every row has been added."""
        return self._open == 0

    def add(self, batch: dict[str, Any]) -> None:
        """Take note of rows that were compared."""
        rows = batch["row_index"]
        self._choice[rows] = batch["hint_choice"]
        if self.uses_overlap:
            self._overlap[rows] = batch["hint_overlap"]
        self._open -= len(rows)

    def reserve_columns(self, trainer: SeamGRPOTrainer) -> None:
        """Keep the places of the batch in the completions table, whose columns must be of one length."""
        for name in ("hint", "hint_overlap"):
            trainer.record_column(name, [None] * len(self._choice))
        self._reserved = True

    def record(self, trainer: SeamGRPOTrainer) -> list[HintedTurn]:
        """Log the hints, how well they agree with the student, and whether replies speak of them.

        Returns:
            What each turn is taught with.
        """
        choice = self._choice.tolist()
        chosen = self.lesson.chosen([choice[turn.row][turn.step] for turn in self.turns.turns])
        hints = self.turns.by_row([one.hint for one in chosen])
        trainer.record_column("hint", list(map(step_texts, hints)), replace=self._reserved)
        if self.uses_overlap:
            local = [self._overlap.nansum().item(), self._overlap.isfinite().sum().item()]
            total, tokens = _sum(trainer, local)
            if tokens:
                trainer.record_metric("opd/overlap", total / tokens)
            shares = [None if math.isnan(share) else share for share in self._overlap.nanmean(dim=1).tolist()]
            trainer.record_column("hint_overlap", shares, replace=self._reserved)
        self._record_leakage(trainer, chosen)
        return chosen

    def _record_leakage(self, trainer: SeamGRPOTrainer, chosen: Sequence[HintedTurn]) -> None:
        """Log which share of the replies speaks of hints that the student was never shown."""
        turns = [feedback.turn for feedback in self.feedback]
        replies, prompts = [turn.reply for turn in turns], [turn.prompt_text for turn in turns]
        found = leakage_metrics(replies, [one.hint for one in chosen], prompts)
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
