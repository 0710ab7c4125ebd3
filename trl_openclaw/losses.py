"""Token advantages as pure functions: tensors in, tensors out. Log-probs are in nats, shapes are `(B, T)`.

The policy loss itself is TRL's own clipped surrogate; only what it multiplies is made here.
"""

import torch


def opd_advantages(
    teacher_per_token_logps: torch.Tensor,
    old_per_token_logps: torch.Tensor,
    mask: torch.Tensor,
    logp_gap_clip: float | None,
) -> torch.Tensor:
    """Sampled-token advantage of hindsight-guided on-policy distillation (OpenClaw-RL, arXiv 2603.10165).

    `A_t = clip(log pi_T(a_t | s + h, a_<t) - log pi_old(a_t | s, a_<t), -C, C)`: positive where the teacher, who has
    seen the hint, likes the sampled token better than the student did, so the student's probability of it rises.

    Args:
        teacher_per_token_logps (`(B, T)`): The teacher's log-probs; anything, even NaN, where `mask` is 0.
        old_per_token_logps (`(B, T)`): The sampling policy's log-probs of the same tokens.
        mask (`(B, T)`): 1 for tokens that have a teacher score and belong to the policy.
        logp_gap_clip: Bound C on the gap, in nats; `None` for none.

    Returns:
        Advantages `(B, T)`, exactly 0 where `mask` is 0, without gradient.
    """
    gap = token_gap(teacher_per_token_logps, old_per_token_logps, mask)
    return gap if logp_gap_clip is None else gap.clamp(-logp_gap_clip, logp_gap_clip)


def token_gap(teacher_per_token_logps: torch.Tensor, old_per_token_logps: torch.Tensor, mask: torch.Tensor):
    """Teacher minus student log-prob `(B, T)`, in nats; exactly 0, never NaN, where `mask` is 0."""
    gap = (teacher_per_token_logps - old_per_token_logps).detach()
    return torch.where(mask.bool(), gap, torch.zeros_like(gap))


def combine_advantages(
    row_advantages: torch.Tensor, token_advantages: torch.Tensor, rl_weight: float, opd_weight: float
) -> torch.Tensor:
    """`A_t = w_rl * r + w_opd * A_t^OPD` (Combine, arXiv 2603.10165).

    Args:
        row_advantages (`(B,)`): The row's reinforcement-learning advantage, 0 where it has no score.
        token_advantages (`(B, T)`): The OPD advantage, 0 where it has no hint.

    Returns:
        Advantages `(B, T)`.
    """
    return rl_weight * row_advantages.unsqueeze(1) + opd_weight * token_advantages


def gap_statistics(gap: torch.Tensor, mask: torch.Tensor, logp_gap_clip: float | None) -> torch.Tensor:
    """Sums from which ranks can form exact means: `[sum gap, sum |gap|, clipped, tokens, max |gap|]`, shape `(5,)`.

    Args:
        gap (`(B, T)`): From `token_gap`, before clipping.
        mask (`(B, T)`): The tokens that count.
        logp_gap_clip: The bound that decides what counts as clipped; `None` counts nothing.
    """
    size = gap.abs()
    clipped = (size > logp_gap_clip).sum() if logp_gap_clip is not None else size.new_zeros(())
    return torch.stack([gap.sum(), size.sum(), clipped.to(gap), mask.sum().to(gap), size.max()])
