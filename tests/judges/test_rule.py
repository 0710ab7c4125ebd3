import asyncio
import functools
import threading

import numpy as np
import pytest
import torch

from trl_openclaw.judges import RuleJudge
from trl_openclaw.types import NextState, Turn, Verdict, Vote

TURN = Turn(prompt="hi", completion="hello", next_state=NextState("thanks"))


def judge(result):
    return asyncio.run(RuleJudge(lambda turn: result)(TURN))


@pytest.mark.parametrize(
    ("result", "score", "outcome"),
    [(1, 1, "positive"), (-1, -1, "negative"), (0, 0, "neutral"), (1.0, 1, "positive"), (None, None, "unasked")],
)
def test_scores(result, score, outcome):
    verdict = judge(result)
    assert (verdict.score, verdict.outcome, verdict.hints) == (score, outcome, ())
    assert type(verdict.score) is type(score)


@pytest.mark.parametrize("make", [np.int64, np.float32, np.array, torch.tensor, lambda x: torch.tensor(float(x))])
@pytest.mark.parametrize("score", [-1, 0, 1])
def test_scores_of_other_number_types(make, score):
    for result in (make(score), (make(score), "x")):
        assert judge(result).score == score
        assert type(judge(result).score) is int


@pytest.mark.parametrize(
    ("result", "score", "hints"),
    [((-1, "Be short."), -1, ("Be short.",)), ((1, None), 1, ()), ((1, ""), 1, ()), ((None, "x"), None, ("x",))],
)
def test_scores_with_hints(result, score, hints):
    verdict = judge(result)
    assert (verdict.score, verdict.hints) == (score, hints)


def test_a_verdict_is_passed_through():
    verdict = Verdict.from_votes([Vote(score=1), Vote(score=-1)])
    assert judge(verdict) is verdict


@pytest.mark.parametrize(
    "result",
    [
        True,
        False,
        np.bool_(True),
        torch.tensor(False),
        np.array([1]),
        torch.ones(2),
        np.str_("1"),
        1j,
        "1",
        [1, "x"],
        {"score": 1},
        (1, 2),
        (1,),
        (1, "x", "y"),
        object(),
    ],
)
def test_other_types_are_refused_with_what_is_allowed(result):
    with pytest.raises(TypeError, match=r"-1, 0 or 1.*`Verdict`"):
        judge(result)


@pytest.mark.parametrize("result", [2, 0.5, float("nan"), (3, "x"), np.int64(2), torch.tensor(float("nan"))])
def test_other_values_are_refused(result):
    with pytest.raises(ValueError, match="-1, 0 or 1"):
        judge(result)


def test_a_plain_function_runs_in_a_thread():
    threads = []
    asyncio.run(RuleJudge(lambda turn: threads.append(threading.current_thread()))(TURN))
    assert threads[0] is not threading.main_thread()


class Caller:
    async def __call__(self, turn):
        return 1


async def by_name(turn, score=1):
    return score


@pytest.mark.parametrize("fn", [by_name, functools.partial(by_name, score=1), lambda turn: by_name(turn), Caller()])
def test_async_functions_of_every_kind(fn):
    assert asyncio.run(RuleJudge(fn)(TURN)).score == 1


def test_what_the_function_raises_is_passed_on():
    def broken(turn):
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        asyncio.run(RuleJudge(broken)(TURN))


def test_something_that_is_no_function():
    with pytest.raises(TypeError, match="callable"):
        RuleJudge(1)
