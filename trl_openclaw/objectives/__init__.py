"""Distillation objectives: how the difference between student and teacher becomes a loss.

| objective | compares | loss of a position |
|---|---|---|
| `sampled_token` | the sampled token | GRPO's clipped surrogate with the clipped gap as advantage |
| `topk_surrogate` | k tokens | the same, weighted over a support set |
| `topk_reverse_kl` | k tokens and the rest as one | reverse KL |
| `full_divergence` | the vocabulary | reverse KL, forward KL or JSD |

The first needs no loss of its own: its advantages go into the loss that is inherited from TRL. A new objective is one
file with a class like those here, and one line in `OBJECTIVES`.
"""

from collections.abc import Callable
from typing import Any

from .base import Objective, Positions
from .divergence import DIVERGENCES, FullDivergence
from .topk import TopKReverseKL, TopKSurrogate

SAMPLED_TOKEN = "sampled_token"

OBJECTIVES: dict[str, Callable[[Any], Objective] | None] = {
    SAMPLED_TOKEN: None,
    "topk_surrogate": TopKSurrogate,
    "topk_reverse_kl": TopKReverseKL,
    "full_divergence": FullDivergence,
}
"""What `OPDConfig.opd_loss` takes; each is made from the configuration."""


def make_objective(args: Any) -> Objective | None:
    """The objective that `args.opd_loss` names, or `None` for the sampled token."""
    kind = OBJECTIVES[args.opd_loss]
    return kind(args) if kind is not None else None


__all__ = ["DIVERGENCES", "OBJECTIVES", "SAMPLED_TOKEN", "Objective", "Positions", "make_objective"]
