"""Which candidate is chosen: overlaps, ties, masks, and the rules that look at the texts alone."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_openclaw.hint_selection import (
    OVERLAP_RULES,
    TEXT_RULES,
    alike,
    is_in,
    select_by_overlap,
    support,
    topk_overlap,
)

VOCABULARY = 9


@st.composite
def best_tokens(draw, rows):
    """Ids `(rows, k)`, distinct in each row, and as many of another model."""
    k = draw(st.integers(1, VOCABULARY))
    ids = st.permutations(range(VOCABULARY)).map(lambda order: order[:k])
    return tuple(torch.tensor(draw(st.lists(ids, min_size=rows, max_size=rows))) for _ in range(2))


@st.composite
def overlaps(draw):
    """Overlaps `(M, T)` with many ties, and which candidates have a score where."""
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    size = shape[0] * shape[1]
    quarters = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return torch.tensor(quarters).view(shape) / 4, torch.tensor(mask).view(shape)


def test_overlap_by_hand():
    student = torch.tensor([[3, 1, 4, 2], [3, 1, 4, 2]])
    teacher = torch.tensor([[1, 9, 3, 7], [5, 6, 7, 8]])
    assert is_in(student, teacher).tolist() == [[True, True, False, False], [False] * 4]
    assert topk_overlap(student, teacher).tolist() == [0.5, 0.0]


@given(best_tokens(rows=3), st.permutations(range(VOCABULARY)))
def test_overlap_is_a_share_whatever_the_ids_are_called(ids, renaming):
    student, teacher = ids
    overlap = topk_overlap(student, teacher)
    assert ((overlap >= 0) & (overlap <= 1)).all()
    shared = [len(set(s) & set(t)) / len(s) for s, t in zip(student.tolist(), teacher.tolist(), strict=True)]
    assert overlap.tolist() == pytest.approx(shared)
    names = torch.tensor(renaming)
    assert torch.equal(topk_overlap(names[student], names[teacher]), overlap)
    assert torch.equal(topk_overlap(student, student), torch.ones(3))


def test_overlap_of_several_candidates_with_one_student():
    student = torch.tensor([[1, 2], [3, 4]])  # two tokens
    teachers = torch.tensor([[[1, 2], [5, 6]], [[2, 9], [4, 3]]])  # two candidates
    assert topk_overlap(student, teachers).tolist() == [[1.0, 0.0], [0.5, 1.0]]


@given(overlaps())
def test_token_rule_takes_the_first_best_of_each_token(case):
    overlap, mask = case
    for t, chosen in enumerate(select_by_overlap(overlap, mask, "token").tolist()):
        scored = [m for m in range(len(overlap)) if mask[m, t]]
        assert chosen == max(scored, key=lambda m: overlap[m, t].item(), default=0)  # `max` keeps the first of equals


@given(overlaps())
def test_sequence_rule_takes_the_first_best_of_the_row(case):
    overlap, mask = case
    scored = [m for m in range(len(overlap)) if mask[m].any()]
    best = max(scored, key=lambda m: overlap[m][mask[m]].double().mean().item(), default=0)
    assert select_by_overlap(overlap, mask, "sequence").tolist() == [best] * overlap.size(1)


@given(overlaps(), st.sampled_from(OVERLAP_RULES), st.floats(0, 1))
def test_overlaps_without_a_score_change_nothing(case, rule, value):
    overlap, mask = case
    other = overlap.masked_fill(~mask, value)
    assert torch.equal(select_by_overlap(overlap, mask, rule), select_by_overlap(other, mask, rule))


def test_a_candidate_without_a_score_loses_even_to_no_overlap():
    overlap, mask = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[False, False], [True, True]])
    for rule in OVERLAP_RULES:
        assert select_by_overlap(overlap, mask, rule).tolist() == [1, 1]
        assert select_by_overlap(overlap, torch.zeros_like(mask), rule).tolist() == [0, 0]


@pytest.mark.parametrize("rule", OVERLAP_RULES)
def test_rows_are_chosen_for_one_by_one(rule):
    generator = torch.Generator().manual_seed(0)
    overlap = torch.rand((16, 3, 5), generator=generator)
    mask = torch.rand((16, 3, 5), generator=generator) < 0.6
    expected = torch.stack([select_by_overlap(*row, rule) for row in zip(overlap, mask, strict=True)])
    assert expected.unique(dim=0).size(0) > 1
    assert torch.equal(select_by_overlap(overlap, mask, rule), expected)


def test_the_two_rules_differ():
    # Means 0.5 and 0.75: the row takes the second, though the first is better at the first token.
    overlap, mask = torch.tensor([[1.0, 0.0], [0.5, 1.0]]), torch.ones(2, 2, dtype=torch.bool)
    assert select_by_overlap(overlap, mask, "sequence").tolist() == [1, 1]
    assert select_by_overlap(overlap, mask, "token").tolist() == [0, 1]
    # A mean is over the tokens that have a score: 1 and 0.75.
    assert select_by_overlap(overlap, torch.tensor([[True, False], [True, True]]), "sequence").tolist() == [0, 0]


def test_supports():
    student, teacher = torch.tensor([[1, 2, 3]]), torch.tensor([[5, 3, 1]])
    for kind, ids, mask in [
        ("student", [1, 2, 3], [True, True, True]),
        ("teacher", [5, 3, 1], [True, True, True]),
        ("overlap", [1, 2, 3], [True, False, True]),
    ]:
        found = support(student, teacher, kind)
        assert [part.tolist() for part in found] == [[ids], [mask]]


def test_text_rules():
    hints = ["be brief", "no", "no bold text, please", "ok", "no lists, no tables."]
    generator = random.Random(0)
    assert TEXT_RULES["longest"](hints, generator) == 2  # 20 characters, as has the last
    assert TEXT_RULES["shortest"](hints, generator) == 1
    draws = [random.Random(seed) for seed in (1, 1, 2)]
    drawn = [[TEXT_RULES["random"](hints, draw) for _ in range(50)] for draw in draws]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == set(range(5))


def test_only_candidates_with_the_same_tokens_can_be_exchanged():
    mask = torch.tensor(
        [
            [[1, 0, 1], [1, 1, 0], [1, 0, 1], [1, 0, 0]],  # the first with the most, and the one like it
            [[0, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]],
            [[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]],
        ]
    ).bool()
    assert alike(mask).tolist() == [
        [True, False, True, False],
        [False, False, True, True],
        [True, True, True, True],
    ]
