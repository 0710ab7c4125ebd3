"""Writes turns to the store, in order, in a thread of its own. Chat goes on when that fails."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...errors import StoreError
from ..canonical import turn_hashes
from ..records import NewTurn, TurnKind
from ..sessions import Match, attach, match
from ..store import Store
from .metrics import Metrics

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_WAITING_BYTES = 256 * 2**20
"""How much is kept in memory while the store cannot be written, by the size of requests and replies."""

WAIT_SECONDS = 1.0
"""How long a reply waits for its record before it goes out without."""

_PAUSES = (0.2, 5.0)  # seconds between two tries: at first, and at most
_LOG_EVERY = 60.0


@dataclass(eq=False)
class Origin:
    """A request whose reply will be a turn.

    Args:
        turn_id: The id that the reply has.
        user: Who asks.
        messages: The request's messages.
        session_id: The session that the request names, if it does.
        side_reason: Why it is side traffic, or `None`.
        size: Bytes of the request.
        found: What its history says, once that is known.
        asked_after: The store's latest deletion when it came.
    """

    turn_id: str
    user: str
    messages: list[dict[str, Any]]
    session_id: str | None
    side_reason: str | None
    size: int
    found: Match | None = None
    asked_after: int = 0

    @property
    def kind(self) -> TurnKind:
        """Main or side traffic."""
        return "main" if self.side_reason is None else "side"


@dataclass(eq=False)
class _Job:
    work: Callable[[Store], Any]
    size: int = 0
    keep: bool = True
    """Whether to try again when the store fails. If not, whoever waits is told."""
    is_turn: bool = False
    done: "Future[Any]" = field(default_factory=Future)


class Recorder:
    """A queue of what is to be written, and the thread that writes it.

    When the store fails (disk full, locked), everything is kept in its order and tried again with growing pauses.

    Args:
        store: Where to.
        metrics: Where turns and failures are counted.
        on_answer: Called in the thread when something is known to have followed a turn.
        max_waiting_bytes: See `MAX_WAITING_BYTES`. Beyond it turns are lost, and counted as such.
    """

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        *,
        on_answer: Callable[[], None] = lambda: None,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ):
        self.store, self.metrics, self.on_answer, self.max_waiting_bytes = store, metrics, on_answer, max_waiting_bytes
        self._jobs: deque[_Job] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._last_deletion = 0
        self._failure: StoreError | None = None
        self._logged = -_LOG_EVERY
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str | None:
        """What keeps turns from being written, or `None`."""
        failure = self._failure
        return None if failure is None else f"{len(self._jobs)} records wait in memory: {failure}"

    def begin(self, origin: Origin) -> None:
        """Find out which turn a request goes on from, and write down what it says of earlier replies."""
        with suppress(StoreError):  # an earlier deletion than the latest errs on the side of forgetting
            self._last_deletion = self.store.last_deletion()
        origin.asked_after = self._last_deletion
        self._put(_Job(lambda store: self._match(store, origin), origin.size))

    def finish(self, origin: Origin, turn_of: Callable[[Match], NewTurn], size: int) -> "Future[bool]":
        """Write a turn.

        Args:
            origin: The request, which was given to `begin` before.
            turn_of: Makes the turn of what is known about its session.
            size: Bytes of the reply, roughly.

        Returns:
            Done as soon as the turn is in the store, or must not be (true), or is kept for later (false).
        """

        def work(store: Store) -> None:
            # What `begin` was given may not have fitted into memory.
            turn = turn_of(origin.found or self._match(store, origin))
            hashes = turn_hashes(turn.messages, turn.reply)
            recorded = store.record_turn(turn, hashes, asked_after=origin.asked_after)
            (self.metrics.turns.labels(turn.kind) if recorded else self.metrics.turns_deleted).inc()

        job = _Job(work, origin.size + size, is_turn=True)
        self._put(job)
        return job.done

    async def call(self, work: Callable[[Store], T]) -> T:
        """Do something with the store, after all that was given before.

        Raises:
            StoreError: When the store fails. It is not tried again.
        """
        job = _Job(work, keep=False)
        self._put(job)
        return await asyncio.wrap_future(job.done)

    def close(self, seconds: float = 10.0) -> None:
        """Write what is left, for so long, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)
        lost = sum(job.is_turn for job in self._jobs)
        if lost:
            self.metrics.turns_lost.inc(lost)
            logger.error("%d turns could not be written before the end and are lost: %s", lost, self._failure)

    def _match(self, store: Store, origin: Origin) -> Match:
        side = origin.side_reason is not None
        found = match(store, origin.user, origin.messages, origin.session_id, side=side)
        news = attach(store, found, origin.turn_id, asked_after=origin.asked_after)
        origin.found = found
        count = self.metrics.next_states.labels
        count("attached").inc(news)
        count("alternate").inc(found.alternate)
        count("unmatched").inc(found.unmatched)
        count("ambiguous").inc(found.ambiguous)
        if news:
            self.on_answer()
        return found

    def _put(self, job: _Job) -> None:
        with self._changed:
            if self._closing or (job.keep and self._bytes + job.size > self.max_waiting_bytes):
                self.metrics.turns_lost.inc(job.is_turn)
                _settle(job, False)
                return
            if self._failure is not None:  # nobody waits for what will take a while
                _settle(job, False if job.keep else self._failure)
                if not job.keep:
                    return
            self._jobs.append(job)
            self._bytes += job.size
            self._changed.notify()

    def _run(self) -> None:
        pause = _PAUSES[0]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    break
                job = self._jobs[0]
            if self._do(job):
                self._failure, pause = None, _PAUSES[0]
                continue
            with self._changed:
                self._changed.wait_for(lambda: self._closing, pause)
                if self._closing and pause == _PAUSES[1]:
                    break
            pause = min(2 * pause, _PAUSES[1])
        self.store.close()

    def _do(self, job: _Job) -> bool:
        """Do a job; whether the next one can be done."""
        try:
            result = job.work(self.store)
        except StoreError as error:
            if not job.keep:
                self._drop(job)
                _settle(job, error)
                return True
            self._note_failure(error)
            return False
        except Exception as error:
            self._drop(job)
            self.metrics.turns_lost.inc(job.is_turn)
            logger.exception("Something could not be recorded, which no other try would change")
            _settle(job, False if job.keep else error)
            return True
        self._drop(job)
        _settle(job, True if job.keep else result)
        return True

    def _drop(self, job: _Job) -> None:
        with self._changed:
            self._jobs.popleft()
            self._bytes -= job.size
            self.metrics.turns_waiting.set(sum(job.is_turn for job in self._jobs) if self._failure else 0)

    def _note_failure(self, error: StoreError) -> None:
        self.metrics.store_failures.inc()
        with self._changed:
            self._failure = error
            for job in self._jobs:
                _settle(job, False if job.keep else error)
            self._jobs = deque(job for job in self._jobs if job.keep)
            self.metrics.turns_waiting.set(sum(job.is_turn for job in self._jobs))
        if time.monotonic() - self._logged >= _LOG_EVERY:
            self._logged = time.monotonic()
            logger.error("The store cannot be written; chat goes on, turns are kept in memory: %s", error)


def _settle(job: _Job, outcome: Any) -> None:
    with suppress(InvalidStateError):  # it was settled before, or whoever waited has gone
        if isinstance(outcome, Exception):
            job.done.set_exception(outcome)
        else:
            job.done.set_result(outcome)
