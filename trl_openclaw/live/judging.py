"""Judges answered turns in the background. Chat never waits for it, and it goes on where it was after a crash."""

import asyncio
import logging
import sqlite3
import traceback
from collections.abc import Set
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from ..errors import ChatError, JudgeUnavailableError, StoreError
from ..judges import Judge
from ..server_client import failure_kind
from ..trajectories import next_state_of
from ..types import Turn, Verdict
from .records import StoredTurn
from .store import Store
from .store_thread import StoreThread

if TYPE_CHECKING:
    from .gateway.metrics import Metrics

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
"""Pause between two looks into the store when nobody says that there is something new."""

PAUSES = (1.0, 60.0)
"""Seconds to wait while the judge cannot be reached, or the store takes no verdict: at first, and at most."""

MAX_TRIES = 3
"""How often a turn is shown to a judge that can be reached and gives no verdict, or one that the store refuses, before
its failure is the verdict."""

JUDGE_SECONDS = 600.0

_PASSING = {
    "unreachable": "it cannot be reached, or is too busy",
    "timeout": "it does not answer in time",
    "denied": "its server does not take the key, has no such model, or wants to be paid: see `--judge-api-key-env` and "
    "`--judge-model`",
}
"""Failures of votes that say something about the judge's server, or the key to it, and nothing about the turn."""

_REFUSALS = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError)

_FAILED = Verdict(None, "failed")


class JudgingWorker:
    """Takes turns that wait for a verdict, oldest first, so many at a time.

    While the judge cannot be reached, turns wait in the store, and the judge is asked again with growing pauses. A turn
    that it cannot judge for another reason gets a few tries; then its failure is what is stored. A verdict that cannot
    be stored now is kept, with its place among those that are judged at once, and stored later: nothing is paid twice.

    Args:
        store: Where turns wait and verdicts go.
        judge: What is asked.
        metrics: Where verdicts and failures are counted.
        concurrency: Turns that are judged at once.
    """

    def __init__(self, store: Store, judge: Judge, metrics: "Metrics", concurrency: int):
        self.judge, self.metrics, self.concurrency = judge, metrics, concurrency
        self._thread = StoreThread(store, "judging")
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tries: dict[str, int] = {}
        self._misses: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pause = 0.0
        self._down: str | None = None
        self._unread: str | None = None
        self._refused: str | None = None
        self._unstored: dict[str, str] = {}

    @property
    def problem(self) -> str | None:
        """What keeps turns from their verdicts, or `None`."""
        if self._unstored:
            why = next(reversed(self._unstored.values()))
            return f"verdicts that wait in memory until they can be stored: {len(self._unstored)} ({why})"
        return self._unread or self._refused or self._down

    def wake(self) -> None:
        """Say that a turn may have been answered; from any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._changed.set)

    async def run(self) -> None:
        """Judge until cancelled. Turns that are being judged then are judged again at the next start."""
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                await self._start_some()
                await self._wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def aclose(self) -> None:
        """Let go of the store."""
        await self._thread.aclose()

    async def _wait(self) -> None:
        self._changed.clear()
        if self._pause:
            await asyncio.sleep(self._pause)
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), POLL_SECONDS)

    async def _start_some(self) -> None:
        """Begin with as many turns as there is room for; with one where the judge failed last time."""
        room = (1 if self._pause else self.concurrency) - len(self._tasks)
        if room <= 0:
            return
        # Past all that are known to fail, however many those are: they hold up no other.
        limit = len(self._tasks.keys() | self._misses.keys()) + room
        try:
            turns = await self._thread.call(Store.unjudged, limit)
        except Exception as error:
            self._unread = f"turns to judge cannot be read: {_said(error)}"
            logger.warning("Turns to judge cannot be read: %s", _said(error))
            return
        self._unread = None
        if len(turns) < limit:  # these are all there are; others were deleted, or have expired
            self._forget({*self._tries, *self._misses} - {turn.turn_id for turn in turns})
        waiting = [turn for turn in turns if turn.turn_id not in self._tasks]
        waiting.sort(key=lambda turn: self._misses.get(turn.turn_id, 0))
        for turn in waiting[:room]:
            task = asyncio.create_task(self._judge(turn))
            self._tasks[turn.turn_id] = task
            task.add_done_callback(partial(self._ended, turn.turn_id))
        self.metrics.judging.set(len(self._tasks))

    def _ended(self, turn_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(turn_id, None)
        self.metrics.judging.set(len(self._tasks))
        self._changed.set()

    def _forget(self, turn_ids: Set[str]) -> None:
        for turn_id in turn_ids:
            self._tries.pop(turn_id, None)
            self._misses.pop(turn_id, None)

    async def _judge(self, stored: StoredTurn) -> None:
        verdict, failure = await self._ask(stored)
        if failure is None:
            self._pause, self._down = 0.0, None
        else:
            self.metrics.judge_failures.labels(failure).inc()
            if self._again(stored.turn_id, failure):
                return
        await self._keep(stored, verdict or _FAILED)

    async def _ask(self, stored: StoredTurn) -> tuple[Verdict | None, str | None]:
        """The judge's verdict, and why it is none."""
        try:
            async with asyncio.timeout(JUDGE_SECONDS):
                verdict = await self.judge(turn_to_judge(stored))
            return verdict, failure_of(verdict)
        except Exception as error:
            # Where, and not what it says: that may quote the turn.
            place = traceback.extract_tb(error.__traceback__)[-1]
            kind = type(error).__name__
            logger.warning("The judge failed on %s: %s at %s:%s", stored.turn_id, kind, place.filename, place.lineno)
            return None, failure_behind(error)

    def _again(self, turn_id: str, failure: str) -> bool:
        """Whether a turn is to be judged again, after a pause where the judge is not to be had."""
        was_down, is_down = self._pause > 0, failure in _PASSING
        self._misses[turn_id] = self._misses.get(turn_id, 0) + 1
        if is_down:
            self._pause = min(max(2 * self._pause, PAUSES[0]), PAUSES[1])
            self._down = f"the judge cannot be asked ({_PASSING[failure]}); turns wait"
        else:
            self._pause, self._down = 0.0, None
        if was_down and is_down:
            return True
        self._tries[turn_id] = self._tries.get(turn_id, 0) + 1
        return self._tries[turn_id] < MAX_TRIES

    async def _keep(self, stored: StoredTurn, verdict: Verdict) -> None:
        """Store a verdict, however long that takes. One that the store refuses is a failure of the judge."""
        try:
            while not await self._store(stored, verdict):
                self.metrics.judge_failures.labels("unstorable").inc()
                if self._again(stored.turn_id, "unstorable"):
                    return
                verdict = _FAILED
        finally:
            self._unstored.pop(stored.turn_id, None)
        if verdict is not _FAILED:
            self._refused = None
        self._forget({stored.turn_id})
        self.metrics.judged.labels(verdict.outcome).inc()

    async def _store(self, stored: StoredTurn, verdict: Verdict) -> bool:
        """Whether the store takes a verdict, now or later; with growing pauses."""
        pause = PAUSES[0]
        while True:
            try:
                await self._thread.call(Store.add_verdict, stored.turn_id, verdict, on=stored.next_state)
                return True
            except Exception as error:
                self.metrics.store_failures.inc()
                logger.warning("A verdict on %s cannot be stored: %s", stored.turn_id, _said(error))
                if _is_refusal(error) and verdict is not _FAILED:
                    self._refused = f"the store refused the judge's last verdict: {_said(error)}"
                    return False
                self._unstored[stored.turn_id] = _said(error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSES[1])


def _is_refusal(error: Exception) -> bool:
    """Whether the store has something against the verdict itself, so that it would not take it later either."""
    return not isinstance(error, StoreError) or isinstance(error.__cause__, _REFUSALS)


def _said(error: Exception) -> str:
    """What a log may say of an error of the store. Others may quote a turn."""
    return str(error) if isinstance(error, StoreError) else type(error).__name__


def turn_to_judge(stored: StoredTurn) -> Turn:
    """A stored turn as judges take it."""
    return Turn(
        prompt=stored.messages,
        completion=[stored.reply],
        next_state=next_state_of(stored.next_state or []),
        truncated=stored.finish_reason == "length",
        session_id=stored.session_id,
    )


def failure_behind(error: Exception) -> str:
    """What an exception of a judge is counted as: who has a judge of one's own raises what its libraries raise."""
    if isinstance(error, ChatError):
        return error.kind
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, JudgeUnavailableError | ConnectionError):
        return "unreachable"
    return failure_kind(error)


def failure_of(verdict: Verdict) -> str | None:
    """Why the judge failed outright, by its votes; `None` when it did not.

    Where some votes failed because nobody answered, and no other vote came through, the judge is not to be had.
    """
    if not verdict.failed:
        return None
    failures = [vote.failure for vote in verdict.votes if vote.failure is not None]
    return next((failure for failure in failures if failure in _PASSING), failures[0] if failures else "error")
