"""How far the policy in training is from the one that sampled a turn, and whether the engine has the same model."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...errors import LearnerError
from .measure import Logps, mean

if TYPE_CHECKING:
    from .desk import LiveBatch
    from .rollouts import LiveTurn
    from .trainer import LiveTrainer

FAR = 3.0
"""Nats per token, in the mean, that versions a few steps apart do not differ by. Ids that nobody sampled do."""


def strange_turns(trainer: "LiveTrainer", batch: "LiveBatch", now: Logps) -> dict[str, str]:
    """The turns of a batch whose recorded log-probs are not those of their ids, by id, and why in a word.

    Turns that the present version sampled may differ by `max_engine_gap`; those of earlier versions, which are other
    weights, by `FAR`.

    Args:
        trainer: The trainer, between two steps.
        batch: The same batch on all processes.
        now: The log-probs that the policy has for its turns now.

    Raises:
        LearnerError: On every process, when more than one of the present version's turns differ, and more than agree,
            or the only one in each of two batches: then it is the engine that differs.
    """
    limit, present = trainer.args.max_engine_gap, trainer.progress.version
    if limit is None:
        return {}
    gaps = {
        one.turn.turn_id: mean([abs(a - b) for a, b in zip(now[one.turn.turn_id], one.turn.logprobs, strict=True)])
        for one in batch.turns
    }
    limits = {one.turn.turn_id: limit if one.turn.model_version == present else max(limit, FAR) for one in batch.turns}
    strange = {turn_id for turn_id, gap in gaps.items() if not gap <= limits[turn_id]}
    own = [one.turn.turn_id for one in batch.turns if one.turn.model_version == present]
    bad = strange.intersection(own)
    if bad and (trainer.saw_stranger if len(own) == 1 else 2 * len(bad) > len(own)):
        raise LearnerError(
            f"The engine's log-probs of version {present} differ by {mean([gaps[one] for one in own]):.3g} nats in the "
            f"mean from those of the same version here, for {len(bad)} of {len(own)} turns by more than {limit:g} "
            "(`max_engine_gap`): the engine has loaded another model, or quantized it, or reports log-probs after its "
            "sampling settings."
        )
    if own:
        trainer.saw_stranger = bool(bad) and len(own) == 1
    return dict.fromkeys(strange, "other_logprobs")


def record_sampling(trainer: "LiveTrainer", turns: Sequence["LiveTurn"]) -> None:
    """Log how old a batch's turns are, and which share a `top_p` below 1 has cut the tail off. A collective.

    Such replies come from another distribution than the one whose log-probs are compared: where the tail was cut,
    tokens were likelier than recorded, and none of those that were left out is ever learned from. That is said once.

    Args:
        trainer: The trainer.
        turns: This process's.
    """
    known = [[float(one.turn.lag), float((one.turn.sampling.get("top_p") or 1.0) < 1.0)] for one in turns]
    lags, cut = trainer.accelerator.gather(torch.tensor(known, device=trainer.accelerator.device)).T
    trainer.record_metric("live/lag_mean", lags.mean().item())
    trainer.record_metric("live/lag_max", lags.max().item())
    trainer.record_metric("live/top_p_share", cut.mean().item())
    if cut.any():
        warnings.warn(
            "Replies were sampled with `top_p` below 1 (`live/top_p_share`), so their log-probs are not those of the "
            "distribution that they come from, and what is learned from them is biased. Clients should leave it at 1.",
            stacklevel=2,
        )


def record_ratio(trainer: "LiveTrainer", inputs: dict[str, Any], student: torch.Tensor, old: torch.Tensor) -> None:
    """Log the ratios of a micro-batch. A collective.

    Args:
        trainer: The trainer.
        inputs: The micro-batch. `current` `(B,)` says which rows the present version sampled.
        student: The log-probs of the policy in training `(B, T)`.
        old: The recorded ones.
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
        trainer.record_metric("live/engine_gap", same_gap / same_tokens)
