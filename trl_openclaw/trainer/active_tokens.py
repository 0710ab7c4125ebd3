"""Which tokens of a batch train: what has no signal leaves the loss and its normaliser. All are collectives."""

from typing import Any

import torch

from .._trl import SeamGRPOTrainer
from .opd_config import ROW_MEAN_LOSSES
from .turns import turn_masks


def record_missing_scores(trainer: SeamGRPOTrainer, batch: dict[str, Any]) -> None:
    """Log which share of the tokens of hinted turns the teacher could not score.

    Args:
        trainer: The trainer, for its collectives and its log.
        batch: The generation batch.
    """
    turns = turn_masks(batch["turn_index"], batch["step_advantages"].size(1))
    hinted = (turns & (turns & batch["teacher_mask"].unsqueeze(1)).any(dim=2, keepdim=True)).any(dim=1)
    policy = (batch["completion_mask"] * _policy_mask(batch)).bool() & hinted
    local = torch.stack([(policy & ~batch["teacher_mask"]).sum(), policy.sum()])
    lost, total = trainer.accelerator.gather(local).view(-1, 2).sum(0).tolist()
    trainer.record_metric("teacher/missing_tokens", lost / max(total, 1))


def keep_tokens(trainer: SeamGRPOTrainer, batch: dict[str, Any], signal: torch.Tensor) -> float:
    """Take tokens without a signal out of the loss and its normaliser, but leave them in the batch.

    Args:
        trainer: The trainer, for its collectives and its log.
        batch: The generation batch; `tool_mask`, `num_items_in_batch` and `row_scale` are set.
        signal (`(B, T)`): Tokens that have something to train on.

    Returns:
        The share of the rows of all processes that train.
    """
    if trainer.empty_rows and any(trainer.empty_rows):
        signal = signal & ~torch.tensor(trainer.empty_rows, device=signal.device).unsqueeze(1)
    policy_mask = _policy_mask(batch)
    batch["tool_mask"] = policy_mask * signal.to(policy_mask)
    tokens = batch["completion_mask"] * batch["tool_mask"]
    rows_active = tokens.any(dim=1).sum()
    counts = torch.stack([tokens.sum(), rows_active, torch.tensor(len(signal), device=signal.device)])
    total, active, rows = trainer.accelerator.gather(counts).view(-1, 3).sum(0)
    by_rows = trainer.loss_type in ROW_MEAN_LOSSES
    batch["num_items_in_batch"] = total
    batch["row_scale"] = rows / active.clamp(min=1) if by_rows else torch.ones_like(total)
    share = (active / rows).item()
    trainer.record_metric("train_rows/share", share)
    return share


def _policy_mask(batch: dict[str, Any]) -> torch.Tensor:
    """The tokens `(B, T)` that the policy wrote itself."""
    return batch.get("tool_mask", torch.ones_like(batch["completion_mask"]))
