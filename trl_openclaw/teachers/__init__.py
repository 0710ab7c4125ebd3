"""Teachers: who re-scores the student's own tokens.

| teacher | weights | second copy in memory |
|---|---|---|
| `frozen` | the initial policy: LoRA with the adapter off, full tuning with the initial weights | LoRA: no; full: yes |
| `live` | the policy as it is now | no |
| external | another model with the student's vocabulary | yes |

A teacher is anything with `score(rows) -> TeacherScores`. A new one is one file and one line in `TEACHERS`.
"""

from .base import Teacher
from .local import ExternalTeacher, FrozenTeacher, LiveTeacher, LocalTeacher
from .vocabulary import check_same_vocabulary

TEACHERS = {"frozen": FrozenTeacher, "live": LiveTeacher}
"""Self-teachers by the name that `OPDConfig.teacher` takes."""

__all__ = [
    "TEACHERS",
    "ExternalTeacher",
    "FrozenTeacher",
    "LiveTeacher",
    "LocalTeacher",
    "Teacher",
    "check_same_vocabulary",
]
