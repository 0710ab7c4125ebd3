"""Calling functions that users give: what they are, in a thread of their own, and without losing the event loop."""

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def is_async_callable(thing: Any) -> bool:
    """Whether calling `thing` gives a coroutine.

    Args:
        thing: A function or method, an object with `__call__`, or a `functools.partial` of one. A plain function that
            returns an awaitable does not count, nor does a class.
    """
    thing = _unwrapped(thing)
    return inspect.iscoroutinefunction(thing) or (callable(thing) and inspect.iscoroutinefunction(type(thing).__call__))


def callable_name(thing: Any) -> str:
    """The name by which an error can speak of a callable, also of an object or a `functools.partial`."""
    thing = _unwrapped(thing)
    return getattr(thing, "__name__", type(thing).__name__)


def runs_in_process(thing: Any) -> bool:
    """Whether a judge, a next state or a chat says of itself that it runs a model in this process.

    Such a thing must not be asked while the policy samples: it may be the policy itself, and both would draw from the
    same random state. Everything else may, also plain functions in threads, which take their share of the CPU then.

    Args:
        thing: Says so by an attribute `runs_in_process`, and does not when it has none. A method speaks for its object.
    """
    thing = _unwrapped(thing)
    owner = getattr(thing, "__self__", None)
    return bool(getattr(thing, "runs_in_process", getattr(owner, "runs_in_process", False)))


def _unwrapped(thing: Any) -> Any:
    while isinstance(thing, functools.partial):
        thing = thing.func
    return thing


async def call_in_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that may block in a thread of its own, and wait for it.

    `asyncio.to_thread` shares a small pool: functions that hang would use it up for good, and the interpreter would
    wait for them before it exits. Here one that hangs costs its own thread, which the interpreter does not wait for.

    Args:
        fn: The function. It sees the caller's context variables. Cancelling the wait does not interrupt it.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        What `fn` returns. What it raises is raised here, `exit()` as a `RuntimeError`, and `StopIteration`, too, which
        no future can carry.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():  # done when whoever waited was cancelled
            set_outcome(outcome)

    def work() -> None:
        outcome: tuple[Callable[[Any], None], Any]
        try:
            with exits_as_errors():
                outcome = future.set_result, context.run(fn, *args, **kwargs)
        except StopIteration as error:
            stopped = RuntimeError(f"{callable_name(fn)} raised StopIteration.")
            stopped.__cause__ = error
            outcome = future.set_exception, stopped
        except BaseException as error:
            outcome = future.set_exception, error
        with suppress(RuntimeError):  # the loop was closed in the meantime
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name=f"call {callable_name(fn)}", daemon=True).start()
    return await future


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Turn what would end the event loop, such as `exit()` in the code of a user, into a `RuntimeError`.

    The loop of TRL runs in a thread of its own. Were it to end, the trainer would wait for it forever. A cancelled task
    stays cancelled, and Ctrl-C, which Python raises in the main thread alone, stays Ctrl-C.
    """
    try:
        yield
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
