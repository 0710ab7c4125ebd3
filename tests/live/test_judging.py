"""Turns are judged in the background: bounded, again after a crash, and not at all while the judge is down."""

import asyncio
import re
import sqlite3
import threading
import time
from contextlib import closing

import openai
import pytest
from live.gateway_harness import serving_stub, wait_for
from stub_chat_server import Reply, StubChatServer

from trl_openclaw import LLMJudge, RuleJudge
from trl_openclaw.errors import ChatError, JudgeUnavailableError, StoreBusyError, StoreError, StoreFullError
from trl_openclaw.live import judging
from trl_openclaw.live.gateway.app import GatewayOptions
from trl_openclaw.live.judging import failure_behind, failure_of
from trl_openclaw.live.store import Store
from trl_openclaw.types import Verdict, Vote


def talk(gateway, *said):
    """A conversation of these messages, each with its reply."""
    messages = []
    with gateway.client() as client:
        for text in said:
            messages.append({"role": "user", "content": text})
            reply = client.chat.completions.create(model="stub", messages=messages)
            messages.append(reply.choices[0].message.to_dict())
    return messages


def judged(gateway):
    return [turn for turn in gateway.turns() if turn.verdict is not None]


def verdict_line(messages, score, hint=None):
    marker = re.search(r"VERDICT-(\w+)", str(messages))[1]
    return f"VERDICT-{marker}: {score}" + (f"\nHINT-{marker}: {hint} END-{marker}" if hint else "")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(judging, "PAUSES", (0.1, 0.3))
    monkeypatch.setattr(judging, "POLL_SECONDS", 0.5)


def test_answered_turns_are_judged_by_what_followed(tmp_path, stub):
    seen = []

    def rule(turn):
        seen.append((turn.prompt[-1]["content"], turn.reply, turn.next_state.text))
        return (-1, "Be brief.") if "shorter" in turn.next_state.text else 1

    with serving_stub(tmp_path, stub, judge=RuleJudge(rule)) as gateway:
        talk(gateway, "hello", "shorter please", "thanks")
        wait_for(lambda: len(judged(gateway)) == 2, what="two verdicts")
        first, second, third = gateway.turns()
        assert (first.verdict.score, first.verdict.hints, first.verdict.source) == (-1, ("Be brief.",), "judge")
        assert (second.verdict.score, second.verdict.hints) == (1, ())
        assert third.verdict is None  # nothing followed it
        assert gateway.metric("judged_total", outcome="negative") == 1
    assert sorted(seen) == [
        ("hello", "stub: hello", "shorter please"),
        ("shorter please", "stub: shorter please", "thanks"),
    ]


def test_what_is_deleted_while_a_judge_reads_it_leaves_no_hint(tmp_path, stub):
    reads, go_on, hints = threading.Event(), threading.Event(), []

    def rule(turn):
        reads.set()
        assert go_on.wait(20)
        hints.append(turn.next_state.text)
        return -1, turn.next_state.text

    with serving_stub(tmp_path, stub, judge=RuleJudge(rule)) as gateway:
        messages = talk(gateway, "hello", "my secret")
        assert reads.wait(20)
        first, second = gateway.turns()
        gateway.store.delete("default", turn_id=second.turn_id)
        go_on.set()
        wait_for(lambda: hints, what="a verdict")
        with gateway.client() as client:  # the same reply has another next state now, and a verdict on that
            messages[-2:] = [{"role": "user", "content": "thanks"}]
            client.chat.completions.create(model="stub", messages=messages)
        wait_for(lambda: judged(gateway), what="another verdict")
        (first,) = judged(gateway)
        assert first.verdict.hints == ("thanks",)
        assert hints == ["my secret", "thanks"]


def test_no_more_at_once_than_asked_for(tmp_path, stub):
    running, most = 0, 0

    async def slow(turn):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.2)
        running -= 1
        return 1

    with serving_stub(tmp_path, stub) as gateway:
        for place in range(6):
            talk(gateway, f"one {place}", "two")
    options = GatewayOptions(judge_concurrency=3)
    with serving_stub(tmp_path, stub, judge=RuleJudge(slow), options=options) as gateway:
        wait_for(lambda: len(judged(gateway)) == 6)
    assert most == 3


def test_chat_never_waits_for_the_judge(tmp_path, stub):
    async def forever(turn):
        await asyncio.sleep(3600)

    with serving_stub(tmp_path, stub, judge=RuleJudge(forever)) as gateway:
        started = time.monotonic()
        for place in range(5):
            talk(gateway, f"one {place}", "two")
        assert time.monotonic() - started < 15
        assert judged(gateway) == []


@pytest.mark.parametrize(("status", "failure"), [(503, "unreachable"), (401, "denied"), (402, "denied")])
def test_a_judge_that_is_down_or_takes_no_key_is_waited_for(tmp_path, stub, status, failure):
    server = StubChatServer(lambda messages: verdict_line(messages, -1, "Be brief."))
    server.start()
    judge = LLMJudge("stub-model", server.base_url, num_votes=1, max_retries=0, timeout=2)
    server.script = Reply(status=status)
    try:
        with serving_stub(tmp_path, stub, judge=judge) as gateway:
            for place in range(4):
                talk(gateway, f"one {place}", "two")
            wait_for(lambda: gateway.metric("judge_failures_total", reason=failure) >= 5)
            assert judged(gateway) == []
            health = gateway.health()
            assert (health["status"], "cannot be asked" in health["problems"]["judge"]) == ("degraded", True)
            assert ("does not take the key" in health["problems"]["judge"]) == (failure == "denied")
            asked = server.count
            time.sleep(1)
            assert server.count - asked <= 12  # one at a time, with pauses, not all of them again and again
            server.script = lambda messages: verdict_line(messages, -1, "Be brief.")
            wait_for(lambda: len(judged(gateway)) == 4, what="the verdicts")
            wait_for(lambda: gateway.health()["status"] == "ok")
            assert {turn.verdict.hints for turn in judged(gateway)} == {("Be brief.",)}
    finally:
        server.stop()


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError("no"), JudgeUnavailableError("no"), ChatError("denied", "no")]
)
def test_a_judge_of_ones_own_that_is_down_is_waited_for(tmp_path, stub, error):
    tries = []

    def rule(turn):
        tries.append(turn)
        if len(tries) <= judging.MAX_TRIES + 2:
            raise error
        return 1

    with serving_stub(tmp_path, stub, judge=RuleJudge(rule)) as gateway:
        talk(gateway, "one", "two")
        wait_for(lambda: judged(gateway), what="a verdict")
        assert [turn.verdict.score for turn in judged(gateway)] == [1]


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ConnectionResetError(), "unreachable"),
        (JudgeUnavailableError("no server"), "unreachable"),
        (openai.APIConnectionError(request=None), "unreachable"),
        (TimeoutError(), "timeout"),
        (ChatError("timeout", "slow"), "timeout"),
        (ChatError("refused", "too long"), "refused"),
        (ValueError("what is this"), "error"),
    ],
    ids=repr,
)
def test_what_an_exception_of_a_judge_counts_as(error, failure):
    assert failure_behind(error) == failure


def test_what_a_judge_cannot_read_gets_a_few_tries(tmp_path, stub, caplog):
    asked = []

    def rule(turn):
        asked.append(turn.prompt[-1]["content"])
        if "bad" in asked[-1]:
            raise RuntimeError(f"cannot read {asked[-1]}")
        return 1

    with serving_stub(tmp_path, stub, judge=RuleJudge(rule)) as gateway:
        talk(gateway, "bad one", "two")
        talk(gateway, "good one", "two")
        wait_for(lambda: len(judged(gateway)) == 2)
        found = {turn.messages[-1]["content"]: turn.verdict.outcome for turn in judged(gateway)}
        assert found == {"bad one": "failed", "good one": "positive"}
    assert asked.count("bad one") == judging.MAX_TRIES
    assert f"RuntimeError at {__file__}:" in caplog.text
    assert "bad one" not in caplog.text  # nobody's words are logged


def test_a_turn_that_always_times_out_holds_up_no_other(tmp_path, stub, monkeypatch):
    monkeypatch.setattr(judging, "JUDGE_SECONDS", 30)

    async def judge(turn):
        if "bad" in turn.prompt[-1]["content"]:
            return Verdict.from_votes([Vote(failure="timeout")])
        return Verdict.from_votes([Vote(score=1)])

    with serving_stub(tmp_path, stub, judge=judge, options=GatewayOptions(judge_concurrency=1)) as gateway:
        talk(gateway, "bad one", "two")
        for place in range(3):
            talk(gateway, f"good {place}", "two")
        wait_for(lambda: len(judged(gateway)) >= 3, what="the others' verdicts")


@pytest.mark.parametrize("failure", ["timeout", "unreachable"])
def test_however_many_turns_always_fail_they_hold_up_no_newer_one(tmp_path, stub, monkeypatch, failure):
    monkeypatch.setattr(judging, "PAUSES", (0.01, 0.02))
    failed = set()

    async def judge(turn):
        if "bad" in turn.prompt[-1]["content"]:
            failed.add(turn.prompt[-1]["content"])
            return Verdict.from_votes([Vote(failure=failure)])
        return Verdict.from_votes([Vote(score=1)])

    with serving_stub(tmp_path, stub) as gateway:
        for place in range(40):
            talk(gateway, f"bad {place}", "two")
        for place in range(5):
            talk(gateway, f"good {place}", "two")
    with serving_stub(tmp_path, stub, judge=judge) as gateway:
        wait_for(lambda: sum("good" in str(turn.messages) for turn in judged(gateway)) == 5, what="five verdicts")
    assert len(failed) == 40


def test_a_new_gateway_goes_on_where_the_last_one_was(tmp_path, stub):
    async def never(turn):
        await asyncio.sleep(3600)

    with serving_stub(tmp_path, stub, judge=RuleJudge(never)) as gateway:
        for place in range(5):
            talk(gateway, f"one {place}", "two")
        wait_for(lambda: gateway.metric("judging") == 4)
    asked = []
    with serving_stub(tmp_path, stub, judge=RuleJudge(lambda turn: asked.append(turn) or 1)) as gateway:
        wait_for(lambda: len(judged(gateway)) == 5)
        time.sleep(0.5)
    assert len(asked) == 5  # each once


def test_side_traffic_and_thumbs_are_not_judged(tmp_path, stub):
    asked = []
    with serving_stub(tmp_path, stub, judge=RuleJudge(lambda turn: asked.append(turn) or 1)) as gateway:
        with gateway.client() as client:
            messages = [{"role": "user", "content": "name this"}]
            side = {"X-Turn-Type": "side"}
            reply = client.chat.completions.create(model="stub", messages=messages, extra_headers=side)
            messages += [reply.choices[0].message.to_dict(), {"role": "user", "content": "more"}]
            client.chat.completions.create(model="stub", messages=messages, extra_headers=side)
            thumbed = gateway.ask("hello")
            body = {"id": thumbed.id, "thumb": "down", "correction": "Say less."}
            client.post("/feedback", body=body, cast_to=object)
            messages = [
                {"role": "user", "content": "hello"},
                thumbed.choices[0].message.to_dict(),
                {"role": "user", "content": "go on"},
            ]
            client.chat.completions.create(model="stub", messages=messages)
        time.sleep(1)
        assert asked == []
        turn = gateway.store.show("default", thumbed.id)
        assert (turn.verdict.score, turn.verdict.hints, turn.verdict.source) == (-1, ("Say less.",), "feedback")


class TroubledStore(Store):
    """A store that takes no verdict while there is trouble. What is called on a `Store` comes by here, too."""

    trouble: Exception | None = None
    failed = 0

    def _add_verdict(self, *args):
        if self.trouble is not None:
            self.failed += 1
            raise self.trouble
        super()._add_verdict(*args)


@pytest.mark.parametrize("trouble", [StoreBusyError("in use"), StoreFullError("no room"), StoreError("bad file")])
def test_a_verdict_that_cannot_be_stored_waits_and_the_judge_is_not_asked_again(tmp_path, stub, trouble):
    store = TroubledStore(tmp_path / "store.db")
    store.trouble = trouble
    asked = []
    judge = RuleJudge(lambda turn: asked.append(turn) or 1)
    with serving_stub(tmp_path, stub, store=store, judge=judge) as gateway:
        talk(gateway, "hello", "thanks")
        wait_for(lambda: store.failed >= 2)
        failed = store.failed
        time.sleep(1.5)
        assert 2 <= store.failed - failed <= 6  # with pauses
        health = gateway.health()
        assert (health["status"], str(trouble) in health["problems"]["judge"]) == ("degraded", True)
        assert gateway.metric("store_failures_total") >= 4
        assert judged(gateway) == []
        store.trouble = None
        wait_for(lambda: judged(gateway), what="the verdict")
        wait_for(lambda: gateway.health()["status"] == "ok")
    assert len(asked) == 1


def test_a_store_that_is_locked_for_a_moment_costs_no_second_judgement(tmp_path, stub):
    asked, locked = [], threading.Event()

    def rule(turn):
        asked.append(turn)
        assert locked.wait(20)
        return 1

    store = Store(tmp_path / "store.db", busy_seconds=0.1)
    with serving_stub(tmp_path, stub, store=store, judge=RuleJudge(rule)) as gateway:
        talk(gateway, "hello", "thanks")
        wait_for(lambda: asked)
        with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            locked.set()
            wait_for(lambda: gateway.metric("store_failures_total") >= 2)
            assert "in use by another process" in gateway.health()["problems"]["judge"]
            other.execute("ROLLBACK")
        wait_for(lambda: judged(gateway))
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        (Verdict(2, "positive"), "CHECK constraint failed"),
        (Verdict(2**70, "positive"), "OverflowError"),
        (Verdict(1, {"a": "dict"}), "Error"),
        (Verdict(1, "positive", hints=({1},)), "TypeError"),
        (Verdict(1, "positive", votes=("no vote",)), "TypeError"),
    ],
)
def test_a_verdict_that_the_store_refuses_counts_as_a_try(tmp_path, stub, caplog, verdict, said):
    asked = []

    async def judge(turn):
        asked.append(turn.prompt[-1]["content"])
        return verdict if "bad" in asked[-1] else Verdict.from_votes([Vote(score=1)])

    with serving_stub(tmp_path, stub, judge=judge) as gateway:
        talk(gateway, "bad one", "two")
        wait_for(lambda: judged(gateway))
        time.sleep(1)
        assert asked == ["bad one"] * judging.MAX_TRIES
        (turn,) = judged(gateway)
        assert (turn.verdict.score, turn.verdict.outcome) == (None, "failed")
        assert said in gateway.health()["problems"]["judge"]
        assert gateway.metric("judge_failures_total", reason="unstorable") == judging.MAX_TRIES
        talk(gateway, "good one", "two")
        wait_for(lambda: len(judged(gateway)) == 2)
        wait_for(lambda: gateway.health()["status"] == "ok")
    assert said in caplog.text


def test_a_store_with_an_error_of_its_own_is_no_reason_to_go_on_asking(tmp_path, stub, caplog):
    store = TroubledStore(tmp_path / "store.db")
    store.trouble = TypeError("said in confidence")
    asked = []
    judge = RuleJudge(lambda turn: asked.append(turn) or 1)
    with serving_stub(tmp_path, stub, store=store, judge=judge) as gateway:
        talk(gateway, "hello", "thanks")
        wait_for(lambda: store.failed > judging.MAX_TRIES)
        time.sleep(1.5)
        assert store.failed <= judging.MAX_TRIES + 10
        assert len(asked) == judging.MAX_TRIES
        assert "TypeError" in gateway.health()["problems"]["judge"]
        store.trouble = None
        wait_for(lambda: judged(gateway))
    assert "said in confidence" not in caplog.text


def test_turns_that_cannot_be_read_are_read_later(tmp_path, stub, monkeypatch):
    reads = []
    unjudged = Store.unjudged

    def broken(self, limit):
        reads.append(limit)
        raise TypeError("no turn")

    monkeypatch.setattr(Store, "unjudged", broken)
    with serving_stub(tmp_path, stub, judge=RuleJudge(lambda turn: 1)) as gateway:
        talk(gateway, "hello", "thanks")
        wait_for(lambda: len(reads) >= 2)
        assert "cannot be read: TypeError" in gateway.health()["problems"]["judge"]
        monkeypatch.setattr(Store, "unjudged", unjudged)
        wait_for(lambda: judged(gateway))
        wait_for(lambda: gateway.health()["status"] == "ok")


@pytest.mark.parametrize(
    ("votes", "failure"),
    [
        ([Vote(score=1), Vote(failure="timeout")], None),
        ([Vote(failure="unparseable"), Vote(failure="unreachable")], "unreachable"),
        ([Vote(failure="unparseable"), Vote(failure="truncated")], "unparseable"),
        ([Vote(failure="timeout", hint="Be brief.")], None),
        ([Vote()], None),
        ([Vote(score=1), Vote(score=-1)], None),
    ],
)
def test_which_verdicts_are_failures(votes, failure):
    assert failure_of(Verdict.from_votes(votes)) == failure
