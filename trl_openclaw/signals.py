"""A process that launches another does not leave it behind."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

STOP_TIMEOUT = 300.0
"""Seconds that a recipe has to end after a signal, which may include saving a checkpoint, before it is killed."""


@contextmanager
def forward_signals() -> Iterator[list[int]]:
    """Pass signals that ask this process to end on to the process it launched, and leave the waiting as it is.

    What has not ended `STOP_TIMEOUT` seconds after the first signal is killed. A signal that is ignored (`nohup`) stays
    ignored. A launcher of several processes puts its own handlers in place of these while it runs.

    Yields:
        The signals that arrived, in their order.
    """
    import psutil

    received: list[int] = []
    this = psutil.Process()
    killer = threading.Timer(STOP_TIMEOUT, lambda: _kill(this.children(recursive=True)))
    killer.daemon = True

    def forward(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        children = this.children()
        if not children:  # not launched yet
            raise SystemExit(128 + signum)
        if signum != signal.SIGINT or not _in_foreground():  # Ctrl-C reaches the child as well: once is enough
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.send_signal(signum)
        if len(received) == 1:
            killer.start()

    names = ("SIGTERM", "SIGINT", "SIGHUP")
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]
    previous = {signum: signal.getsignal(signum) for signum in signals}
    previous = {signum: handler for signum, handler in previous.items() if handler not in (signal.SIG_IGN, None)}
    for signum in previous:
        signal.signal(signum, forward)
    try:
        yield received
    finally:
        killer.cancel()
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _kill(processes: Sequence[Any]) -> None:
    import psutil

    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _in_foreground() -> bool:
    """Whether a terminal sends Ctrl-C to this process, and with it to all of its process group."""
    if not hasattr(os, "tcgetpgrp"):  # Windows: a console sends it to all of its processes
        return True
    try:
        terminal = os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)
