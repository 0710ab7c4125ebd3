"""Which beginnings the rows of a batch have in common, and in which passes a model runs each of them once.

The rows of one prompt are a tree: the prompt, then a hint, then the completions. A plan cuts all rows at the same
places. Between two cuts every distinct beginning is run once, however many rows go on from it, and no pass has padding
but the last one, on the right, where a causal model does not see it. So the numbers are those of each row alone,
whatever kind of attention a model has.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SHORTEST_PASS = 2
"""Tokens of a pass that goes on from a cache. One token is how models decode, in some hybrids without a gradient."""


@dataclass(frozen=True)
class Pass:
    """Part of every row that is run at once.

    Args:
        start: The first token.
        stop: The token after the last one.
        rows: One row for each distinct beginning up to `stop`; in the last pass, every row.
        parents: For each of them, the entry of the pass before that it goes on from. Empty in the first pass.
    """

    start: int
    stop: int
    rows: tuple[int, ...]
    parents: tuple[int, ...] = ()

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
    def shares(self) -> bool:
        """Whether anything is run once for several rows."""
        return len(self.passes) > 1


def make_plan(rows: Sequence[Sequence[int]], limits: Sequence[int], pass_cost: int) -> Plan:
    """The cheapest plan of those that cut where beginnings part.

    Args:
        rows: The tokens of each row.
        limits: How many tokens of each row may be run before the last pass, which alone gives hidden states.
        pass_cost: What a pass costs by itself, in tokens.
    """
    order, shared = _sorted_rows(rows)
    length = max(map(len, rows))
    cuts, cost = _cheapest_cuts(shared, length, min(limits), pass_cost)
    return Plan(_passes(cuts, length, order, shared), cost)


def make_batches(
    rows: Sequence[Sequence[int]], limits: Sequence[int], pass_cost: int, token_budget: int
) -> list[list[int]]:
    """Rows that are best run together: what begins alike, unless it costs more than to run it apart.

    Args:
        rows: The tokens of each row.
        limits: See `make_plan`.
        pass_cost: See `make_plan`.
        token_budget: The most that a batch's number of rows times its longest row may be; at least the longest row.
    """
    order, shared = _sorted_rows(rows)
    batches: list[list[int]] = []
    first = cost = length = limit = 0  # of the batch that is being filled
    for place, i in enumerate(order):
        alone = len(rows[i]) + pass_cost
        if batches:
            longest, least = max(length, len(rows[i])), min(limit, limits[i])
            if longest * (place - first + 1) <= token_budget:
                _, joined = _cheapest_cuts(shared[first:place], longest, least, pass_cost)
                if joined <= cost + alone:
                    batches[-1].append(i)
                    cost, length, limit = joined, longest, least
                    continue
        batches.append([i])
        first, cost, length, limit = place, alone, len(rows[i]), limits[i]
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


def _sorted_rows(rows: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """The rows in an order in which what begins alike is side by side, and what neighbours have in common."""
    order = sorted(range(len(rows)), key=lambda i: list(rows[i]))
    return order, [_shared_length(rows[a], rows[b]) for a, b in pairwise(order)]


def _cheapest_cuts(shared: Sequence[int], length: int, limit: int, pass_cost: int) -> tuple[list[int], int]:
    """Where to cut rows, 0 first, and what it costs.

    Args:
        shared: What neighbours have in common, of one row more, sorted.
        length: Of the longest row.
        limit: The last place where one may cut.
        pass_cost: What a pass costs by itself.
    """
    ascending, limit = sorted(shared), min(limit, length - SHORTEST_PASS)
    # best[cut]: the cheapest passes that run everything before `cut`, and the cut before it
    best: dict[int, tuple[int, int]] = {0: (0, 0)}
    for cut in sorted({cut for n in shared if (cut := min(n, limit)) > 0}):
        distinct = 1 + bisect_left(ascending, cut)
        before = [(cost, at) for at, (cost, _) in best.items() if at == 0 or cut - at >= SHORTEST_PASS]
        best[cut] = min((cost + distinct * (cut - at) + pass_cost, at) for cost, at in before)
    total, last = min((cost + (len(shared) + 1) * (length - at) + pass_cost, at) for at, (cost, _) in best.items())
    cuts = [last]
    while cuts[0]:
        cuts.insert(0, best[cuts[0]][1])
    return cuts, total


def _passes(cuts: Sequence[int], length: int, order: Sequence[int], shared: Sequence[int]) -> tuple[Pass, ...]:
    """The passes between `cuts`, the first of which is 0, and the last pass up to the end."""
    passes: list[Pass] = []
    entry = dict.fromkeys(order, 0)  # of each row in the pass before
    for start, stop in pairwise(cuts):
        firsts = {order[0]: 0}  # their places in this pass
        group = dict(firsts)
        for i, n in zip(order[1:], shared, strict=True):
            if n < stop:
                firsts[i] = len(firsts)
            group[i] = len(firsts) - 1
        passes.append(Pass(start, stop, tuple(firsts), tuple(entry[i] for i in firsts) if passes else ()))
        entry = group
    everyone = tuple(range(len(order)))
    passes.append(Pass(cuts[-1], length, everyone, tuple(entry[i] for i in everyone) if passes else ()))
    return tuple(passes)


def _shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two rows begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # a bisection, whose comparisons of slices run in C
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
