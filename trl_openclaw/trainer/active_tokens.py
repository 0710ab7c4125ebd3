"""Which tokens of a batch train: what has no signal leaves the loss and its normaliser. All are collectives."""

from typing import Any

import torch

from .._trl import SeamGRPOTrainer
from .opd_config import ROW_MEAN_LOSSES


def mask_missing_scores(trainer: SeamGRPOTrainer, batch: dict[str, Any], has_score: torch.Tensor) -> None:
    """Take tokens that the teacher could not score out of the loss, unless the row's reward trains them.

    Args:
        trainer: The trainer, for its collectives and its log.
        batch: The generation batch; its `tool_mask` changes.
        has_score (`(B,)`): Rows with a reward advantage.
    """
    policy_mask = _policy_mask(batch)
    missing = ~batch["teacher_mask"] & batch["hint_mask"].unsqueeze(1)
    counted = missing & (batch["completion_mask"] * policy_mask).bool()
    local = torch.stack([counted.sum(), (batch["completion_mask"] * policy_mask)[batch["hint_mask"]].sum()])
    lost, total = trainer.accelerator.gather(local).view(-1, 2).sum(0).tolist()
    trainer.record_metric("teacher/missing_tokens", lost / max(total, 1))
    batch["tool_mask"] = policy_mask * ~(missing & ~has_score.unsqueeze(1))


def keep_rows(trainer: SeamGRPOTrainer, batch: dict[str, Any], signal: torch.Tensor) -> float:
    """Take rows without a signal out of the loss and its normaliser, but leave them in the batch.

    Args:
        trainer: The trainer, for its collectives and its log.
        batch: The generation batch; `tool_mask`, `num_items_in_batch` and `row_scale` are set.
        signal (`(B,)`): Rows that have something to train on.

    Returns:
        The share of the rows of all processes that train.
    """
    if trainer.empty_rows and any(trainer.empty_rows):
        signal = signal & ~torch.tensor(trainer.empty_rows, device=signal.device)
    policy_mask = _policy_mask(batch)
    signal = signal & (batch["completion_mask"] * policy_mask).any(dim=1)
    batch["tool_mask"] = policy_mask * signal.unsqueeze(1).to(policy_mask)
    active_tokens = (batch["completion_mask"] * batch["tool_mask"]).sum()
    counts = torch.stack([active_tokens, signal.sum(), torch.tensor(len(signal), device=signal.device)])
    tokens, active, rows = trainer.accelerator.gather(counts).view(-1, 3).sum(0)
    by_rows = trainer.loss_type in ROW_MEAN_LOSSES
    batch["num_items_in_batch"] = tokens
    batch["row_scale"] = rows / active.clamp(min=1) if by_rows else torch.ones_like(tokens)
    share = (active / rows).item()
    trainer.record_metric("train_rows/share", share)
    return share


def _policy_mask(batch: dict[str, Any]) -> torch.Tensor:
    """The tokens `(B, T)` that the policy wrote itself."""
    return batch.get("tool_mask", torch.ones_like(batch["completion_mask"]))
