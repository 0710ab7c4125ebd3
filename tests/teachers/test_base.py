"""What a teacher of one's own must give, and what is said when it does not."""

import pytest
import torch

from trl_openclaw.scoring import TeacherRow, TeacherScores
from trl_openclaw.teachers import problem_with_scores

ROWS = [TeacherRow([1], [2, 3, 4]), TeacherRow([1], [2])]
LOGPS = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, float("nan"), float("nan")]])


def scores(logps=LOGPS, mask=None) -> TeacherScores:
    return TeacherScores(logps, logps.isfinite() if mask is None else mask)


def changed(row: int, column: int, value: float) -> torch.Tensor:
    logps = LOGPS.clone()
    logps[row, column] = value
    return logps


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "gave NoneType, not `TeacherScores`"),
        ([[-1.0]], "gave list, not `TeacherScores`"),
        (TeacherScores([[-1.0]], [[True]]), "no tensors"),
        (scores(LOGPS.nan_to_num().long(), LOGPS.isfinite()), "torch.int64"),
        (scores(mask=LOGPS.isfinite().float()), "a mask of torch.float32"),
        (scores(LOGPS[:1]), "scored 1 rows, but was given 2"),
        (scores(LOGPS[:, 0]), "gave log-probs (2,)"),
        (scores(mask=LOGPS[:, :2].isfinite()), "a mask (2, 2)"),
        (scores(torch.cat([LOGPS, LOGPS], dim=1)), "at most T=3 tokens"),
        (scores(changed(1, 1, -1.0)), "after the end of a completion"),
        (scores(changed(0, 1, float("nan")), LOGPS.isfinite()), "NaN or infinite"),
        (scores(changed(0, 1, float("-inf")), LOGPS.isfinite()), "NaN or infinite"),
        (scores(changed(0, 1, 0.5)), "gave a log-prob of 0.5 nats"),
    ],
)
def test_refused(answer, problem):
    assert problem in problem_with_scores(answer, ROWS)


@pytest.mark.parametrize(
    "answer",
    [
        scores(),
        scores(LOGPS[:, :2]),
        scores(mask=torch.zeros(2, 3, dtype=torch.bool)),
        scores(changed(0, 1, float("nan"))),
        scores(changed(0, 1, 5e-4)),
        scores(LOGPS.half()),
    ],
)
def test_accepted(answer):
    assert problem_with_scores(answer, ROWS) is None


def test_no_rows():
    assert problem_with_scores(scores(torch.empty(0, 0)), []) is None
    assert "scored 2 rows" in problem_with_scores(scores(), [])
