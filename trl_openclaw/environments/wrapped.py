"""Any TRL environment in a process of its own, so that none of its code runs in the trainer."""

import functools
import inspect
import pickle
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ..types import NextState, ToolResult
from .wrapped_worker import EnvironmentFailedError, Worker


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
        with self._worker.lock:  # a question that somebody has given up is answered before
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
        self._worker = Worker(recipe, timeout, start_timeout)
        weakref.finalize(self, self._worker.stop)

    @property
    def next_state(self) -> Any:
        """What followed the last turn, as the environment says; a note without a verdict where it has ended."""
        how, value = self._worker.ask("get", "next_state")
        if how == "value":
            return value
        return None if how == "missing" else NextState(value, role="tool", info={"ended": how})

    @property
    def verdict(self) -> Any:
        """The environment's word for how it went, `None` if it has none; the way it ended where it has ended."""
        how, value = self._worker.ask("get", "verdict")
        return value if how == "value" else None if how == "missing" else how

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        how, value = self._worker.ask("get", name)
        if how != "value":
            raise AttributeError(f"`{type(self).__name__}` has no {name!r} now: {value}")
        return value
