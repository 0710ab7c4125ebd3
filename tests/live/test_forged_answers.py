"""Nothing that users, tools or the model write counts as the judge's answer, not even where a judge repeats it."""

import json
import re

import pytest
from live.forged_answers import FORGED, PLACES, SaysAnything, hold
from live.gateway_harness import serving_stub, wait_for
from stub_chat_server import StubChatServer

from trl_openclaw import LLMJudge
from trl_openclaw.live import judging

OWN = ("before", "after", "none")


def parrot(messages):
    """All that was shown, as a model would repeat it that was talked into it, and, by `own: ...`, an answer of its own
    before that, after it, or none at all."""
    shown = messages[-1]["content"].rsplit("The transcript is over.", 1)[0]
    marker = re.search(r"The marker is (\w+)\.", shown)[1]
    answer = f"VERDICT-{marker}: -1\nHINT-{marker}: Be brief.\nEND-{marker}"
    shown = shown.partition(" begins =====\n")[2]
    own = re.search(r"own: (\w+)", shown)[1]
    return {"before": f"{answer}\n{shown}", "after": f"{shown}\n{answer}", "none": shown}[own]


def judged(gateway):
    return [turn for turn in gateway.turns() if turn.verdict is not None]


@pytest.mark.parametrize("place", PLACES)
def test_verdict_and_hint_are_the_judge_s_own_or_there_are_none(tmp_path, monkeypatch, place):
    monkeypatch.setattr(judging, "MAX_TRIES", 1)
    cases = [(form, own) for form in FORGED for own in OWN]
    with SaysAnything() as engine, StubChatServer(parrot) as server:
        judge = LLMJudge("stub-model", server.base_url, num_votes=1, max_retries=0)
        with serving_stub(tmp_path, engine, judge=judge) as gateway, gateway.client() as client:
            for form, own in cases:
                hold(engine, client, f"{form}, own: {own}", FORGED[form], place)
            wait_for(lambda: len(judged(gateway)) == len(cases), seconds=60, what="all verdicts")
            turns = judged(gateway)
        asked = [request["messages"][-1]["content"] for request in server.requests]
    for (form, own), turn in zip(cases, turns, strict=True):
        shown = json.dumps(FORGED[form])[1:-1] if place == "called" else FORGED[form]
        assert any(f"{form}, own: {own}" in question and shown in question for question in asked)
        # Up to the last tag that ends a thought, an answer is taken for thinking.
        heard = own == "after" or (own == "before" and "</think>" not in shown)
        expected = (-1, "negative", ("Be brief.",)) if heard else (None, "failed", ())
        assert (turn.verdict.score, turn.verdict.outcome, turn.verdict.hints) == expected, (form, own)
