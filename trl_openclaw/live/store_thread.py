"""The store from an event loop: every call in one thread, which has one connection."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from .store import Store

P = ParamSpec("P")
T = TypeVar("T")


class StoreThread:
    """Calls methods of a store, one after the other, without blocking the event loop.

    Args:
        store: The store.
        name: The thread's name.
    """

    def __init__(self, store: Store, name: str):
        self._store = store
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"store {name}")

    async def call(self, method: Callable[Concatenate[Store, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a method of the store returns, such as `call(Store.published_version, "default")`."""

        def work() -> Any:
            return method(self._store, *args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def aclose(self) -> None:
        """Close the thread's connection and end it."""
        await self.call(Store.close)
        self._executor.shutdown(wait=False)
