"""The rows of a generation batch on their way into micro-batches."""

import math
from typing import Any

import torch
from trl import GRPOTrainer
from trl.trainer.utils import split_tensor_dict

Batch = dict[str, Any]


def exchange_window(trainer: GRPOTrainer) -> int:
    """How many micro-batches in a row may exchange rows, and have a reason to, with the same gradient for each step.

    One, which is none, where something counts within a micro-batch: the tokens that `loss_type="bnpo"` divides by,
    those that `top_entropy_quantile` chooses among, the entropy bonus, the router's load. And where activation
    checkpointing leaves nothing to share.
    """
    args = trainer.args
    within = (
        trainer.loss_type == "bnpo"
        or trainer.top_entropy_quantile < 1.0
        or args.entropy_coef != 0.0
        or args.use_adaptive_entropy
        or trainer.aux_loss_enabled
    )
    if within or args.gradient_checkpointing:
        return 1
    return math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)


def keep_prompts_together(micro_batches: list[Batch], window: int) -> list[Batch]:
    """Exchange rows between shuffled micro-batches so that the rows of a prompt, and prompts of like length, which need
    no padding, are neighbours.

    Prompts of one length stay in the order of their first rows. Batches with images, whose tensors do not have a row
    each, stay as they are.

    Args:
        micro_batches: Of one generation batch and one size, as TRL shuffled and split it.
        window: How many of them, in a row, exchange rows.
    """
    if window == 1 or _holds_images(micro_batches[0]):
        return micro_batches
    starts = range(0, len(micro_batches), window)
    return [batch for start in starts for batch in _side_by_side(micro_batches[start : start + window])]


def _side_by_side(micro_batches: list[Batch]) -> list[Batch]:
    ids, mask = (_joined([batch[name] for batch in micro_batches]) for name in ("prompt_ids", "prompt_mask"))
    group = torch.unique(torch.cat([ids, mask], dim=1), dim=0, return_inverse=True)[1]
    places = torch.arange(len(group), device=group.device)
    first = places.new_full((int(group.max()) + 1,), len(group)).scatter_reduce(0, group, places, "amin")
    order = (mask.sum(dim=1) * len(group) + first[group]).argsort(stable=True)
    if torch.equal(order, places):
        return micro_batches
    # One name after the other, since hidden states of all candidates may be among them.
    ordered = {name: _in_order(_joined([batch[name] for batch in micro_batches]), order) for name in micro_batches[0]}
    return split_tensor_dict(ordered, len(micro_batches))


def _holds_images(batch: Batch) -> bool:
    return any("pixel" in name or name.startswith(("image", "num_")) for name in _per_row(batch))


def _per_row(batch: Batch) -> list[str]:
    """Names of what has an entry for each row."""
    return [name for name, value in batch.items() if isinstance(value, list) or getattr(value, "ndim", 0) > 0]


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], list):
        return [value for part in parts for value in part]
    return torch.cat(parts) if getattr(parts[0], "ndim", 0) > 0 else parts[0]


def _in_order(value: Any, order: torch.Tensor) -> Any:
    if isinstance(value, list):
        return [value[i] for i in order.tolist()]
    return value[order] if getattr(value, "ndim", 0) > 0 else value
