"""How far the policy in training is from the one that sampled a turn, and whether the engine has the same model."""

from typing import TYPE_CHECKING, Any

import torch

from ...errors import LearnerError

if TYPE_CHECKING:
    from .trainer import LiveTrainer


def record_ratio(trainer: "LiveTrainer", inputs: dict[str, Any], student: torch.Tensor, old: torch.Tensor) -> None:
    """Log the ratios of a micro-batch. A collective.

    Args:
        trainer: The trainer.
        inputs: The micro-batch. `current` `(B,)` says which rows the present version sampled.
        student: The log-probs of the policy in training `(B, T)`.
        old: The recorded ones.

    Raises:
        LearnerError: On every process, when the very weights that sampled give other log-probs here.
    """
    gap = (student.float() - old).detach()
    mask = inputs["completion_mask"].bool()
    same = mask & inputs["current"].unsqueeze(1)
    sums = [gap[mask].exp().sum(), gap[mask].abs().sum(), mask.sum(), gap[same].abs().sum(), same.sum()]
    most = torch.where(mask, gap, -torch.inf).max().exp()
    local = torch.stack([*(value.float() for value in sums), most.float()])
    world = trainer.accelerator.gather(local).view(-1, len(local))
    ratio, distance, tokens, same_gap, same_tokens = world[:, :-1].sum(0).tolist()
    trainer.record_metric("live/ratio_mean", ratio / max(tokens, 1))
    trainer.record_metric("live/ratio_max", world[:, -1].max().item())
    trainer.record_metric("live/log_ratio_abs", distance / max(tokens, 1))
    if same_tokens:
        found, limit = same_gap / same_tokens, trainer.args.max_engine_gap
        trainer.record_metric("live/engine_gap", found)
        if limit is not None and not found <= limit:
            raise LearnerError(
                f"The engine's log-probs of version {trainer.progress.version} differ by {found:.3g} nats in the "
                f"mean from those of the same version here (accepted {limit:g}, `max_engine_gap`): the engine has "
                "loaded another model, or quantized it, or reports log-probs after its sampling settings."
            )
