"""Token advantages, with numbers worked by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_openclaw.losses import combine_advantages, gap_statistics, opd_advantages, token_gap

NAN = float("nan")


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
    rows, tokens = torch.tensor([1.0, -1.0, 0.0]), torch.tensor([[0.5, -0.5], [0.0, 0.0], [1.0, -1.0]])
    combined = combine_advantages(rows, tokens, rl_weight=2.0, opd_weight=0.5)
    assert combined.tolist() == [[2.25, 1.75], [-2.0, -2.0], [0.5, -0.5]]


def test_gap_statistics_by_hand():
    gap, mask = torch.tensor([[2.0, -0.5], [0.0, 0.0]]), torch.tensor([[1, 1], [0, 0]])
    assert gap_statistics(gap, mask, 1.0).tolist() == [1.5, 2.5, 1.0, 2.0, 2.0]


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
