"""Token advantages, with numbers worked by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_openclaw.losses import (
    combine_advantages,
    extrapolation,
    gap_statistics,
    opd_advantages,
    token_gap,
    topk_reverse_kl,
    topk_surrogate,
)

NAN = float("nan")
LN2 = math.log(2)


def test_advantage_is_the_clipped_gap_in_nats():
    # The teacher gives the tokens probability 0.5 and 0.1, the student 0.25 and 0.4.
    teacher = torch.tensor([[math.log(0.5), math.log(0.1)]])
    student = torch.tensor([[math.log(0.25), math.log(0.4)]])
    mask = torch.ones(1, 2)
    # ln 2 = 0.693 stays, ln(1/4) = -1.386 is cut at -1.
    assert opd_advantages(teacher, student, mask, 1.0).tolist() == [[pytest.approx(math.log(2)), -1.0]]
    assert opd_advantages(teacher, student, mask, None)[0, 1].item() == pytest.approx(-math.log(4))


def test_missing_scores_are_absent_not_zero_log_probs():
    teacher = torch.tensor([[NAN, -1.0], [NAN, NAN]])
    student = torch.tensor([[-2.0, -1.5], [-3.0, -3.0]])
    mask = torch.tensor([[0, 1], [0, 0]])
    # A teacher log-prob read as 0.0 would give +1 (clipped from +2) at the first place.
    assert opd_advantages(teacher, student, mask, 1.0).tolist() == [[0.0, 0.5], [0.0, 0.0]]


def test_advantages_carry_no_gradient():
    student = torch.tensor([[-1.0]], requires_grad=True)
    assert not opd_advantages(torch.tensor([[-0.5]]), student, torch.ones(1, 1), 1.0).requires_grad


def test_combine_adds_the_row_reward_to_every_token():
    rows, tokens = torch.tensor([[1.0], [-1.0], [0.0]]), torch.tensor([[0.5, -0.5], [0.0, 0.0], [1.0, -1.0]])
    combined = combine_advantages(rows, tokens, rl_weight=2.0, opd_weight=0.5)
    assert combined.tolist() == [[2.25, 1.75], [-2.0, -2.0], [0.5, -0.5]]


def test_gap_statistics_by_hand():
    gap, mask = torch.tensor([[2.0, -0.5], [0.0, 0.0]]), torch.tensor([[1, 1], [0, 0]])
    assert gap_statistics(gap, gap, mask, 1.0).tolist() == [1.5, 2.5, 1.0, 2.0, 2.0]
    assert gap_statistics(gap, 4 * gap, mask, 1.0).tolist() == [1.5, 2.5, 2.0, 2.0, 2.0]  # what is clipped, of G-OPD


def test_surrogate_of_a_token_that_came_out_of_nowhere_is_finite():
    old = torch.tensor([[-0.1, -2.4, -120.0]])
    new = torch.tensor([[-0.1, -2.4, -20.0]], requires_grad=True)
    target = torch.tensor([[-1.0, -2.0, -3.0]])
    loss = topk_surrogate(new, old, target, torch.ones(1, 3), 1.0, 0.2, 0.28)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert new.grad.isfinite().all()


@given(
    st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.booleans()), min_size=1, max_size=20),
    st.floats(0.01, 10),
)
def test_bounded_signed_and_zero_outside_the_mask(rows, clip):
    teacher, student, mask = (torch.tensor([column]) for column in zip(*rows, strict=True))
    advantages = opd_advantages(teacher, student, mask, clip)
    assert advantages.abs().max() <= clip + 1e-6
    assert (advantages[~mask] == 0).all()
    assert (advantages * token_gap(teacher, student, mask) >= 0).all()


# Objectives over a support set


def log_probs(*probabilities):
    """Log-probs of distributions given as fractions."""
    return torch.tensor(probabilities, dtype=torch.float64).log()


def random_case(seed=0, positions=6, vocabulary=11, k=4):
    """Logits `(N, V)` of student, old policy and teacher, a support `(N, k)` of distinct tokens, and its mask."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn((positions, vocabulary), generator=generator, dtype=torch.float64)

    old = 2 * normal()
    student, teacher = old + 0.4 * normal(), old + normal()
    ids = torch.rand((positions, vocabulary), generator=generator).argsort(dim=-1)[:, :k]
    mask = torch.rand((positions, k), generator=generator) < 0.7
    return student.requires_grad_(), old, teacher, ids, mask


def dense_surrogate(student, old, teacher, ids, mask, clip, low, high):
    """The formula of the paper, token by token, from full logits."""
    current, before, target = (torch.log_softmax(logits, dim=-1) for logits in (student, old, teacher))
    losses = []
    for n in range(len(ids)):
        support = [v for v, inside in zip(ids[n].tolist(), mask[n].tolist(), strict=True) if inside]
        total = sum(math.exp(before[n, v]) for v in support)
        loss = current.new_zeros(())
        for v in support:
            gap = min(max(target[n, v].item() - before[n, v].item(), -clip), clip)
            advantage = math.exp(before[n, v]) / total * gap
            ratio = torch.exp(current[n, v] - before[n, v])
            loss = loss + torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
        losses.append(loss)
    return torch.stack(losses)


def dense_reverse_kl(student, teacher, ids, mask):
    """KL between the distributions over the tokens of the support and "any other", from full probabilities."""
    p, q = torch.softmax(student, dim=-1), torch.softmax(teacher, dim=-1)
    losses = []
    for n in range(len(ids)):
        support = [v for v, inside in zip(ids[n].tolist(), mask[n].tolist(), strict=True) if inside]
        others = [v for v in range(p.size(1)) if v not in support]
        loss = sum((p[n, v] * torch.log(p[n, v] / q[n, v]) for v in support), p.new_zeros(()))
        if support and others:
            loss = loss + p[n, others].sum() * torch.log(p[n, others].sum() / q[n, others].sum())
        losses.append(loss)
    return torch.stack(losses)


def at(logits, ids):
    return torch.log_softmax(logits, dim=-1).gather(-1, ids)


def weighted_gradient(losses, logits):
    """The gradient of a sum in which every position has its own weight."""
    weights = torch.linspace(0.5, 1.5, len(losses), dtype=losses.dtype)
    return torch.autograd.grad((losses * weights).sum(), logits)[0]


@pytest.mark.parametrize("seed", range(5))
def test_surrogate_equals_the_dense_reference(seed):
    student, old, teacher, ids, mask = random_case(seed)
    got = topk_surrogate(at(student, ids), at(old, ids), at(teacher, ids), mask, 0.8, 0.2, 0.28)
    expected = dense_surrogate(student, old, teacher, ids, mask, 0.8, 0.2, 0.28)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(weighted_gradient(got, student), weighted_gradient(expected, student))


@pytest.mark.parametrize("seed", range(5))
def test_reverse_kl_equals_the_dense_reference(seed):
    student, _, teacher, ids, mask = random_case(seed)
    got = topk_reverse_kl(at(student, ids), at(teacher, ids), mask)
    expected = dense_reverse_kl(student, teacher, ids, mask)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(weighted_gradient(got, student), weighted_gradient(expected, student))


def test_surrogate_by_hand():
    # Two positions of a three-word vocabulary; the support is its first two words.
    old = log_probs([0.5, 0.25], [0.5, 0.25])
    teacher = log_probs([0.25, 0.5], [0.25, 0.5])
    student = log_probs([0.6, 0.2], [0.25, 0.5]).requires_grad_()
    # Both: w = (2/3, 1/3), D = (-ln 2, ln 2), so A = (-2/3 ln 2, 1/3 ln 2); ratios are clipped to 0.9 and 1.1.
    # First: rho = (1.2, 0.8). max(2/3 * 1.2, 2/3 * 1.1) + max(-1/3 * 0.8, -1/3 * 0.9) = 0.8 - 4/15 = 8/15.
    # Second: rho = (0.5, 2). max(2/3 * 0.5, 2/3 * 0.9) + max(-1/3 * 2, -1/3 * 1.1) = 0.6 - 11/30 = 7/30.
    losses = topk_surrogate(student, old, teacher, torch.ones(2, 2), None, 0.1, 0.1)
    assert losses.tolist() == pytest.approx([8 / 15 * LN2, 7 / 30 * LN2])
    losses.sum().backward()
    # First: -A rho, as neither clip holds. Second: both ratios are beyond their clips, and nothing moves.
    assert student.grad[0].tolist() == pytest.approx([0.8 * LN2, -0.8 / 3 * LN2])
    assert student.grad[1].tolist() == [0.0, 0.0]


def test_the_gap_of_the_surrogate_is_clipped_in_nats():
    # The teacher gives the word e^2 and e^-2 times the probability; with C = 0.5 the gap is 0.5 and -0.5, w = 1.
    old = torch.full((2, 1), -3.0)
    teacher = old + torch.tensor([[2.0], [-2.0]])
    assert topk_surrogate(old, old, teacher, torch.ones(2, 1), 0.5, 0.2, 0.28).tolist() == [-0.5, 0.5]
    assert topk_surrogate(old, old, teacher, torch.ones(2, 1), None, 0.2, 0.28).tolist() == [-2.0, 2.0]


@pytest.mark.parametrize(
    ("ratio", "gap", "moves"),
    [(1.27, 1, True), (1.29, 1, False), (0.1, 1, True), (0.81, -1, True), (0.79, -1, False), (9.0, -1, True)],
)
def test_clip_bounds_of_the_surrogate_are_those_of_ppo(ratio, gap, moves):
    old = torch.full((1, 1), -5.0, dtype=torch.float64)
    current = (old + math.log(ratio)).requires_grad_()
    topk_surrogate(current, old, old + gap, torch.ones(1, 1), None, 0.2, 0.28).sum().backward()
    assert (current.grad.item() != 0) == moves


def test_surrogate_starts_as_the_plain_policy_gradient():
    _, old, teacher, ids, mask = random_case(7)
    current = old.clone().requires_grad_()
    got = topk_surrogate(at(current, ids), at(old, ids), at(teacher, ids), mask, 1.0, 0.2, 0.28)
    before = at(old, ids)
    weights = before.exp() * mask / (before.exp() * mask).sum(dim=-1, keepdim=True).clamp(min=1e-300)
    advantages = weights * (at(teacher, ids) - before).clamp(-1, 1)
    expected = -(advantages * at(current, ids)).sum(dim=-1)
    torch.testing.assert_close(weighted_gradient(got, current), weighted_gradient(expected, current))


def test_reverse_kl_by_hand():
    # Of three words the support holds two, so that "the rest" is one word and the full KL comes out:
    # 0.5 ln(0.5/0.25) + 0.25 ln(0.25/0.25) + 0.25 ln(0.25/0.5) = 0.5 ln 2 - 0.25 ln 2 = 0.25 ln 2.
    student, teacher = log_probs([0.5, 0.25], [0.5, 0.25]), log_probs([0.25, 0.25], [0.25, 0.25])
    mask = torch.tensor([[1, 1], [1, 0]])
    # With the first word alone: 0.5 ln(0.5/0.25) + 0.5 ln(0.5/0.75) = 0.5 ln(4/3), which is less.
    expected = [0.25 * LN2, 0.5 * math.log(4 / 3)]
    assert topk_reverse_kl(student, teacher, mask).tolist() == pytest.approx(expected)


LOGITS = st.lists(st.tuples(st.floats(-12, 12), st.floats(-12, 12)), min_size=2, max_size=9)


@given(LOGITS, st.data())
def test_reverse_kl_lies_between_zero_and_the_full_kl(pairs, data):
    student, teacher = (torch.log_softmax(torch.tensor(x, dtype=torch.float64), -1) for x in zip(*pairs, strict=True))
    full = (student.exp() * (student - teacher)).sum().item()
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs))))
    some = topk_reverse_kl(student, teacher, mask).item()
    assert 0 <= some <= full + 1e-9
    assert topk_reverse_kl(student, teacher, torch.ones_like(mask)).item() == pytest.approx(full, abs=1e-9)


SUPPORT_LOSSES = {
    "topk_surrogate": lambda current, old, teacher, mask: topk_surrogate(current, old, teacher, mask, 1.0, 0.2, 0.28),
    "topk_reverse_kl": lambda current, old, teacher, mask: topk_reverse_kl(current, teacher, mask),
}


@pytest.mark.parametrize("name", SUPPORT_LOSSES)
def test_an_empty_support_gives_exactly_zero_and_no_gradient(name):
    student, old, teacher, ids, _ = random_case()
    losses = SUPPORT_LOSSES[name](at(student, ids), at(old, ids), at(teacher, ids), torch.zeros_like(ids))
    assert losses.tolist() == [0.0] * len(ids)
    assert weighted_gradient(losses, student).eq(0).all()


@pytest.mark.parametrize("name", SUPPORT_LOSSES)
@pytest.mark.parametrize("value", [0.0, 1e4, -1e4, float("-inf"), NAN])
def test_what_is_outside_the_support_changes_nothing(name, value):
    student, old, teacher, ids, mask = random_case()
    results = []
    for fill in (None, value):
        parts = [at(logits.detach(), ids) for logits in (student, old, teacher)]
        if fill is not None:
            parts = [part.masked_fill(~mask, fill) for part in parts]
        current = parts[0].requires_grad_()
        losses = SUPPORT_LOSSES[name](current, *parts[1:], mask)
        results.append((losses, weighted_gradient(losses, current)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", SUPPORT_LOSSES)
def test_only_the_current_policy_gets_a_gradient(name):
    student, old, teacher, ids, mask = random_case()
    old, teacher = old.requires_grad_(), teacher.requires_grad_()
    SUPPORT_LOSSES[name](at(student, ids), at(old, ids), at(teacher, ids), mask).sum().backward()
    assert student.grad.abs().sum() > 0
    assert old.grad is None
    assert teacher.grad is None


@pytest.mark.parametrize("reward_scale", [0.5, 1.0, 2.0])
def test_extrapolation_moves_the_optimum(reward_scale):
    """G-OPD's optimum is `log pi = lambda log pi_T + (1 - lambda) log pi_ref + const`, here by gradient ascent."""
    generator = torch.Generator().manual_seed(0)
    teacher, reference, logits = (torch.randn((1, 5), generator=generator, dtype=torch.float64) / 2 for _ in range(3))
    teacher, reference = torch.log_softmax(teacher, dim=-1), torch.log_softmax(reference, dim=-1)
    further = extrapolation(teacher, reference, reward_scale)
    logits.requires_grad_()
    for _ in range(3000):
        policy = torch.log_softmax(logits, dim=-1)
        advantages = opd_advantages(teacher, policy, torch.ones(1, 5), None, further)  # of each token, were it sampled
        expected = (policy.exp().detach() * advantages * policy).sum()
        logits = (logits + torch.autograd.grad(expected, logits)[0]).detach().requires_grad_()
    offset = torch.log_softmax(logits, dim=-1) - (reward_scale * teacher + (1 - reward_scale) * reference)
    assert (offset.max() - offset.min()).item() < 1e-6


def test_extrapolation_joins_the_gap_before_the_clip():
    # The gap is -0.5; going on from -3 to -1 with lambda = 2 adds 2, and the sum is cut at 1.
    teacher, student, reference = torch.tensor([[-1.0]]), torch.tensor([[-0.5]]), torch.tensor([[-3.0]])
    further = extrapolation(teacher, reference, 2.0)
    assert further.tolist() == [[2.0]]
    assert opd_advantages(teacher, student, torch.ones(1, 1), None, further).tolist() == [[1.5]]
    assert opd_advantages(teacher, student, torch.ones(1, 1), 1.0, further).tolist() == [[1.0]]
    assert opd_advantages(teacher, student, torch.zeros(1, 1), 1.0, further * NAN).tolist() == [[0.0]]
