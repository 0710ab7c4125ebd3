"""Objectives over a support set of k tokens."""

from typing import Any

import torch

from ..losses import topk_reverse_kl, topk_surrogate
from .base import Positions


class TopKSurrogate:
    """`topk_surrogate`: the bounded, clipped surrogate of OpenClaw-RL's second version."""

    uses_support = True
    uses_teacher_states = False
    inputs: tuple[str, ...] = ("support_ids", "support_mask", "old_support_logps", "target_support_logps")

    def __init__(self, args: Any):
        self.logp_gap_clip = args.logp_gap_clip
        self.epsilon_low = args.epsilon
        self.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high

    def token_losses(self, positions: Positions) -> torch.Tensor:
        """See [`~trl_openclaw.losses.topk_surrogate`]."""
        data = positions.data
        return topk_surrogate(
            positions.student.log_probs_at(data["support_ids"]),
            data["old_support_logps"],
            data["target_support_logps"],
            data["support_mask"],
            self.logp_gap_clip,
            self.epsilon_low,
            self.epsilon_high,
        )


class TopKReverseKL:
    """`topk_reverse_kl`: reverse KL over the support and one bin for the rest."""

    uses_support = True
    uses_teacher_states = False
    inputs: tuple[str, ...] = ("support_ids", "support_mask", "target_support_logps")

    def __init__(self, args: Any):
        del args  # has no setting of its own

    def token_losses(self, positions: Positions) -> torch.Tensor:
        """See [`~trl_openclaw.losses.topk_reverse_kl`]."""
        data = positions.data
        current = positions.student.log_probs_at(data["support_ids"])
        return topk_reverse_kl(current, data["target_support_logps"], data["support_mask"])
