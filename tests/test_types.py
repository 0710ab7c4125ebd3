import copy
import pickle
import threading

import pytest

from trl_openclaw.types import NextState, ToolResult, Turn, Verdict, Vote, message_text

GOOD, BAD, MEH = Vote(1), Vote(-1), Vote(0)
CUT, HINT_ONLY = Vote(failure="truncated"), Vote(hint="be brief")


@pytest.mark.parametrize(
    ("votes", "score", "outcome"),
    [
        ([GOOD, GOOD, BAD], 1, "positive"),
        ([BAD], -1, "negative"),
        ([MEH, MEH, GOOD], 0, "neutral"),
        ([GOOD, BAD], None, "tied"),
        ([GOOD, BAD, MEH], None, "tied"),
        ([GOOD, BAD, BAD, GOOD, MEH], None, "tied"),
        ([GOOD, CUT, CUT], 1, "positive"),
        ([CUT, CUT], None, "failed"),
        ([CUT, HINT_ONLY], None, "failed"),
        ([HINT_ONLY], None, "unasked"),
        ([], None, "unasked"),
    ],
)
def test_votes_to_verdict(votes, score, outcome):
    verdict = Verdict.from_votes(votes)
    assert (verdict.score, verdict.outcome, verdict.votes) == (score, outcome, tuple(votes))


def test_hints_keep_the_order_of_the_votes_without_repeats():
    votes = [Vote(1, hint="b"), Vote(-1, hint="a"), Vote(1), Vote(1, hint="b"), Vote(1, hint="")]
    assert Verdict.from_votes(votes).hints == ("b", "a")


def test_a_verdict_with_a_hint_has_not_failed_outright():
    assert Verdict.from_votes([CUT]).failed
    assert not Verdict.from_votes([CUT, HINT_ONLY]).failed
    assert not Verdict.from_votes([GOOD, BAD]).failed


@pytest.mark.parametrize("score", [2, -2, 0.5, "1"])
def test_other_scores_are_refused(score):
    with pytest.raises(ValueError, match="score"):
        Vote(score)


@pytest.mark.parametrize("score", [1, 0, -1])
def test_a_score_excludes_a_failure(score):
    with pytest.raises(ValueError, match="failure"):
        Vote(score, failure="timeout")


def test_reply_is_what_the_assistant_said():
    completion = [
        {"role": "assistant", "content": "one"},
        {"role": "tool", "content": "noise"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": [{"type": "text", "text": "two"}, {"type": "image"}]},
    ]
    assert Turn([], completion).reply == "one\ntwo\n[image]"
    assert Turn("p", " plain ").reply == " plain "


def test_message_text_names_what_is_no_text():
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"text": "untyped"}]
    assert message_text({"content": parts}) == "a\n[image]\n[part]"
    assert message_text({"content": None}) == message_text({}) == ""
    assert NextState(parts[:1]).text == "a"


def test_a_vote_keeps_only_the_head_of_a_long_answer():
    assert Vote(raw="ab" * 5000).raw == "ab" * 5000
    assert Vote(raw="ab" * 5000 + "cut").raw == "ab" * 5000


@pytest.mark.parametrize(
    ("votes", "mean"),
    [
        ([GOOD, GOOD, BAD], 1 / 3),
        ([GOOD, BAD], 0.0),
        ([GOOD, CUT], 1.0),
        ([CUT], None),
        ([HINT_ONLY], None),
        ([], None),
    ],
)
def test_the_mean_vote_counts_valid_votes_only(votes, mean):
    assert Verdict.from_votes(votes).mean_vote == pytest.approx(mean)


def test_a_verdict_without_votes_counts_as_one_vote():
    assert Verdict(-1, "negative").mean_vote == -1


@pytest.mark.parametrize("carry", [str, copy.deepcopy, lambda result: pickle.loads(pickle.dumps(result))])
def test_a_tool_result_is_its_text_and_keeps_what_is_known(carry):
    result = carry(ToolResult("2 passed", satisfied=True, info={"passed": 2}))
    assert (result, result.satisfied, result.info) == ("2 passed", True, {"passed": 2})
    assert isinstance(result, str)


def test_what_is_known_of_a_tool_result_is_checked_and_shared():
    for satisfied in (1, "yes", [True]):
        with pytest.raises(TypeError, match="satisfied"):
            ToolResult("x", satisfied=satisfied)
    with pytest.raises(TypeError, match="wish"):
        ToolResult("x", info={"wish": 3})
    lock = threading.Lock()  # cannot be copied
    assert copy.deepcopy([ToolResult("x", info={"lock": lock})])[0].info["lock"] is lock


@pytest.mark.parametrize("content", [[1], ["a"], [None], 3, {"a": 1}])
def test_content_of_no_known_form_is_shown_as_it_is_written(content):
    assert message_text({"content": content}) == str(content)
    assert message_text({"content": [{"type": "text", "text": 5}, {"type": "image"}]}) == "5\n[image]"
