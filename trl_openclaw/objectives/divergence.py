"""Objectives over the whole vocabulary."""

from typing import Any

import torch

from ..lm_head import full_divergence
from .base import Positions

DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")


class FullDivergence:
    """`full_divergence`: reverse KL, forward KL or generalised JSD, without logits of the whole batch in memory."""

    uses_support = False
    uses_teacher_states = True
    inputs: tuple[str, ...] = ("teacher_hidden",)

    def __init__(self, args: Any):
        self.beta = {"reverse_kl": 1.0, "forward_kl": 0.0, "jsd": args.jsd_beta}[args.divergence]

    def token_losses(self, positions: Positions) -> torch.Tensor:
        """See [`~trl_openclaw.lm_head.full_divergence`]."""
        assert positions.teacher_head is not None, "the trainer keeps the head of the states it keeps"
        return full_divergence(positions.student, positions.data["teacher_hidden"], positions.teacher_head, self.beta)
