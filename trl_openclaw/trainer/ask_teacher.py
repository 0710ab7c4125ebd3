"""Asks the teacher, and trusts only the teachers of this package."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn import functional as F

from ..errors import TeacherError
from ..scoring import TeacherRow, TeacherScores
from ..teachers import LocalTeacher, Teacher, problem_with_scores
from .guard import stop_together

WANTED = (
    "`score(rows)` must return `TeacherScores` with `per_token_logps` (N, T), log-probs in nats and at most 0, and a "
    "boolean `mask` (N, T) of which entries are real; `score(rows, topk=k)` also `topk_ids` (N, T, k)"
)


def ask_teacher(teacher: Teacher, rows: Sequence[TeacherRow], accelerator: Accelerator, **wanted: Any) -> TeacherScores:
    """Score `rows`, and check the answer of a teacher that somebody brought. A collective.

    Args:
        teacher: Who is asked.
        rows: What is asked.
        accelerator: Tells the other ranks.
        wanted: What is asked of the answer beyond log-probs: `topk`, `keep_states`.

    Raises:
        TeacherError: On every rank, when such a teacher failed or gave something else on one of them; with its own
            words, if it raised one.
    """
    if isinstance(teacher, LocalTeacher):  # runs collectives inside; one that breaks there cannot call another
        return teacher.score(rows, **wanted)
    name = type(teacher).__name__
    scores, said = None, None
    cause: Exception | None = None
    try:
        if any(row.temperature != 1 for row in rows):
            raise TeacherError(f"The teacher `{name}` cannot score rows at temperatures of their own.")
        scores = teacher.score(rows, **wanted)
        problem = problem_with_scores(scores, rows, **wanted)
        said = problem and f"The teacher `{name}` {problem}. {WANTED}."
    except TeacherError as error:
        said, cause = str(error), error
    except Exception as error:
        said, cause = f"The teacher `{name}` failed: {type(error).__name__}: {error}. {WANTED}.", error
    try:
        stop_together(said, accelerator, TeacherError)
    except TeacherError as error:
        raise error from cause
    assert scores is not None
    return _in_full(scores, rows, accelerator.device, wanted.get("topk", 0))


def _in_full(scores: TeacherScores, rows: Sequence[TeacherRow], device: torch.device, topk: int) -> TeacherScores:
    """The answer as a teacher of this package gives it: as wide as the longest completion, in float32, on `device`."""
    width = max((len(row.completion_ids) for row in rows), default=0)
    if not rows:  # its shape was not checked, and is nobody's business
        logps, ids = torch.empty(0, 0), torch.empty((0, 0, topk), dtype=torch.long)
        return TeacherScores(logps.to(device), logps.bool().to(device), ids.to(device))
    missing = width - scores.mask.size(1)
    ids = scores.topk_ids if topk else None
    return TeacherScores(
        F.pad(scores.per_token_logps.float(), (0, missing), value=float("nan")).to(device),
        F.pad(scores.mask, (0, missing)).to(device),
        None if ids is None else F.pad(ids, (0, 0, 0, missing)).to(device),
    )
