"""Next states from a Python function: a test runner, an environment, a rule."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ..calls import is_async_callable
from ..types import NextState, Turn
from .base import as_next_state

Answer = str | NextState | None


class FunctionNextState:
    """Calls `fn(turn, row)` for the next state.

    Args:
        fn (`Callable`):
            Gives a text (taken as the user's message), a `NextState` (for another role, or to say whether the reply
            pleased) or `None` for no next state. A plain function runs in a thread of the event loop's pool, a few at
            a time, and cannot be interrupted from outside: give what may hang a time limit of its own. An async
            function runs on the loop and must not block it.

    Raises:
        TypeError: When called and `fn` gives anything else.
    """

    def __init__(self, fn: Callable[[Turn, Mapping[str, Any]], Answer | Awaitable[Answer]]):
        if not callable(fn):
            raise TypeError(f"`fn` must be callable, got {type(fn).__name__}.")
        self.fn = fn
        bare = fn
        while isinstance(bare, functools.partial):
            bare = bare.func
        self._name = getattr(bare, "__name__", type(bare).__name__)
        self._is_async = is_async_callable(fn)

    async def __call__(self, turn: Turn, row: Mapping[str, Any]) -> NextState | None:
        """Call the function; what it raises is raised here."""
        answer = self.fn(turn, row) if self._is_async else await asyncio.to_thread(self._call, turn, row)
        if inspect.isawaitable(answer):
            answer = await answer
        return as_next_state(answer, f"The next-state function {self._name}")

    def _call(self, turn: Turn, row: Mapping[str, Any]) -> Any:
        try:
            return self.fn(turn, row)
        except StopIteration as error:
            # A future cannot carry StopIteration: whoever waits for it would wait forever.
            raise RuntimeError(f"The next-state function {self._name} raised StopIteration.") from error
