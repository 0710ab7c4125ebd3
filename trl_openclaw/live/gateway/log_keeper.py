"""Keeps the store's log short, in a thread of its own, so that no reply waits for that."""

import asyncio
import logging

from ...errors import StoreError
from ..store import Store
from ..store_thread import StoreThread

logger = logging.getLogger(__name__)

LOG_PAGES = 20_000
"""Pages in the log, 80 MB, at which a reply waits for it after all."""
PAUSE_SECONDS = 10.0


class LogKeeper:
    """Moves what was written from SQLite's log into its file, now and then.

    Args:
        store: The store.
        pause: Seconds between two times.
    """

    def __init__(self, store: Store, pause: float = PAUSE_SECONDS):
        self.pause = pause
        self._thread = StoreThread(store, "log")

    async def run(self) -> None:
        """Do it until cancelled."""
        while True:
            await asyncio.sleep(self.pause)
            try:
                await self._thread.call(Store.shorten_log)
            except StoreError as error:
                logger.warning("The store's log cannot be shortened: %s", error)

    async def aclose(self) -> None:
        """End its thread."""
        await self._thread.aclose()
