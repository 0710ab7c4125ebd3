"""Next states from a Python function: a test runner, an environment, a rule."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ..calls import call_in_thread, callable_name, is_async_callable, runs_in_process
from ..types import NextState, Turn
from .base import as_next_state

Answer = str | NextState | None


class FunctionNextState:
    """Calls `fn(turn, row)` for the next state.

    Args:
        fn (`Callable`):
            Gives a text (taken as the user's message), a `NextState` (for another role, or to say whether the reply
            pleased) or `None` for no next state. A plain function may block: each call runs in a thread of its own,
            several at once. A call that hangs costs its own turn and cannot be interrupted, so its thread stays until
            the process ends: give what may hang a time limit of its own. An async function runs on the event loop and
            must not block it: no time limit can cut code that blocks the loop.

    Raises:
        TypeError: When called and `fn` gives anything else.
    """

    def __init__(self, fn: Callable[[Turn, Mapping[str, Any]], Answer | Awaitable[Answer]]):
        if not callable(fn):
            raise TypeError(f"`fn` must be callable, got {type(fn).__name__}.")
        self.fn = fn
        self._is_async = is_async_callable(fn)
        self.runs_in_process = runs_in_process(fn)

    async def __call__(self, turn: Turn, row: Mapping[str, Any]) -> NextState | None:
        """Call the function; what it raises is raised here."""
        answer = self.fn(turn, row) if self._is_async else await call_in_thread(self.fn, turn, row)
        if inspect.isawaitable(answer):
            answer = await answer
        return as_next_state(answer, f"The next-state function {callable_name(self.fn)}")
