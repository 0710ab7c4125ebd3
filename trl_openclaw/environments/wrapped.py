"""Any TRL environment in a process of its own, so that none of its code runs in the trainer."""

import asyncio
import functools
import inspect
import multiprocessing
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from ..errors import OpenClawError
from ..next_states.views import clip
from ..types import NextState, ToolResult
from .plain_data import pack, unpack

_MAX_BYTES = 64 << 20
_MISSING = object()
_ANSWERS = ("value", "raised", "missing")


class EnvironmentFailedError(OpenClawError):
    """A wrapped environment cannot be started or reset."""


def wrap_environment(
    environment_class: type,
    *,
    arguments: Mapping[str, Any] | None = None,
    timeout: float = 30.0,
    start_timeout: float = 120.0,
    max_chars: int = 20_000,
) -> type:
    """A class with the same tools, whose instances live in a worker process each.

    The tools keep names, signatures and docstrings, so TRL makes the same schemas of them; `reset`, `get_reward`,
    `next_state` and other public attributes are forwarded. What a tool prints is dropped. A tool that raises answers
    with a [`~trl_openclaw.types.ToolResult`] that says what; one that takes too long is killed with its worker, and the
    environment answers that it has ended until it is reset. A worker ends with the trainer.

    This keeps the trainer alive and responsive; it is no sandbox. What an agent writes belongs into a
    [`~trl_openclaw.environments.Sandbox`]. A worker is a daemon of `multiprocessing`: it may start programs, not
    further `multiprocessing` processes. What a tool returns must be text, numbers, bytes, lists, dicts, `ToolResult`,
    `NextState` or PIL images (their first frame, as PNG keeps it); it is passed on as data, which runs no code.

    Args:
        environment_class: The class. It must be importable, so defined at the top level of a module.
        arguments: Keyword arguments of its constructor.
        timeout: How long a call may take, in seconds.
        start_timeout: How long starting the worker and making the environment may take, in seconds.
        max_chars: Longest text that a tool answers; of a longer one its head and its tail are kept.

    Returns:
        A class for TRL's `environment_factory`, of the same name.
    """
    if not inspect.isclass(environment_class):
        raise ValueError(f"`environment_class` must be a class, got {environment_class!r}.")
    if not callable(getattr(environment_class, "reset", None)):
        raise ValueError(f"`{environment_class.__name__}` has no `reset`, which TRL asks of an environment.")
    try:
        recipe = pickle.dumps((environment_class, dict(arguments or {}), max_chars))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"`{environment_class.__name__}` and its arguments must be picklable, the class defined at the top level "
            f"of a module: {error}"
        ) from None

    members: dict[str, Any] = {"__doc__": environment_class.__doc__, "__module__": environment_class.__module__}
    for name, method in inspect.getmembers(environment_class, predicate=inspect.isfunction):
        if name == "get_reward":
            members[name] = _reward(method)
        elif name == "reset":
            members[name] = _reset(method)
        elif not name.startswith("_"):
            members[name] = _tool(method)

    def __init__(self: Any) -> None:
        _Wrapped.__init__(self, recipe, timeout, start_timeout)

    return type(environment_class.__name__, (_Wrapped,), members | {"__init__": __init__})


def _tool(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: "_Wrapped", *args: Any, **kwargs: Any) -> Any:
        how, value = self._worker.ask("call", method.__name__, args, kwargs)
        if how == "value":
            return value
        # Only an error of the tool's own is surely about how it was called.
        satisfied, info = (False, {"wish": value}) if how == "raised" else (None, {})
        return ToolResult(value, satisfied=satisfied, info={"ended": how} | info)

    return call


def _reward(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def get_reward(self: "_Wrapped") -> Any:
        how, value = self._worker.ask("call", "get_reward")
        return value if how == "value" else None  # no score rather than a wrong one

    return get_reward


def _reset(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def reset(self: "_Wrapped", *args: Any, **kwargs: Any) -> Any:
        for _ in range(2):  # a worker that broke in the meantime is replaced once
            self._worker.start()
            how, value = self._worker.ask("call", "reset", args, kwargs)
            if how == "value":
                return value
            self._worker.stop()
        raise EnvironmentFailedError(f"`{type(self).__name__}.reset` failed: {value}")

    return reset


class _Wrapped:
    def __init__(self, recipe: bytes, timeout: float, start_timeout: float):
        self._worker = _Worker(recipe, timeout, start_timeout)
        weakref.finalize(self, self._worker.stop)

    @property
    def next_state(self) -> Any:
        """What followed the last turn, as the environment says; a note without a verdict where it has ended."""
        how, value = self._worker.ask("get", "next_state")
        if how == "value":
            return value
        return None if how == "missing" else NextState(value, role="tool", info={"ended": how})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        how, value = self._worker.ask("get", name)
        if how != "value":
            raise AttributeError(f"`{type(self).__name__}` has no {name!r} now: {value}")
        return value


# --- the trainer's end ----------------------------------------------------------------------------------------------


class _Worker:
    def __init__(self, recipe: bytes, timeout: float, start_timeout: float):
        self.recipe, self.timeout, self.start_timeout = recipe, timeout, start_timeout
        self.process: Any = None
        self.connection: Connection | None = None
        self.ended = ("ended", "The environment was not reset yet.")

    def start(self) -> None:
        """Start the process, unless it runs."""
        if self.process is not None and self.process.is_alive():
            return
        self.stop()
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.recipe), daemon=True)
        self.process.start()
        theirs.close()
        how, value = self._receive(self.start_timeout)
        if how != "value":
            self.stop()
            raise EnvironmentFailedError(f"The environment could not be made: {value}")

    def ask(self, *request: Any) -> tuple[str, Any]:
        """Ask for something: `("value", it)`, or what went wrong in a word and in a sentence."""
        if self.connection is None:
            return self.ended
        try:
            self.connection.send_bytes(pickle.dumps(request))
        except OSError:
            return self._end("died", "The environment's process has ended by itself.")
        return self._receive(self.timeout)

    def _receive(self, timeout: float) -> tuple[str, Any]:
        assert self.connection
        try:
            if not self.connection.poll(timeout):
                return self._end("timeout", f"Stopped after {timeout:g} s without an answer.")
            data = self.connection.recv_bytes(_MAX_BYTES)
        except (EOFError, OSError):
            return self._end("died", "The environment's process has ended by itself, or answered too much.")
        try:
            how, value = unpack(data)
            if how not in _ANSWERS or (how != "value" and type(value) is not str):
                raise ValueError("no answer")
        except (ValueError, TypeError) as error:
            return self._end("died", f"The environment's process gave an answer that cannot be read: {error}.")
        return how, value

    def _end(self, how: str, text: str) -> tuple[str, str]:
        self.stop()
        self.ended = (how, f"{text} The environment has ended.")
        return self.ended

    def stop(self) -> None:
        """Kill the process and what is in its group."""
        process, self.process = self.process, None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
        if process is not None:
            with suppress(OSError):  # the group is there once the worker has made it
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            process.close()
        self.ended = ("ended", "The environment has ended.")


# --- the worker's end -----------------------------------------------------------------------------------------------


def _serve(connection: Connection, recipe: bytes) -> None:
    os.setsid()
    _leave_with_parent()
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    max_chars = 0
    environment: Any = None

    def make() -> None:
        nonlocal environment, max_chars
        environment_class, arguments, max_chars = pickle.loads(recipe)
        environment = environment_class(**arguments)

    answer = _answer(make)
    while True:
        connection.send_bytes(_packed(answer, max_chars))
        try:
            what, name, *rest = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if what == "get":
            answer = _answer(getattr, environment, name, _MISSING)
            if answer[1] is _MISSING:
                answer = ("missing", f"there is no {name!r}")
        else:
            args, kwargs = rest or ((), {})
            answer = _answer(getattr(environment, name), *args, **kwargs)


def _answer(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, Any]:
    try:
        result = call(*args, **kwargs)
        if inspect.isawaitable(result):
            result = asyncio.run(_wait_for(result))
        return "value", result
    except BaseException as error:
        return "raised", f"{type(error).__name__}: {error}".rstrip(": ")


async def _wait_for(result: Any) -> Any:
    return await result


def _packed(answer: tuple[str, Any], max_chars: int) -> bytes:
    how, value = answer
    if isinstance(value, ToolResult):
        value = ToolResult(clip(value, max_chars), satisfied=value.satisfied, info=value.info)
    elif isinstance(value, str) and how != "missing":
        value = clip(str(value), max_chars or 2000)
    try:
        return pack((how, value))
    except Exception as error:
        return pack(("raised", f"The answer cannot be passed on: {error}"))


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            with suppress(OSError):
                os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
