"""Scores and hints from next states that know how it went."""

import asyncio

import pytest

from trl_openclaw import NextState, Turn
from trl_openclaw.judges.outcome import OutcomeJudge


def judge(**next_state):
    return asyncio.run(OutcomeJudge()(Turn("q", "a", NextState(**next_state))))


def test_satisfied_scores_plus_one_without_a_hint():
    verdict = judge(content="Perfect, thanks.", satisfied=True)
    assert (verdict.score, verdict.hints) == (1, ())


def test_unsatisfied_scores_minus_one_with_the_reply_as_hint():
    verdict = judge(content="2 tests failed: expected 4, got 5", role="tool", satisfied=False)
    assert (verdict.score, verdict.hints) == (-1, ("2 tests failed: expected 4, got 5",))


def test_the_wish_alone_is_the_hint_where_the_provider_names_it():
    verdict = judge(
        content="Hmm, too long. One sentence, please.", satisfied=False, info={"wish": "One sentence, please."}
    )
    assert verdict.hints == ("One sentence, please.",)


def test_a_next_state_that_does_not_know_gives_nothing():
    verdict = judge(content="And what about Rome?")
    assert (verdict.score, verdict.outcome, verdict.hints) == (None, "unasked", ())


def test_a_turn_without_a_next_state_is_a_programming_error():
    with pytest.raises(ValueError, match="next state"):
        asyncio.run(OutcomeJudge()(Turn("q", "a")))
