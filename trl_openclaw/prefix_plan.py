"""Which beginnings the rows of a batch have in common, and in which passes a model runs each of them once.

The rows are a tree. Those of one prompt part behind the prompt, then behind a hint, then in the completions. The turns
of one trajectory, each scored under a hint of its own, are a comb: they part from the trajectory one after another, and
each ends with its turn. A plan cuts all rows at the same places. Between two cuts every distinct beginning is run once,
however many rows go on from it. A row that ends there is filled up on the right, where a causal model does not see it,
and nothing goes on from the filling. So the numbers are those of each row alone, whatever kind of attention there is.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from struct import pack

SHORTEST_PASS = 2
"""Tokens of a pass that goes on from a cache. One token is how models decode, in some hybrids without a gradient."""

ENDED = -1
"""In place of an entry: the row ended before this pass."""


@dataclass(frozen=True)
class Pass:
    """Part of every row that is run at once, in one entry for each distinct beginning.

    Args:
        start: The first token.
        stop: The token after the last one.
        rows: For each entry, the row whose tokens are run: the one that reaches furthest.
        parents: For each entry, the one of the pass before that it goes on from. Empty in the first pass.
        entries: For each row of the batch, the entry that runs it, or `ENDED`.
    """

    start: int
    stop: int
    rows: tuple[int, ...]
    parents: tuple[int, ...]
    entries: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """How many tokens are run, padding included."""
        return (self.stop - self.start) * len(self.rows)


@dataclass(frozen=True)
class Plan:
    """The passes of a batch, and what they cost in tokens."""

    passes: tuple[Pass, ...]
    cost: int

    @property
    def saves(self) -> bool:
        """Whether it is anything but all rows in one pass."""
        return len(self.passes) > 1 or len(self.passes[0].rows) < len(self.passes[0].entries)


def make_plan(rows: Sequence[Sequence[int]], limit: int | None, pass_cost: int) -> Plan:
    """The cheapest plan of those that cut where beginnings part and where rows end.

    Args:
        rows: The tokens of each row.
        limit: The last place where one may cut; `None` for anywhere.
        pass_cost: What a pass costs by itself, in tokens.
    """
    tree = _Tree.of(rows)
    cuts, cost = _cheapest_cuts(tree, limit, pass_cost)
    return Plan(_passes(cuts, tree), cost)


def make_groups(rows: Sequence[Sequence[int]], limits: Sequence[int], pass_cost: int) -> list[list[int]]:
    """Rows that are best run together where cuts are limited: what begins alike, unless it is cheaper apart.

    Args:
        rows: The tokens of each row.
        limits: For each row, the last place where rows that are run with it may be cut.
        pass_cost: See `make_plan`.
    """
    tree = _Tree.of(rows)
    groups: list[list[int]] = []
    first = cost = limit = 0  # of the group that is being filled
    for place, i in enumerate(tree.order):
        alone = len(rows[i]) + pass_cost
        if groups:
            least = min(limit, limits[i])
            _, joined = _cheapest_cuts(tree.part(first, place + 1), least, pass_cost)
            if joined <= cost + alone:
                groups[-1].append(i)
                cost, limit = joined, least
                continue
        groups.append([i])
        first, cost, limit = place, alone, limits[i]
    return groups


def make_batches(rows: Sequence[Sequence[int]], pass_cost: int, token_budget: int) -> list[list[int]]:
    """Batches for plans that may cut anywhere, which are the cheaper the more rows they have: cut by the budget alone.

    They are cut where the rows on both sides have least in common, since that is run for both.

    Args:
        rows: The tokens of each row.
        pass_cost: See `make_plan`.
        token_budget: The most that a batch's number of rows times its longest row may be; at least the longest row.
    """
    tree = _Tree.of(rows)
    best = [(0, 0)]  # for the first rows, in order: what is run once more, and where their last batch begins
    for stop in range(1, len(rows) + 1):
        options: list[tuple[int, int]] = []
        longest = 0
        for first in reversed(range(stop)):
            longest = max(longest, tree.lengths[first])
            if options and longest * (stop - first) > token_budget:
                break
            again = tree.shared[first - 1] if first else 0
            options.append((best[first][0] + again + pass_cost, first))
        best.append(min(options))
    batches: list[list[int]] = []
    stop = len(rows)
    while stop:
        first = best[stop][1]
        batches.insert(0, tree.order[first:stop])
        stop = first
    return batches


def fill_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Rows of like length together, which saves padding; for rows that share nothing.

    Args:
        lengths: Of the rows.
        token_budget: See `make_batches`.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batches and lengths[i] * (len(batches[-1]) + 1) <= token_budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


@dataclass(frozen=True)
class _Tree:
    """Rows in an order in which what begins alike is side by side, and what begins another row before it.

    Args:
        order: The rows.
        shared: How many tokens each of them has in common with the next; 0 for the last.
        lengths: How many tokens each of them has.
    """

    order: list[int]
    shared: list[int]
    lengths: list[int]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "_Tree":
        keys = [pack(f"{len(row)}q", *row) for row in rows]  # bytes, which are compared in C
        order = sorted(range(len(rows)), key=keys.__getitem__)
        shared = [_shared_length(keys[a], keys[b]) // 8 for a, b in pairwise(order)]
        return cls(order, [*shared, 0][: len(rows)], [len(rows[i]) for i in order])

    def part(self, first: int, stop: int) -> "_Tree":
        """Some of the rows, which are side by side."""
        return _Tree(self.order[first:stop], [*self.shared[first : stop - 1], 0], self.lengths[first:stop])


def _cheapest_cuts(tree: _Tree, limit: int | None, pass_cost: int) -> tuple[list[int], int]:
    """Where passes begin and end, from 0 to the end of the longest row, and what that costs. See `make_plan`.

    A row has an entry of its own in all passes that run any of what it does not share with the next one.
    """
    own = [(n, length) for n, length in zip(tree.shared, tree.lengths, strict=True) if n < length]
    begins, ends = sorted(n for n, _ in own), sorted(length for _, length in own)
    length = ends[-1]
    last = length - SHORTEST_PASS if limit is None else min(limit, length - SHORTEST_PASS)
    # best[cut]: the cheapest passes that run everything before `cut`, the cut before it, and how many rows have ended
    best: dict[int, tuple[int, int, int]] = {0: (0, 0, 0)}
    for cut in [*sorted({n for n in (*begins, *ends, last) if 0 < n <= last}), length]:
        begun = bisect_left(begins, cut)
        cost, before = min(
            (cost + (begun - ended) * (cut - at), at)
            for at, (cost, _, ended) in best.items()
            if at == 0 or cut - at >= SHORTEST_PASS
        )
        best[cut] = cost + pass_cost, before, bisect_right(ends, cut)
    cuts = [length]
    while cuts[0]:
        cuts.insert(0, best[cuts[0]][1])
    return cuts, best[length][0]


def _passes(cuts: Sequence[int], tree: _Tree) -> tuple[Pass, ...]:
    """The passes between `cuts`."""
    passes: list[Pass] = []
    for start, stop in pairwise(cuts):
        furthest: list[int] = []
        entries = [ENDED] * len(tree.order)
        for i, n, length in reversed(list(zip(tree.order, tree.shared, tree.lengths, strict=True))):
            if length > start:
                if min(length, stop) > n:  # what the next row does not run, too
                    furthest.append(i)
                entries[i] = len(furthest) - 1
        parents = tuple(passes[-1].entries[i] for i in furthest) if passes else ()
        passes.append(Pass(start, stop, tuple(furthest), parents, tuple(entries)))
    return tuple(passes)


def _shared_length(a: bytes, b: bytes) -> int:
    """How many bytes two strings begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # a bisection, whose comparisons run in C
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
