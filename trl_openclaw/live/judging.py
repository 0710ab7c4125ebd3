"""Judges answered turns in the background. Chat never waits for it, and it goes on where it was after a crash."""

import asyncio
import logging
import traceback
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from ..errors import StoreError
from ..judges import Judge
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
"""Seconds to wait while the judge cannot be reached: at first, and at most."""

MAX_TRIES = 3
"""How often a turn is shown to a judge that can be reached and gives no verdict, before its failure is the verdict."""

JUDGE_SECONDS = 600.0

_LOOK_AHEAD = 32

_PASSING = {"unreachable", "timeout"}
"""Failures of votes that say something about the judge's server and nothing about the turn."""


class JudgingWorker:
    """Takes turns that wait for a verdict, oldest first, so many at a time.

    While the judge cannot be reached, turns wait in the store, and the judge is asked again with growing pauses. A turn
    that it cannot judge for another reason gets a few tries; then its failure is what is stored.

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
        self.problem: str | None = None
        """Why nothing is judged, or `None`."""

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
        try:
            turns = await self._thread.call(Store.unjudged, len(self._tasks) + max(room, _LOOK_AHEAD))
        except StoreError as error:
            logger.warning("Turns to judge cannot be read: %s", error)
            return
        waiting = [turn for turn in turns if turn.turn_id not in self._tasks]
        waiting.sort(
            key=lambda turn: self._misses.get(turn.turn_id, 0)
        )  # one that fails again and again holds up no other
        for turn in waiting[:room]:
            task = asyncio.create_task(self._judge(turn))
            self._tasks[turn.turn_id] = task
            task.add_done_callback(partial(self._ended, turn.turn_id))
        self.metrics.judging.set(len(self._tasks))

    def _ended(self, turn_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(turn_id, None)
        self.metrics.judging.set(len(self._tasks))
        self._changed.set()

    async def _judge(self, stored: StoredTurn) -> None:
        verdict = None
        try:
            async with asyncio.timeout(JUDGE_SECONDS):
                verdict = await self.judge(turn_to_judge(stored))
            failure = failure_of(verdict)
        except Exception as error:
            # Where, and not what it says: that may quote the turn.
            place = traceback.extract_tb(error.__traceback__)[-1]
            kind = type(error).__name__
            logger.warning("The judge failed on %s: %s at %s:%s", stored.turn_id, kind, place.filename, place.lineno)
            failure = "error"
        if failure is not None:
            self.metrics.judge_failures.labels(failure).inc()
        if failure is None:
            self._pause, self.problem = 0.0, None
        if failure is None or not self._again(stored.turn_id, failure):
            await self._keep(stored, verdict or Verdict(None, "failed"))

    def _again(self, turn_id: str, failure: str) -> bool:
        """Whether a turn is to be judged again, after a pause where the judge is not to be had."""
        was_down, is_down = self._pause > 0, failure in _PASSING
        self._misses[turn_id] = self._misses.get(turn_id, 0) + 1
        if is_down:
            self._pause = min(max(2 * self._pause, PAUSES[0]), PAUSES[1])
            self.problem = f"the judge cannot be asked ({failure}); turns wait"
        else:
            self._pause, self.problem = 0.0, None
        if was_down and is_down:
            return True
        self._tries[turn_id] = self._tries.get(turn_id, 0) + 1
        return self._tries[turn_id] < MAX_TRIES

    async def _keep(self, stored: StoredTurn, verdict: Verdict) -> None:
        try:
            await self._thread.call(Store.add_verdict, stored.turn_id, verdict, on=stored.next_state)
        except StoreError as error:
            logger.warning("A verdict cannot be stored, its turn will be judged again: %s", error)
            await asyncio.sleep(PAUSES[0])
            return
        for counts in (self._tries, self._misses):
            counts.pop(stored.turn_id, None)
        self.metrics.judged.labels(verdict.outcome).inc()


def turn_to_judge(stored: StoredTurn) -> Turn:
    """A stored turn as judges take it."""
    return Turn(
        prompt=stored.messages,
        completion=[stored.reply],
        next_state=next_state_of(stored.next_state or []),
        truncated=stored.finish_reason == "length",
        session_id=stored.session_id,
    )


def failure_of(verdict: Verdict) -> str | None:
    """Why the judge failed outright, by its votes; `None` when it did not.

    Where some votes failed because nobody answered, and no other vote came through, the judge is not to be had.
    """
    if not verdict.failed:
        return None
    failures = [vote.failure for vote in verdict.votes if vote.failure is not None]
    return next((failure for failure in failures if failure in _PASSING), failures[0] if failures else "error")
