"""A judge that is a Python function."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from ..calls import call_in_thread, is_async_callable, runs_in_process
from ..types import Turn, Verdict, Vote

RuleResult = int | float | tuple[int | float | None, str | None] | Verdict | None

_ALLOWED = (
    "a rule returns a score (-1, 0 or 1), a pair (score or None, hint or None), a `Verdict`, or None when it has "
    "nothing to say"
)


class RuleJudge:
    """Judges with a function: a test runner, a detector, a lookup.

    Args:
        fn (`Callable[[Turn], RuleResult]`):
            Takes the turn and returns a score (-1, 0 or 1, also as a scalar of numpy or torch), a pair of score and
            hint (either may be `None`), a `Verdict`, or `None` when it has nothing to say about this turn. What it
            raises is passed on. A plain function may block: each call runs in a thread of its own, several at once, and
            one that hangs costs its own turn. An async function runs on the event loop and must not block it: no time
            limit can cut code that blocks the loop.

    Example:
        ```python
        judge = RuleJudge(lambda turn: 1 if "thanks" in turn.next_state.text.lower() else None)
        ```
    """

    def __init__(self, fn: Callable[[Turn], RuleResult] | Callable[[Turn], Awaitable[RuleResult]]):
        if not callable(fn):
            raise TypeError(f"`fn` must be callable, got {type(fn).__name__}.")
        self.fn = fn
        self._is_async = is_async_callable(fn)
        self.runs_in_process = runs_in_process(fn)

    async def __call__(self, turn: Turn) -> Verdict:
        """Judge `turn`."""
        result: Any = self.fn(turn) if self._is_async else await call_in_thread(self.fn, turn)
        if inspect.isawaitable(result):
            result = await result
        return _verdict(result)


def _verdict(result: Any) -> Verdict:
    if isinstance(result, Verdict):
        return result
    if isinstance(result, tuple):
        if len(result) != 2:
            raise TypeError(f"A rule returned a tuple of {len(result)}: {_ALLOWED}.")
        score, hint = result
    else:
        score, hint = result, None
    if getattr(score, "ndim", None) == 0:  # a scalar of numpy or torch
        score = score.item()
    # True is an int to Python; as a score it could mean two things (is False bad or neutral?).
    if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
        raise TypeError(f"A rule returned {score!r} as its score: {_ALLOWED}.")
    if score not in (-1, 0, 1, None):
        raise ValueError(f"A rule returned {score!r} as its score: {_ALLOWED}.")
    if hint is not None and not isinstance(hint, str):
        raise TypeError(f"A rule returned {hint!r} as its hint: {_ALLOWED}.")
    return Verdict.from_votes([Vote(score=None if score is None else int(score), hint=hint or None)])
