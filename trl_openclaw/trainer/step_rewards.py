"""Process and outcome: what each step of a trajectory is rewarded with. Pure functions; a missing reward is NaN.

The reward of step t is the outcome of its trajectory plus what the judge says of the step itself (OpenClaw-RL, arXiv
2603.10165). Steps are compared with the same step of the other trajectories of their prompt.
"""

import torch

_EPSILON = 1e-4
"""What TRL adds to a standard deviation."""


def outcome_plus_process(outcome: torch.Tensor, process: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
    """The reward of each step.

    Args:
        outcome (`(B,)`): Of the trajectories.
        process (`(B, S)`): Of the single steps.
        exists (`(B, S)`): Which steps there are.

    Returns:
        Outcome plus process `(B, S)`; what is missing of the two adds nothing, and NaN is where both are.
    """
    outcome = outcome.unsqueeze(1).expand_as(process)
    nothing = ~exists | (outcome.isnan() & process.isnan())
    return (outcome.nan_to_num(0.0) + process.nan_to_num(0.0)).masked_fill(nothing, float("nan"))


def standardised(rewards: torch.Tensor, group_size: int, scale_rewards: str) -> torch.Tensor:
    """Rewards against those of the same step in the same group, as TRL does it with the rewards of completions.

    Args:
        rewards (`(N, S)`): Of all processes, the rows of a group side by side.
        group_size: Rows of a prompt.
        scale_rewards: What to divide by: `"group"` (the standard deviation within the group), `"batch"` (that of all
            rows) or `"none"`.

    Returns:
        Advantages `(N, S)`, NaN where there is no reward. A step that one row of its group has alone gets 0.
    """
    groups = rewards.view(-1, group_size, rewards.size(1))
    centred = groups - groups.nanmean(dim=1, keepdim=True)
    if scale_rewards == "group":
        centred = centred / (_nanstd(groups, dim=1) + _EPSILON)
    elif scale_rewards == "batch":
        centred = centred / (_nanstd(rewards, dim=0) + _EPSILON)
    return centred.view_as(rewards)


def _nanstd(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Standard deviation of what is there, with Bessel's correction; 0 of one value."""
    counts = (~values.isnan()).sum(dim=dim, keepdim=True)
    squares = (values - values.nanmean(dim=dim, keepdim=True)).square().nansum(dim=dim, keepdim=True)
    return (squares / (counts - 1).clamp(min=1)).sqrt()
