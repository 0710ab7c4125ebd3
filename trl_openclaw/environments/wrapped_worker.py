"""The process of a wrapped environment: the trainer's end, which asks and never waits for long, and the worker's.

A message is its length in four bytes, then its bytes. The trainer's are pickles, the worker's plain data.
"""

import asyncio
import inspect
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..errors import OpenClawError
from ..next_states.views import clip
from ..types import ToolResult
from .plain_data import pack, unpack

_MAX_BYTES = 64 << 20
_LENGTH = struct.Struct("!I")
_MISSING = object()
_ANSWERS = ("value", "raised", "missing")


class EnvironmentFailedError(OpenClawError):
    """A wrapped environment cannot be started or reset."""


# --- messages -------------------------------------------------------------------------------------------------------


def _send(channel: socket.socket, data: bytes, deadline: float | None = None) -> None:
    channel.settimeout(_time_left(deadline))
    channel.sendall(_LENGTH.pack(len(data)) + data)


def _receive(channel: socket.socket, deadline: float | None = None) -> bytes:
    (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size, deadline))
    if deadline is not None and length > _MAX_BYTES:
        raise ValueError(f"it has {length >> 20} MiB, at most {_MAX_BYTES >> 20} are read")
    return _read(channel, length, deadline)


def _read(channel: socket.socket, count: int, deadline: float | None) -> bytes:
    """So many bytes, whatever the pieces they come in, before the deadline; past it a `TimeoutError`."""
    data = bytearray()
    while len(data) < count:
        channel.settimeout(_time_left(deadline))
        piece = channel.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _time_left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


# --- the trainer's end ----------------------------------------------------------------------------------------------


class Worker:
    """A process with an environment, asked for one thing at a time; who asks for several together holds `lock`.

    Args:
        recipe: Pickle of the class, its arguments and the longest text that is answered.
        timeout: Seconds for a question and its answer.
        start_timeout: Seconds until the environment is made.
    """

    def __init__(self, recipe: bytes, timeout: float, start_timeout: float):
        self.recipe, self.timeout, self.start_timeout = recipe, timeout, start_timeout
        self.lock = threading.RLock()
        self.process: Any = None
        self.channel: socket.socket | None = None
        self.ended = ("ended", "The environment was not reset yet.")

    def start(self) -> None:
        """Start the process, unless it runs."""
        if self.process is not None and self.process.is_alive():
            return
        self.stop()
        self.channel, theirs = socket.socketpair()
        with theirs:
            context = multiprocessing.get_context("spawn")
            process = context.Process(target=_serve, args=(theirs, self.recipe), daemon=True)
            process.start()
            self.process = process
        how, value = self._answer(None, self.start_timeout)
        if how != "value":
            self.stop()
            raise EnvironmentFailedError(f"The environment could not be made: {value}")

    def ask(self, *request: Any) -> tuple[str, Any]:
        """Ask for something: `("value", it)`, or what went wrong in a word and in a sentence."""
        with self.lock:
            if self.channel is None:
                return self.ended
            return self._answer(pickle.dumps(request), self.timeout)

    def _answer(self, request: bytes | None, timeout: float) -> tuple[str, Any]:
        assert self.channel
        deadline = time.monotonic() + timeout
        try:
            if request is not None:
                _send(self.channel, request, deadline)
            how, value = unpack(_receive(self.channel, deadline))
            if how not in _ANSWERS or (how != "value" and type(value) is not str):
                raise ValueError("no answer")
        except TimeoutError:
            return self._end("timeout", f"Stopped after {timeout:g} s without an answer.")
        except (EOFError, OSError):
            return self._end("died", "The environment's process has ended by itself.")
        except (ValueError, TypeError) as error:
            return self._end("died", f"The environment's process gave an answer that cannot be read: {error}.")
        except BaseException:  # an interrupt: what is still to come must not answer the next question
            self.stop()
            raise
        return how, value

    def _end(self, how: str, text: str) -> tuple[str, str]:
        self.stop()
        self.ended = (how, f"{text} The environment has ended.")
        return self.ended

    def stop(self) -> None:
        """Kill the process and what is in its group."""
        process, self.process = self.process, None
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()
        if process is not None:
            with suppress(OSError):  # the group is there once the worker has made it
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            process.close()
        self.ended = ("ended", "The environment has ended.")


# --- the worker's end -----------------------------------------------------------------------------------------------


def _serve(channel: socket.socket, recipe: bytes) -> None:
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
        _send(channel, _packed(answer, max_chars))
        try:
            what, name, *rest = pickle.loads(_receive(channel))
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
