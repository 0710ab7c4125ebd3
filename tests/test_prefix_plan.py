"""Plans against a search over all cuts, and against what every row must be run as."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_openclaw.prefix_plan import SHORTEST_PASS, Plan, fill_batches, make_batches, make_plan

TREES = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=8), min_size=1, max_size=6)


def retraced(plan: Plan, rows: list[list[int]]) -> list[list[int]]:
    """The tokens that each row is run on, from its last pass back to the first."""
    found = []
    for i in range(len(rows)):
        tokens, entry = [], i
        for part in reversed(plan.passes):
            tokens = rows[part.rows[entry]][part.start : part.stop] + tokens
            entry = part.parents[entry] if part.parents else None
        found.append(tokens)
    return found


def cost_of(cuts: tuple[int, ...], rows: list[list[int]], pass_cost: int) -> int:
    """What passes between these cuts cost, counted row by row."""
    at, total = 0, 0
    for cut in cuts:
        total += len({tuple(row[:cut]) for row in rows}) * (cut - at) + pass_cost
        at = cut
    return total + len(rows) * (max(map(len, rows)) - at) + pass_cost


def parting_places(rows: list[list[int]], limit: int) -> list[int]:
    """Where beginnings part, and the last place where one may cut."""

    def distinct(cut: int) -> int:
        return len({tuple(row[:cut]) for row in rows})

    return [cut for cut in range(1, limit + 1) if cut == limit or distinct(cut + 1) > distinct(cut)]


@given(rows=TREES, pass_cost=st.integers(0, 5))
def test_the_cheapest_of_all_plans_and_every_row_is_run_whole(rows, pass_cost):
    limits = [len(row) - 1 for row in rows]
    plan = make_plan(rows, limits, pass_cost)
    assert retraced(plan, rows) == rows
    assert plan.cost == sum(part.tokens for part in plan.passes) + pass_cost * len(plan.passes)
    places = parting_places(rows, min([*limits, max(map(len, rows)) - SHORTEST_PASS]))
    every = [cuts for n in range(len(places) + 1) for cuts in combinations(places, n)]
    every = [cuts for cuts in every if all(b - a >= SHORTEST_PASS for a, b in pairwise(cuts))]
    assert all(part.stop - part.start >= SHORTEST_PASS for part in plan.passes[1:])
    assert plan.cost == min(cost_of(cuts, rows, pass_cost) for cuts in every)
    assert plan.passes[-1].start <= min(limits)
    assert plan.passes[-1].rows == tuple(range(len(rows)))


def test_a_prompt_with_hints_and_completions():
    prompt = list(range(100, 1124))
    rows = [prompt + [5 + hint] * 48 + [9, 9] + [20 + c] * 64 for c in range(4) for hint in range(3)]
    plan = make_plan(rows, [1024 + 49] * 12, 64)
    assert [(part.start, part.stop, len(part.rows)) for part in plan.passes] == [
        (0, 1024, 1),
        (1024, 1073, 3),
        (1073, 1138, 12),
    ]
    assert plan.passes[1].parents == (0, 0, 0)
    assert plan.passes[2].parents == (0, 1, 2) * 4
    assert plan.shares


def test_two_prompts_with_hints_of_their_own():
    rows = [[prompt] * 4 + [prompt + hint] * 3 + [c, 1] for prompt in (10, 20) for hint in (1, 2) for c in (8, 9)]
    plan = make_plan(rows, [7] * 8, 0)
    assert [(part.start, part.stop, part.parents) for part in plan.passes] == [
        (0, 4, ()),
        (4, 7, (0, 0, 1, 1)),
        (7, 9, (0, 0, 1, 1, 2, 2, 3, 3)),
    ]
    assert retraced(plan, rows) == rows


@pytest.mark.parametrize(
    ("rows", "limits"),
    [
        ([[1, 2, 3]], [2]),
        ([[1, 2, 3], [4, 2, 3]], [2, 2]),  # nothing in common
        ([[1, 2, 3], [1, 2, 4]], [0, 0]),  # no prompt before the completion's first token
    ],
)
def test_one_pass_where_nothing_can_be_shared(rows, limits):
    plan = make_plan(rows, limits, 0)
    assert not plan.shares
    assert plan.passes[0].rows == tuple(range(len(rows)))


def test_a_pass_must_be_worth_its_cost():
    rows = [[1] * 11 + [2, 3], [1] * 11 + [4, 3]]
    assert make_plan(rows, [11, 11], 10).shares
    assert not make_plan(rows, [11, 11], 11).shares


@given(rows=TREES, pass_cost=st.integers(0, 5), budget=st.integers(8, 30))
def test_batches_hold_every_row_once_within_the_budget(rows, pass_cost, budget):
    lengths = [len(row) for row in rows]
    for batches in (make_batches(rows, [n - 1 for n in lengths], pass_cost, budget), fill_batches(lengths, budget)):
        assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
        assert all(len(batch) * max(lengths[i] for i in batch) <= budget for batch in batches)


def test_rows_of_one_prompt_stay_together_and_very_different_ones_apart():
    long, short = [7] * 1000, [8] * 20
    rows = [[*long, 1, 2], [*short, 1, 2], [*long, 3, 4], [*short, 3, 4], [*long[:-1], 6, 5, 5]]
    batches = make_batches(rows, [len(row) - 2 for row in rows], 64, 10**6)
    assert sorted(map(sorted, batches)) == [[0, 2, 4], [1, 3]]


def test_what_may_not_be_shared_is_not_counted_as_shared():
    """The first row's prompt ends after two tokens, so what follows is run for both rows: apart, without padding."""
    rows = [[7] * 900 + [1] * 100, [7] * 900 + [2] * 5]
    assert len(make_batches(rows, [2, 904], 64, 10**6)) == 2
    assert len(make_batches(rows, [904, 904], 64, 10**6)) == 1


def test_batches_of_rows_that_share_nothing_are_of_like_length():
    assert fill_batches([9, 2, 8, 3], 18) == [[1, 3], [2, 0]]
    assert fill_batches([], 18) == make_batches([], [], 64, 18) == []
