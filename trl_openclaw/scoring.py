"""Log-probs of given tokens under given prompts: the one place where a local teacher's forward pass happens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn

from ._trl import completion_positions_only, pad


@dataclass(frozen=True)
class TeacherRow:
    """What a teacher scores: the sampled ids, never re-encoded, after the ids of a (hinted) prompt."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]


@dataclass(frozen=True)
class TeacherScores:
    """A teacher's answer for N rows.

    Args:
        per_token_logps (`(N, T)`): Log-probs in nats, float32; NaN where there is no token.
        mask (`(N, T)`): Which entries are real and finite. A log-prob that is not finite is missing, not a number.
    """

    per_token_logps: torch.Tensor
    mask: torch.Tensor


class TokenScorer:
    """Scores rows in micro-batches, the same number of them on every rank.

    Args:
        accelerator: Device, autocast and collectives, the student's own.
        pad_token_id: Filler outside the masks; its value changes no number.
        batch_size: Rows per forward pass.
    """

    def __init__(self, accelerator: Accelerator, pad_token_id: int, batch_size: int):
        self.accelerator = accelerator
        self.pad_token_id = pad_token_id
        self.batch_size = batch_size

    @torch.no_grad()
    def score(self, model: nn.Module, rows: Sequence[TeacherRow]) -> TeacherScores:
        """Score `rows` with `model`, whose LM head TRL has fused. A collective: every rank must call it.

        A rank with fewer rows than another runs the missing forwards on a filler row, since a sharded model answers
        only when all ranks ask.
        """
        width = max((len(row.completion_ids) for row in rows), default=0)
        logps = torch.full((len(rows), width), float("nan"), device=self.accelerator.device)
        # Rows of like length share a micro-batch, which saves padding; the order of the answer is the caller's.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].prompt_ids) + len(rows[i].completion_ids))
        filler = [TeacherRow([self.pad_token_id], [self.pad_token_id])]
        with _evaluating(model):
            for index in range(self._num_batches(len(rows))):
                chosen = order[index * self.batch_size : (index + 1) * self.batch_size]
                scored = self._score_batch(model, [rows[i] for i in chosen] or filler)
                for i, row_logps in zip(chosen, scored, strict=False):
                    length = len(rows[i].completion_ids)
                    logps[i, :length] = row_logps[:length]
        return TeacherScores(logps, logps.isfinite())

    def _num_batches(self, num_rows: int) -> int:
        local = torch.tensor([-(-num_rows // self.batch_size)], device=self.accelerator.device)
        return int(self.accelerator.gather(local).max())

    def _score_batch(self, model: nn.Module, rows: Sequence[TeacherRow]) -> torch.Tensor:
        prompts = [torch.tensor(row.prompt_ids) for row in rows]
        completions = [torch.tensor(row.completion_ids) for row in rows]
        device = self.accelerator.device
        prompt_mask = pad([torch.ones_like(ids) for ids in prompts], 0, padding_side="left")
        completion_mask = pad([torch.ones_like(ids) for ids in completions], 0, padding_side="right")
        input_ids = torch.cat(
            [
                pad(prompts, self.pad_token_id, padding_side="left"),
                pad(completions, self.pad_token_id, padding_side="right"),
            ],
            dim=1,
        ).to(device)
        attention_mask = torch.cat([prompt_mask, completion_mask], dim=1).to(device)
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        labels[:, : prompt_mask.size(1)] = -100
        kwargs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        keep = completion_mask.size(1)
        unwrapped = self.accelerator.unwrap_model(model)
        with self.accelerator.autocast(), completion_positions_only(unwrapped, kwargs, keep):
            outputs = model(**kwargs, fused_lm_head=True)
        return outputs.log_probs[:, -keep:].float()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Score without dropout and without activation checkpointing, whatever the model was doing."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
