"""The objectives: which loss each is, with which settings, and that all pull the student towards its teacher."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from trl_openclaw.lm_head import LMHead, TokenStates
from trl_openclaw.losses import topk_reverse_kl, topk_surrogate
from trl_openclaw.objectives import DIVERGENCES, OBJECTIVES, SAMPLED_TOKEN, Positions, make_objective

N, K, HIDDEN, VOCABULARY = 4, 3, 5, 8
EVERY = [(name, divergence) for name in OBJECTIVES if name != SAMPLED_TOKEN for divergence in DIVERGENCES]
EVERY = [case for case in EVERY if case[0] == "full_divergence" or case[1] == DIVERGENCES[0]]


def settings(**overrides):
    """The fields of `OPDConfig` that objectives read."""
    defaults = {
        "logp_gap_clip": 1.0, "epsilon": 0.2, "epsilon_high": 0.28, "divergence": "reverse_kl", "jsd_beta": 0.5,
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **overrides})


def log_probs(hidden, head):
    return torch.log_softmax(hidden @ head.weight.T + head.bias, dim=-1)


def states(hidden, head):
    """The student's states, whose sampled token is the first of the vocabulary."""
    logps = log_probs(hidden, head)[:, 0]
    return TokenStates(hidden, torch.zeros(N, dtype=torch.long), logps, head)


def random_positions(seed=0, teacher_bias=None):
    """Positions with everything an objective may ask for; the support is the student's best K tokens.

    The teacher is another one, or with `teacher_bias` `(V,)` the student's own head plus that.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    head = LMHead(normal(VOCABULARY, HIDDEN), normal(VOCABULARY).requires_grad_())
    hidden = normal(N, HIDDEN).requires_grad_()
    if teacher_bias is None:
        teacher_hidden, teacher = normal(N, HIDDEN + 2), LMHead(normal(VOCABULARY, HIDDEN + 2), normal(VOCABULARY))
        old = log_probs(hidden, head).detach() + 0.1 * normal(N, VOCABULARY)
    else:
        teacher_hidden, teacher = hidden.detach(), replace(head, bias=head.bias.detach() + teacher_bias)
        old = log_probs(hidden, head).detach()
    ids = head.topk(hidden, K)
    data = {
        "support_ids": ids,
        "support_mask": torch.ones_like(ids, dtype=torch.bool),
        "old_support_logps": old.gather(-1, ids),
        "target_support_logps": log_probs(teacher_hidden, teacher).gather(-1, ids),
        "teacher_hidden": teacher_hidden,
    }
    return Positions(states(hidden, head), data, teacher)


def needed(objective, positions):
    """The positions as the trainer hands them over: only with what the objective says it reads."""
    data = {name: positions.data[name] for name in objective.inputs}
    return Positions(positions.student, data, positions.teacher_head if objective.uses_teacher_states else None)


def test_the_sampled_token_has_no_loss_of_its_own():
    assert make_objective(settings(opd_loss=SAMPLED_TOKEN)) is None
    assert isinstance(make_objective(settings(opd_loss="topk_surrogate")), OBJECTIVES["topk_surrogate"])


@pytest.mark.parametrize(("name", "divergence"), EVERY)
def test_losses_per_position_from_what_the_objective_says_it_reads(name, divergence):
    positions = random_positions()
    objective = OBJECTIVES[name](settings(divergence=divergence))
    assert objective.uses_support == ("support_ids" in objective.inputs)
    assert objective.uses_teacher_states == ("teacher_hidden" in objective.inputs)
    losses = objective.token_losses(needed(objective, positions))
    assert losses.shape == (N,)
    gradient = torch.autograd.grad(losses[1], positions.student.hidden)[0]
    assert gradient[1].abs().sum() > 0
    assert gradient[[0, 2, 3]].eq(0).all()  # a position's loss is its own


@pytest.mark.parametrize(("high", "expected"), [(0.28, 0.28), (None, 0.2)])
@pytest.mark.parametrize("clip", [0.3, None])
def test_the_surrogate_reads_the_clips_of_the_configuration(clip, high, expected):
    positions = random_positions()
    objective = OBJECTIVES["topk_surrogate"](settings(logp_gap_clip=clip, epsilon_high=high))
    data = positions.data
    current = log_probs(positions.student.hidden, positions.student.head).gather(-1, data["support_ids"])
    data["old_support_logps"] = current.detach() - 0.25  # a ratio of 1.284, beyond either upper bound
    target = topk_surrogate(
        current, data["old_support_logps"], data["target_support_logps"], data["support_mask"], clip, 0.2, expected
    )
    torch.testing.assert_close(objective.token_losses(positions), target)


def test_reverse_kl_is_that_of_the_support():
    positions = random_positions()
    positions.data["support_mask"] = torch.rand((N, K), generator=torch.Generator().manual_seed(0)) < 0.6
    ids, mask = positions.data["support_ids"], positions.data["support_mask"]
    current = log_probs(positions.student.hidden, positions.student.head).gather(-1, ids)
    expected = topk_reverse_kl(current, positions.data["target_support_logps"], mask)
    torch.testing.assert_close(OBJECTIVES["topk_reverse_kl"](settings()).token_losses(positions), expected)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_divergences_point_the_way_they_are_called(divergence):
    positions = random_positions()
    student = log_probs(positions.student.hidden, positions.student.head)
    teacher = log_probs(positions.data["teacher_hidden"], positions.teacher_head)
    mixture = (0.3 * teacher.exp() + 0.7 * student.exp()).log()

    def kl(p, q):
        return (p.exp() * (p - q)).sum(dim=-1)

    expected = {
        "reverse_kl": kl(student, teacher),
        "forward_kl": kl(teacher, student),
        "jsd": 0.3 * kl(teacher, mixture) + 0.7 * kl(student, mixture),
    }[divergence]
    objective = OBJECTIVES["full_divergence"](settings(divergence=divergence, jsd_beta=0.3))
    torch.testing.assert_close(objective.token_losses(positions), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "divergence"), EVERY)
@pytest.mark.parametrize("raised", [0.5, -0.5])
def test_the_student_follows_its_teacher(name, divergence, raised):
    # The teacher is the student, but one token is likelier, or less likely, at every position.
    token = random_positions().data["support_ids"][0, 1].item()
    bias = torch.zeros(VOCABULARY)
    bias[token] = raised
    positions = random_positions(teacher_bias=bias)
    objective = OBJECTIVES[name](settings(divergence=divergence))
    student = positions.student
    before = log_probs(student.hidden, student.head)[0, token]
    gradient = torch.autograd.grad(objective.token_losses(positions)[0], student.head.bias)[0]
    after = log_probs(student.hidden, replace(student.head, bias=student.head.bias - 0.1 * gradient))[0, token]
    assert (after - before).item() * raised > 0


@pytest.mark.parametrize(("name", "divergence"), EVERY)
def test_a_student_that_is_its_teacher_has_nothing_to_learn(name, divergence):
    positions = random_positions(teacher_bias=torch.zeros(VOCABULARY))
    losses = OBJECTIVES[name](settings(divergence=divergence)).token_losses(positions)
    torch.testing.assert_close(losses, torch.zeros(N), rtol=0, atol=1e-5)
    gradient = torch.autograd.grad(losses.sum(), positions.student.hidden)[0]
    torch.testing.assert_close(gradient, torch.zeros(N, HIDDEN), rtol=0, atol=1e-5)
