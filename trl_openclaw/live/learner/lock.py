"""One learner per user and store."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import LearnerError


@contextmanager
def only_learner(lock: Path, user: str) -> Iterator[None]:
    """Hold the lock of a user's learner. It is free again when the process ends, in whatever way.

    Raises:
        LearnerError: If another learner holds it.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            other = file.read().strip() or "unknown"
            raise LearnerError(
                f"Another learner (process {other}) already trains user {user!r} in {lock.parent}. Stop it first."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
