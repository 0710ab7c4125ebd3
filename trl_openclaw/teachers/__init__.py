"""Teachers: who re-scores the student's own tokens.

| teacher | weights | second copy in memory |
|---|---|---|
| `frozen` | the initial policy: LoRA with the adapter off, full tuning with the initial weights | LoRA: no; full: yes |
| `live` | the policy as it is now | no |
| `ema` | the moving average of the policy: with LoRA of the adapter, with full tuning of all weights | as `frozen` |
| external | another model with the student's vocabulary | yes |
| server | what a vLLM server has loaded, with the student's vocabulary | no, it is elsewhere |

A teacher is anything with `score(rows) -> TeacherScores`. A new self-teacher is one file with a class that has
`build(trainer, scorer, initial)`, and one line in `TEACHERS`.
"""

from .base import SelfTeacher, Teacher, problem_with_scores
from .ema import EMATeacher
from .local import AdapterOffTeacher, ExternalTeacher, FrozenTeacher, LiveTeacher, LocalTeacher
from .server import ServerFacts, ServerTeacher
from .vocabulary import check_same_vocabulary
from .weights import InitialWeights, load_beside, max_model_length

TEACHERS: dict[str, type[SelfTeacher]] = {"frozen": FrozenTeacher, "live": LiveTeacher, "ema": EMATeacher}
"""Self-teachers by the name that `OPDConfig.teacher` takes."""

__all__ = [
    "TEACHERS",
    "AdapterOffTeacher",
    "EMATeacher",
    "ExternalTeacher",
    "FrozenTeacher",
    "InitialWeights",
    "LiveTeacher",
    "LocalTeacher",
    "SelfTeacher",
    "ServerFacts",
    "ServerTeacher",
    "Teacher",
    "check_same_vocabulary",
    "load_beside",
    "max_model_length",
    "problem_with_scores",
]
