"""One learner per user and store."""

from contextlib import AbstractContextManager
from pathlib import Path

from ...errors import LearnerError
from ..lock import held


def only_learner(lock: Path, user: str) -> AbstractContextManager[None]:
    """Hold the lock of a user's learner.

    Raises:
        LearnerError: If another learner holds it.
    """
    return held(
        lock,
        lambda other: LearnerError(
            f"Another learner (process {other}) already trains user {user!r} in {lock.parent}. Stop it first."
        ),
    )
