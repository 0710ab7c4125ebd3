"""Token advantages and token losses as pure functions: tensors in, tensors out. Log-probs are in nats.

With sampled tokens the policy loss is TRL's own clipped surrogate, and only the advantages it multiplies are made here.
With the k tokens of a support set, the loss of a position is made here.
"""

import torch


def opd_advantages(
    teacher_per_token_logps: torch.Tensor,
    old_per_token_logps: torch.Tensor,
    mask: torch.Tensor,
    logp_gap_clip: float | None,
    extrapolation: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sampled-token advantage of hindsight-guided on-policy distillation (OpenClaw-RL, arXiv 2603.10165).

    `A_t = clip(log pi_T(a_t | s + h, a_<t) - log pi_old(a_t | s, a_<t), -C, C)`: positive where the teacher, who has
    seen the hint, likes the sampled token better than the student did, so the student's probability of it rises.

    Args:
        teacher_per_token_logps (`(B, T)`): The teacher's log-probs; anything, even NaN, where `mask` is 0.
        old_per_token_logps (`(B, T)`): The sampling policy's log-probs of the same tokens.
        mask (`(B, T)`): 1 for tokens that have a teacher score and belong to the policy.
        logp_gap_clip: Bound C on the gap, in nats; `None` for none.
        extrapolation (`(B, T)`, *optional*): From [`extrapolation`]; joins the gap before it is clipped.

    Returns:
        Advantages `(B, T)`, exactly 0 where `mask` is 0, without gradient.
    """
    target = teacher_per_token_logps if extrapolation is None else teacher_per_token_logps + extrapolation
    gap = token_gap(target, old_per_token_logps, mask)
    return gap if logp_gap_clip is None else gap.clamp(-logp_gap_clip, logp_gap_clip)


def token_gap(teacher_per_token_logps: torch.Tensor, old_per_token_logps: torch.Tensor, mask: torch.Tensor):
    """Teacher minus student log-prob `(B, T)`, in nats; exactly 0, never NaN, where `mask` is 0."""
    gap = (teacher_per_token_logps - old_per_token_logps).detach()
    return torch.where(mask.bool(), gap, torch.zeros_like(gap))


def extrapolation(teacher_logps: torch.Tensor, reference_logps: torch.Tensor, reward_scale: float) -> torch.Tensor:
    """What G-OPD (arXiv 2602.12125) adds to the gap: `(lambda - 1) (log pi_T - log pi_ref)`, any shape.

    With it the optimum is `log pi = lambda log pi_T + (1 - lambda) log pi_ref + const`: `lambda = 1` imitates the
    teacher, `lambda > 1` goes on in the direction from the reference to the teacher.
    """
    return (reward_scale - 1) * (teacher_logps - reference_logps)


def topk_surrogate(
    per_token_logps: torch.Tensor,
    old_per_token_logps: torch.Tensor,
    target_logps: torch.Tensor,
    support_mask: torch.Tensor,
    logp_gap_clip: float | None,
    epsilon_low: float,
    epsilon_high: float,
) -> torch.Tensor:
    """Clipped surrogate over a support set of k tokens (OpenClaw-RL's second version, arXiv 2603.10165).

    With `w = softmax(l_old)` over the support, `D = clip(l_T - l_old, -C, C)`, `A = w D` and `rho = exp(l - l_old)`,
    the loss of a position is `sum_v max(-A rho, -A clip(rho, 1 - eps_low, 1 + eps_high))`.

    Args:
        per_token_logps (`(..., k)`): The current policy's log-probs, over the whole vocabulary, with gradient.
        old_per_token_logps (`(..., k)`): The sampling policy's.
        target_logps (`(..., k)`): The teacher's, with what [`extrapolation`] adds to them.
        support_mask (`(..., k)`): Which of the k belong to the support; the others may hold anything, even NaN.
        logp_gap_clip: Bound C on the gap, in nats; `None` for none.
        epsilon_low: Lower clip of the ratio, minus one.
        epsilon_high: Upper clip of the ratio, minus one.

    Returns:
        Losses `(...)`; exactly 0 where the support is empty.
    """
    old_per_token_logps = old_per_token_logps.detach()
    with torch.no_grad():
        inside = support_mask.bool()
        weights = torch.softmax(old_per_token_logps.masked_fill(~inside, float("-inf")), dim=-1)
        weights = weights.masked_fill(~inside, 0.0)  # also where nothing is inside, and softmax gave NaN
        gap = (target_logps - old_per_token_logps).masked_fill(~inside, 0.0)
        if logp_gap_clip is not None:
            gap = gap.clamp(-logp_gap_clip, logp_gap_clip)
        advantages = weights * gap
    log_ratio = (per_token_logps - old_per_token_logps).masked_fill(~inside, 0.0)
    ratio = torch.exp(log_ratio.clamp(max=20.0))  # beyond, exp overflows, and 0 times infinity is no number
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    return torch.maximum(-advantages * ratio, -advantages * clipped).sum(dim=-1)


def topk_reverse_kl(
    per_token_logps: torch.Tensor, target_logps: torch.Tensor, support_mask: torch.Tensor
) -> torch.Tensor:
    """Reverse KL `KL(student || teacher)` over the support set and one bin for all other tokens.

    The bin holds the rest of each distribution's mass, so the divergence cannot fall by moving mass out of the support;
    it is never negative, at most the full KL, and equal to it when the support is the whole vocabulary.

    Args:
        per_token_logps (`(..., k)`): The student's log-probs, over the whole vocabulary, with gradient.
        target_logps (`(..., k)`): The teacher's.
        support_mask (`(..., k)`): Which of the k belong to the support; the others may hold anything, even NaN.

    Returns:
        Divergences `(...)` in nats; 0 where the support is empty.
    """
    target_logps = target_logps.detach()
    outside = ~support_mask.bool()
    mass, target_mass = (logps.masked_fill(outside, float("-inf")).exp() for logps in (per_token_logps, target_logps))
    gap = (per_token_logps - target_logps).masked_fill(outside, 0.0)
    divergence = (mass * gap).sum(dim=-1)
    tiny = torch.finfo(mass.dtype).eps
    tail, target_tail = ((1 - part.sum(dim=-1)).clamp(min=tiny) for part in (mass, target_mass))
    return (divergence + tail * (tail.log() - target_tail.log())).clamp(min=0.0)


def combine_advantages(
    reward_advantages: torch.Tensor, token_advantages: torch.Tensor, rl_weight: float, opd_weight: float
) -> torch.Tensor:
    """`A_t = w_rl * r + w_opd * A_t^OPD` (Combine, arXiv 2603.10165).

    Args:
        reward_advantages (`(B, T)`): The reinforcement-learning advantage, 0 where a turn has no score.
        token_advantages (`(B, T)`): The OPD advantage, 0 where it has no hint.

    Returns:
        Advantages `(B, T)`.
    """
    return rl_weight * reward_advantages + opd_weight * token_advantages


def gap_statistics(
    gap: torch.Tensor, bounded: torch.Tensor, mask: torch.Tensor, logp_gap_clip: float | None
) -> torch.Tensor:
    """Sums from which ranks can form exact means: `[sum gap, sum |gap|, clipped, tokens, max |gap|]`, shape `(5,)`.

    Args:
        gap (`(B, T)`): From `token_gap`.
        bounded (`(B, T)`): What is clipped: the gap, with what [`extrapolation`] adds to it.
        mask (`(B, T)`): The tokens that count.
        logp_gap_clip: The bound that decides what counts as clipped; `None` counts nothing.
    """
    size = gap.abs()
    clipped = (bounded.abs() > logp_gap_clip).sum() if logp_gap_clip is not None else size.new_zeros(())
    return torch.stack([gap.sum(), size.sum(), clipped.to(gap), mask.sum().to(gap), size.max()])
