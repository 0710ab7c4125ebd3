"""What is known about a callable before it is called."""

import functools
import inspect
from typing import Any


def is_async_callable(thing: Any) -> bool:
    """Whether calling `thing` gives a coroutine.

    Args:
        thing: A function or method, an object with `__call__`, or a `functools.partial` of one. A plain function that
            returns an awaitable does not count, nor does a class.
    """
    while isinstance(thing, functools.partial):
        thing = thing.func
    return inspect.iscoroutinefunction(thing) or (callable(thing) and inspect.iscoroutinefunction(type(thing).__call__))
