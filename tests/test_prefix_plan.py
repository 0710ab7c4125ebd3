"""Plans against a search over all cuts, and against what every row must be run as."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_openclaw import prefix_plan
from trl_openclaw.prefix_plan import ENDED, Plan, fill_batches, make_batches, make_groups, make_plan

TREES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=6)


def retraced(plan: Plan, rows: list[list[int]]) -> list[list[int]]:
    """The tokens that each row is run on, from its last pass back to the first."""
    found = []
    for i, row in enumerate(rows):
        tokens, entry = [], None
        for part in reversed(plan.passes):
            if part.entries[i] == ENDED:
                assert entry is None
                continue
            assert entry in (None, part.entries[i])
            entry = part.entries[i]
            tokens = rows[part.rows[entry]][part.start : part.stop] + tokens
            entry = part.parents[entry] if part.parents else None
        found.append(tokens[: len(row)])
    return found


def beginnings(cut: int, rows: list[list[int]], at: int = 0) -> int:
    """Distinct beginnings up to a cut, of rows that reach further than `at`, which begin no longer one."""
    found = {tuple(row[:cut]) for row in rows if len(row) > at}
    return sum(not any(a != b and b[: len(a)] == a for b in found) for a in found)


def cost_of(cuts: tuple[int, ...], rows: list[list[int]], pass_cost: int) -> int:
    """What passes between these cuts cost, counted row by row."""
    places = (0, *cuts, max(map(len, rows)))
    return sum(beginnings(stop, rows, start) * (stop - start) + pass_cost for start, stop in pairwise(places))


def cheapest_by_search(rows: list[list[int]], places: list[int], shortest: int, pass_cost: int) -> int:
    """Of all plans that cut at some of these places."""
    every = [cuts for n in range(len(places) + 1) for cuts in combinations(places, n)]
    length = max(map(len, rows))
    every = [cuts for cuts in every if all(b - a >= shortest for a, b in pairwise((*cuts, length)))]
    return min(cost_of(cuts, rows, pass_cost) for cuts in every)


@given(rows=TREES, pass_cost=st.integers(0, 5), limit=st.none() | st.integers(0, 7))
def test_the_cheapest_of_all_plans(rows, pass_cost, limit):
    """Nowhere else is a cut any better than where beginnings part and where rows end."""
    places = [cut for cut in range(1, max(map(len, rows))) if limit is None or cut <= limit]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_plan, "SHORTEST_PASS", 1)
        assert make_plan(rows, limit, pass_cost).cost == cheapest_by_search(rows, places, 1, pass_cost)


@given(rows=TREES, pass_cost=st.integers(0, 5), limit=st.none() | st.integers(0, 7))
def test_the_cheapest_without_passes_of_one_token_and_every_row_is_run_whole(rows, pass_cost, limit):
    plan = make_plan(rows, limit, pass_cost)
    assert retraced(plan, rows) == rows
    assert plan.cost == sum(part.tokens for part in plan.passes) + pass_cost * len(plan.passes)
    assert all(part.stop - part.start >= 2 for part in plan.passes[1:])
    length = max(map(len, rows))
    last = length - 2 if limit is None else min(limit, length - 2)
    ends = {len(row) for row in rows if not any(row == other[: len(row)] != other for other in rows)}
    places = [
        cut
        for cut in range(1, last + 1)
        if cut == last or cut in ends or beginnings(cut + 1, rows) > beginnings(cut, rows)
    ]
    assert plan.cost == cheapest_by_search(rows, places, 2, pass_cost)
    assert limit is None or plan.passes[-1].start <= limit
    assert plan.saves == (plan.cost < len(rows) * length + pass_cost)


def test_a_prompt_with_hints_and_completions():
    prompt = list(range(100, 1124))
    rows = [prompt + [5 + hint] * 48 + [9, 9] + [20 + c] * 64 for c in range(4) for hint in range(3)]
    plan = make_plan(rows, 1024 + 49, 64)
    assert [(part.start, part.stop, len(part.rows)) for part in plan.passes] == [
        (0, 1024, 1),
        (1024, 1073, 3),
        (1073, 1138, 12),
    ]
    assert plan.passes[1].parents == (0, 0, 0)
    assert plan.passes[1].entries == (2, 1, 0) * 4
    assert sorted(plan.passes[2].rows) == list(range(12))
    assert plan.saves
    assert retraced(plan, rows) == rows


def comb(lengths: list[tuple[int, int]], trunk: int, seed: int = 0) -> list[list[int]]:
    """Turns that leave a trajectory at these places, each after a trunk that all go on from, and go on as long."""
    return [[seed] * trunk + list(range(at)) + [1000 + seed + i] * length for i, (at, length) in enumerate(lengths)]


def test_the_turns_of_a_trajectory():
    """Two entries at most are alive at once, and a turn that has ended is gone."""
    rows = comb([(0, 80), (120, 90), (240, 110)], trunk=200)
    plan = make_plan(rows, None, 64)
    assert [(part.start, part.stop, len(part.rows)) for part in plan.passes] == [
        (0, 200, 1),
        (200, 280, 2),
        (280, 410, 2),  # the second turn begins in the middle
        (410, 550, 1),
    ]
    assert [part.entries for part in plan.passes] == [(0, 0, 0), (0, 1, 1), (ENDED, 0, 1), (ENDED, ENDED, 0)]
    assert [part.parents for part in plan.passes] == [(), (0, 0), (1, 1), (1,)]
    assert retraced(plan, rows) == rows
    assert [len(make_plan(rows, None, cost).passes) for cost in (0, 64, 10_000)] == [5, 4, 1]


def test_rows_that_are_equal_or_begin_another_have_no_entry_of_their_own():
    rows = [[1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 3]]
    plan = make_plan(rows, None, 0)
    assert plan.cost == 6
    assert {part.rows for part in plan.passes} == {(1,)}
    assert make_plan([rows[0]] * 3, None, 0).saves
    assert not make_plan(rows[:1], None, 0).saves


def test_two_prompts_with_hints_of_their_own():
    rows = [[prompt] * 4 + [prompt + hint] * 3 + [c, 1] for prompt in (10, 20) for hint in (1, 2) for c in (8, 9)]
    plan = make_plan(rows, 7, 0)
    assert [(part.start, part.stop, len(part.rows)) for part in plan.passes] == [(0, 4, 2), (4, 7, 4), (7, 9, 8)]
    assert [part.parents for part in plan.passes] == [(), (0, 0, 1, 1), (0, 0, 1, 1, 2, 2, 3, 3)]
    assert retraced(plan, rows) == rows


@pytest.mark.parametrize(
    ("rows", "limit"),
    [
        ([[1, 2, 3]], 2),
        ([[1, 2, 3], [4, 2, 3]], None),  # nothing in common
        ([[1, 2, 3], [1, 2, 4]], 0),  # no prompt before the completion's first token
    ],
)
def test_one_pass_where_nothing_can_be_shared(rows, limit):
    plan = make_plan(rows, limit, 0)
    assert not plan.saves
    assert sorted(plan.passes[0].rows) == list(range(len(rows)))


def test_a_pass_must_be_worth_its_cost():
    rows = [[1] * 11 + [2, 3], [1] * 11 + [4, 3]]
    assert make_plan(rows, 11, 10).saves
    assert not make_plan(rows, 11, 11).saves


@given(rows=TREES, pass_cost=st.integers(0, 5), budget=st.integers(8, 30))
def test_batches_hold_every_row_once_within_the_budget(rows, pass_cost, budget):
    lengths = [len(row) for row in rows]
    for batches in (make_batches(rows, pass_cost, budget), fill_batches(lengths, budget)):
        assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
        assert all(len(batch) * max(lengths[i] for i in batch) <= budget for batch in batches)


@given(rows=TREES, pass_cost=st.integers(0, 5))
def test_rows_that_may_be_cut_anywhere_are_never_cheaper_apart(rows, pass_cost):
    """So the budget alone says how many batches there are."""
    assert len(make_batches(rows, pass_cost, 8 * 6)) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_plan, "SHORTEST_PASS", 1)
        whole = make_plan(rows, None, pass_cost).cost
        for i in range(1, len(rows)):
            apart = [make_plan(part, None, pass_cost).cost for part in (rows[:i], rows[i:])]
            assert whole <= sum(apart)


def test_batches_are_cut_where_least_is_in_common():
    """Four rows fit, but two trajectories of three turns each stay whole."""
    rows = [row for seed in (1, 2) for row in comb([(0, 80), (120, 90), (240, 110)], trunk=200, seed=seed)]
    assert sorted(map(sorted, make_batches(rows, 64, 4 * 550))) == [[0, 1, 2], [3, 4, 5]]
    assert sorted(map(len, make_batches(rows, 64, 2 * 550))) == [1, 1, 2, 2]
    assert sorted(make_batches(rows, 64, 1)) == [[i] for i in range(6)]


def test_rows_of_one_prompt_stay_together_and_very_different_ones_apart():
    long, short = [7] * 1000, [8] * 20
    rows = [[*long, 1, 2], [*short, 1, 2], [*long, 3, 4], [*short, 3, 4], [*long[:-1], 6, 5, 5]]
    groups = make_groups(rows, [len(row) - 2 for row in rows], 64)
    assert sorted(map(sorted, groups)) == [[0, 2, 4], [1, 3]]


def test_what_may_not_be_shared_is_not_counted_as_shared():
    """The first row's prompt ends after two tokens, so what follows is run for both rows: apart, without padding."""
    rows = [[7] * 900 + [1] * 100, [7] * 900 + [2] * 5]
    assert len(make_groups(rows, [2, 904], 64)) == 2
    assert len(make_groups(rows, [904, 904], 64)) == 1


def test_batches_of_rows_that_share_nothing_are_of_like_length():
    assert fill_batches([9, 2, 8, 3], 18) == [[1, 3], [2, 0]]
    assert fill_batches([], 18) == make_batches([], 64, 18) == make_groups([], [], 64) == []
