"""What the trainer needs of a teacher."""

from collections.abc import Sequence
from typing import Protocol

from ..scoring import TeacherRow, TeacherScores


class Teacher(Protocol):
    """Re-scores sampled tokens under other prompts."""

    def score(self, rows: Sequence[TeacherRow]) -> TeacherScores:
        """Score `rows`. A collective: every rank calls it, with as many rows as it has, even none."""
        ...
