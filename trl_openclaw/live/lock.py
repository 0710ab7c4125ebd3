"""Files that one process holds while it runs, so that no second one does the same work in the same folder."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(path: Path, refusal: Callable[[str], Exception]) -> Iterator[None]:
    """Hold a lock. It is free again when the process ends, in whatever way.

    Args:
        path: The file. It is made where it does not exist, and stays.
        refusal: What is raised if another process holds it, given that one's id.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise refusal(file.read().strip() or "unknown") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
