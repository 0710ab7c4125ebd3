"""Which adapter answers a user: follows what is published, and changes it without a request noticing."""

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ...errors import EngineError, StoreError
from ..engines import Engine
from ..records import BASE_VERSION
from ..store import Store
from ..store_thread import StoreThread
from .metrics import Metrics

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
RETRY_SECONDS = 2.0
"""Pause before the second try; it doubles with each one, up to a minute."""
LONGEST_PAUSE = 60.0


_OF_STORE = "@"
"""What stands in an adapter's name before its store's identity. No user's name has it."""


@dataclass(eq=False)
class Served:
    """A version that answers, or answered.

    Args:
        version: Its name in the store.
        adapter: Its name in the engine; `None` for the base model.
        path: Its folder.
        in_flight: Requests that it is answering.
        retired: Whether no new request gets it.
    """

    version: str
    adapter: str | None
    path: Path | None
    in_flight: int = 0
    retired: bool = False


@dataclass
class _Problem:
    version: str
    text: str
    tries: int
    again_at: float | None
    """When to try again; `None` where the version was given up, which is said until another one is loaded."""


class ServedVersions:
    """The version of each user, as published in the store.

    A new version is loaded while the old one answers. Then the user's pointer changes, between two requests; those in
    flight end on the old version, which is unloaded after the last of them. One that the engine
    refuses is published no longer: the store is told, and says which one is. Any other failure says nothing about the
    adapter, and loading is tried again.

    An engine may outlive the gateway, and serve several. So an adapter's name there says which store it belongs to and
    changes with its files: `USER-VERSION@STORE-FILES`. What an earlier gateway of the same store left is unloaded.

    Args:
        store: Where versions are published.
        engine: Where they are loaded.
        users: Whose versions to follow.
        metrics: Where swaps and failures are counted.
        poll_seconds: Pause between two looks into the store.
    """

    def __init__(
        self, store: Store, engine: Engine, users: Iterable[str], metrics: Metrics, poll_seconds: float = POLL_SECONDS
    ):
        self.engine, self.metrics, self.poll_seconds = engine, metrics, poll_seconds
        self._thread = StoreThread(store, "versions")
        self._serving = {user: Served(BASE_VERSION, None, None) for user in users}
        self._problems: dict[str, _Problem] = {}
        self._known: dict[str, Served] = {}
        self._lock = asyncio.Lock()  # one change in the engine at a time, so that loading and unloading never cross
        self._following = asyncio.Lock()  # one change of what answers at a time, by the store's latest word
        self._unloading: set[asyncio.Task] = set()
        self._seen: int | None = None
        self._store_id = ""
        self._tidy_at = 0.0  # when to look for what nobody needs; infinity while there is no reason to

    def problem(self, user: str) -> str | None:
        """What keeps this user's published version from answering, or `None`."""
        found = self._problems.get(user)
        return None if found is None else f"{found.version}: {found.text}"

    def current(self, user: str) -> str:
        """The version that a new request of this user gets."""
        return self._serving[user].version

    @contextmanager
    def lease(self, user: str) -> Iterator[Served]:
        """The user's version, which stays loaded for as long as the context lasts."""
        served = self._serving[user]
        served.in_flight += 1
        try:
            yield served
        finally:
            served.in_flight -= 1
            self._unload_if_done(served)

    async def load_again(self, user: str, served: Served) -> None:
        """Load a version that the engine has forgotten, after a restart say.

        If that fails, it is this user's problem, as with a version that is new, and meanwhile another one answers: that
        which is published instead, or the base model.
        """
        assert served.adapter is not None
        assert served.path is not None
        async with self._following:
            if self._serving[user] is not served:  # another request was faster
                return
            try:
                async with self._lock:
                    await self.engine.load(served.adapter, served.path)
            except EngineError as error:
                self._serve(user, Served(BASE_VERSION, None, None))
                with suppress(StoreError):
                    await self._failed(user, served.version, error)
                    self._problems.setdefault(user, _Problem(served.version, str(error), 0, None))

    async def run(self) -> None:
        """Follow the store until cancelled."""
        while True:
            try:
                await self.follow()
                if time.monotonic() >= self._tidy_at:
                    await self._tidy()
            except StoreError as error:
                logger.warning("Published versions cannot be read: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:
                logger.exception("Published versions cannot be followed")
                await asyncio.sleep(RETRY_SECONDS)
            await asyncio.sleep(self.poll_seconds)

    async def follow(self) -> None:
        """Let every user have what is published for them now."""
        async with self._following:
            await self._follow_all()

    async def _follow_all(self) -> None:
        seen = await self._thread.call(Store.data_version)
        due = [user for user, found in self._problems.items() if found.again_at and time.monotonic() >= found.again_at]
        users = list(self._serving) if seen != self._seen else due
        for user in users:
            await self._follow(user)
        self._seen = seen

    async def _follow(self, user: str) -> None:
        wanted = await self._thread.call(Store.published_version, user)
        problem = self._problems.get(user)
        if wanted == self._serving[user].version:
            if problem and problem.again_at:
                del self._problems[user]
            return
        if problem and problem.version == wanted and problem.again_at and time.monotonic() < problem.again_at:
            return
        try:
            new = await self._load(user, wanted)
        except EngineError as error:
            await self._failed(user, wanted, error)
            return
        self._problems.pop(user, None)
        self._serve(user, new)

    def _serve(self, user: str, new: Served) -> None:
        old, self._serving[user] = self._serving[user], new
        old.retired, new.retired = True, False
        self.metrics.swaps.inc()
        logger.info("Version %s answers in place of %s.", new.version, old.version)
        self._unload_if_done(old)

    async def _load(self, user: str, version: str) -> Served:
        if version == BASE_VERSION:
            return Served(version, None, None)
        path, stamp = await self._folder_of(user, version)
        adapter = f"{user}-{version}{_OF_STORE}{await self._identity()}-{stamp}"
        async with self._lock:
            served = self._known.get(adapter) or Served(version, adapter, path)
            served.retired = False  # should it be about to be unloaded
            await self.engine.load(adapter, path)
            self._known[adapter] = served
        return served

    async def _folder_of(self, user: str, version: str) -> tuple[Path, str]:
        """A version's folder, and a word that changes with its files."""
        infos = await self._thread.call(Store.versions, user)
        path = next((Path(info.path) for info in infos if info.version == version), None)
        try:
            if path is not None and (path / "adapter_config.json").is_file():
                return path, _stamp(path)
        except OSError as error:
            raise EngineError("refused", f"the adapter in {path} cannot be read: {error.strerror}") from error
        raise EngineError("refused", f"there is no adapter in {path}")

    async def _identity(self) -> str:
        self._store_id = self._store_id or await self._thread.call(Store.identity)
        return self._store_id

    async def _tidy(self) -> None:
        """Unload what is this store's and nobody needs: what the gateway before left, or could not be unloaded."""
        ours = f"{_OF_STORE}{await self._identity()}-"
        self._tidy_at = math.inf
        try:
            async with self._lock:
                for name in await self.engine.loaded():
                    if ours in name and name not in self._known:
                        await self.engine.unload(name)
        except EngineError as error:
            self._tidy_at = time.monotonic() + LONGEST_PAUSE
            logger.warning("Adapters that nobody needs any more cannot be unloaded now: %s", error)

    async def _failed(self, user: str, version: str, error: EngineError) -> None:
        self.metrics.load_failures.inc()
        logger.warning("Version %s cannot be loaded, %s answers on: %s", version, self.current(user), error)
        self._try_later(user, version, str(error))  # also where it is refused and the store cannot be told so
        if error.kind != "refused":
            return
        await self._thread.call(Store.add_version_event, user, version, "load_failed", {"error": str(error)})
        self._problems[user] = _Problem(version, str(error), 0, None)
        await self._follow(user)  # the one that is published instead

    def _try_later(self, user: str, version: str, text: str) -> None:
        before = self._problems.get(user)
        tries = before.tries + 1 if before and before.version == version else 1
        pause = min(RETRY_SECONDS * 2 ** (tries - 1), LONGEST_PAUSE)
        self._problems[user] = _Problem(version, text, tries, time.monotonic() + pause)

    def _unload_if_done(self, served: Served) -> None:
        if served.retired and served.in_flight == 0 and served.adapter is not None:
            task = asyncio.get_running_loop().create_task(self._unload(served, served.adapter))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def _unload(self, served: Served, adapter: str) -> None:
        async with self._lock:
            if not served.retired or served.in_flight or self._known.pop(adapter, None) is None:
                return
            try:
                await self.engine.unload(adapter)
            except EngineError as error:
                self._tidy_at = time.monotonic() + LONGEST_PAUSE
                logger.warning("Version %s is not needed any more and cannot be unloaded: %s", served.version, error)

    async def aclose(self) -> None:
        """Wait for what is being unloaded."""
        await asyncio.gather(*self._unloading, return_exceptions=True)
        await self._thread.aclose()


def _stamp(folder: Path) -> str:
    """A word that changes when files of a folder are written, or others take their place."""
    files = [(file.name, file.stat()) for file in folder.iterdir()]
    known = sorted((name, stat.st_ino, stat.st_size, stat.st_ctime_ns) for name, stat in files)
    return hashlib.sha256(repr(known).encode()).hexdigest()[:8]
