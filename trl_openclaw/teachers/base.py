"""What the trainer needs of a teacher."""

from collections.abc import Sequence
from typing import Any, Protocol

from ..scoring import TeacherRow, TeacherScores


class Teacher(Protocol):
    """Re-scores sampled tokens under other prompts."""

    def score(self, rows: Sequence[TeacherRow]) -> TeacherScores:
        """Score `rows`. A collective: every rank calls it, with as many rows as it has, even none."""
        ...


class SelfTeacher(Protocol):
    """A kind of teacher that is made from the policy itself."""

    @classmethod
    def build(cls, trainer: Any, scorer: Any, initial: Any) -> Teacher:
        """Make the teacher after TRL's set-up; `initial` is what is left of the policy before it."""
        ...
