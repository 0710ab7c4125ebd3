import asyncio
import threading
import time
from dataclasses import replace

import pytest
from feedback_harness import GOOD, echo, good_judge, turns
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_openclaw.feedback import collect_feedback, feedback_columns, feedback_metrics
from trl_openclaw.judges import RuleJudge
from trl_openclaw.next_states import FunctionNextState
from trl_openclaw.types import HINT_FAILURES, VOTE_FAILURES, Feedback, NextState, Turn, Verdict, Vote


def collect(batch, rows=None, *, next_state=echo, judge=good_judge, **kwargs):
    rows = rows if rows is not None else [{} for _ in batch]
    return asyncio.run(collect_feedback(batch, rows, next_state=next_state, judge=judge, **kwargs))


def test_a_judged_turn_carries_its_next_state_and_verdict():
    (feedback,) = collect(turns(1))
    assert feedback.turn == Turn("p", "0", NextState("re 0"))
    assert (feedback.verdict, feedback.failure, feedback.score) == (GOOD, None, 1)


def test_nothing_to_do():
    assert collect([]) == []


def test_the_provider_gets_turn_and_row_and_the_judge_the_next_state():
    seen = []

    async def provider(turn, row):
        seen.append((turn, row))
        return NextState("x")

    async def judge(turn):
        seen.append(turn)
        return GOOD

    collect(turns(1), [{"answer": 4}], next_state=provider, judge=judge)
    assert seen == [(Turn("p", "0"), {"answer": 4}), Turn("p", "0", NextState("x"))]


@pytest.mark.parametrize(
    ("value", "state"),
    [
        ("no", NextState("no")),
        ({"role": "user", "content": "no"}, NextState("no")),
        ({"role": "tool", "content": "3 failed", "name": None}, NextState("3 failed", role="tool")),
        (NextState("x", satisfied=True), NextState("x", satisfied=True)),
        ({"role": "tool", "content": ""}, NextState("", role="tool")),
    ],
)
def test_next_state_from_the_column(value, state):
    (feedback,) = collect(turns(1), [{"next_state": value}], next_state=None)
    assert feedback.turn.next_state == state
    assert feedback.verdict is GOOD


@pytest.mark.parametrize("row", [{}, {"next_state": None}, {"next_state": "  \n"}])
def test_no_next_state_is_neither_verdict_nor_failure(row):
    async def judge(turn):
        raise AssertionError("asked")

    (feedback,) = collect(turns(1), [row], next_state=None, judge=judge)
    assert (feedback.verdict, feedback.failure, feedback.detail) == (None, None, "")


@pytest.mark.parametrize(
    "value",
    [
        3,
        ["x"],
        {"role": "assistant", "content": "x"},
        {"content": "x"},
        {"role": "user"},
        NextState(["text without a type"]),
    ],
)
def test_an_unreadable_column_fails_its_own_turn(value):
    feedbacks = collect(turns(2), [{"next_state": value}, {"next_state": "fine"}], next_state=None)
    assert [f.failure for f in feedbacks] == ["next_state_failed", None]
    assert feedbacks[0].turn.next_state is None
    assert feedbacks[0].detail
    feedback_columns(feedbacks)
    feedback_metrics(feedbacks)


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("known", [True, False])
def test_content_that_cannot_be_read_stays_out_of_the_logs(role, known):
    state = NextState(["text without a type"], role=role)
    batch = [Turn("p", "0", state)] if known else turns(1)
    feedbacks = collect(batch, [{"next_state": state}], next_state=None)
    assert feedbacks[0].failure == "next_state_failed"
    assert feedback_columns(feedbacks)["next_state"] == [None]
    assert feedback_metrics(feedbacks)["next_state/missing"] == [0.0]


def test_the_provider_goes_before_the_column_and_a_known_next_state_before_both():
    known = Turn("p", "0", NextState("known"))
    feedbacks = collect([known, *turns(1)], [{"next_state": "column"}] * 2)
    assert [f.turn.next_state.text for f in feedbacks] == ["known", "re 0"]


def test_no_judge():
    (feedback,) = collect(turns(1), judge=None)
    assert replace(feedback, next_state_seconds=0.0) == Feedback(Turn("p", "0", NextState("re 0")))


def test_errors_stay_with_their_turn():
    async def provider(turn, row):
        if turn.completion == "1":
            raise ValueError("no user today")
        return 5 if turn.completion == "2" else NextState("x")

    async def judge(turn):
        if turn.completion == "3":
            raise RuntimeError("no judge today")
        if turn.completion == "4":
            return 1
        return Verdict.from_votes([Vote(failure="timeout")]) if turn.completion == "5" else GOOD

    feedbacks = collect(turns(7), next_state=provider, judge=judge)
    assert [f.failure for f in feedbacks] == [
        None,
        "next_state_failed",
        "next_state_failed",
        "judge_failed",
        "judge_failed",
        "judge_failed",
        None,
    ]
    assert "no user today" in feedbacks[1].detail
    assert "int" in feedbacks[2].detail
    assert "RuntimeError: no judge today" in feedbacks[3].detail
    assert "Verdict, got int" in feedbacks[4].detail
    assert "timeout" in feedbacks[5].detail
    assert feedbacks[5].verdict.outcome == "failed"
    assert feedbacks[3].turn.next_state == NextState("x")


def test_a_verdict_without_score_but_with_a_hint_has_not_failed():
    verdict = Verdict.from_votes([Vote(failure="unparseable", hint="be brief")])

    async def judge(turn):
        return verdict

    (feedback,) = collect(turns(1), judge=judge)
    assert (feedback.failure, feedback.hints, feedback.score) == (None, ("be brief",), None)


def test_turns_run_together_within_the_limit():
    running = peak = 0

    async def judge(turn):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.01)
        running -= 1
        return GOOD

    collect(turns(12), judge=judge, max_concurrency=4)
    assert peak == 4
    start = time.perf_counter()
    collect(turns(30), judge=judge)
    assert time.perf_counter() - start < 0.2


def test_the_limit_covers_the_provider_too():
    running = peak = 0

    async def provider(turn, row):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0)
        running -= 1
        return NextState("x")

    collect(turns(9), next_state=provider, max_concurrency=3)
    assert peak == 3


def test_seconds_are_the_judges_and_those_before_the_next_states():
    async def provider(turn, row):
        await asyncio.sleep(0.1)
        return NextState("x")

    async def judge(turn):
        await asyncio.sleep(0.03)
        return GOOD

    (feedback,) = collect(turns(1), next_state=provider, judge=judge)
    assert 0.02 < feedback.seconds < 0.09
    assert 0.09 < feedback.next_state_seconds < 0.15
    (feedback,) = collect(turns(1), next_state=provider, judge=None)
    assert feedback.seconds < 0.02
    assert 0.09 < feedback.next_state_seconds < 0.15


def test_the_deadline_cuts_only_what_hangs():
    cancelled = []

    async def hang(what):
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(what)

    async def provider(turn, row):
        return await hang("provider") if turn.completion == "0" else NextState("x")

    async def judge(turn):
        return await hang("judge") if turn.completion == "1" else GOOD

    start = time.perf_counter()
    feedbacks = collect(turns(4), next_state=provider, judge=judge, timeout=0.1)
    assert time.perf_counter() - start < 0.5
    assert [f.failure for f in feedbacks] == ["next_state_timeout", "judge_timeout", None, None]
    assert [f.score for f in feedbacks] == [None, None, 1, 1]
    assert sorted(cancelled) == ["judge", "provider"]
    assert feedbacks[1].seconds == pytest.approx(0.1, abs=0.05)
    assert feedbacks[0].next_state_seconds == pytest.approx(0.1, abs=0.05)
    assert feedbacks[0].seconds < 0.02
    assert feedbacks[1].turn.next_state == NextState("x")
    assert "0.1 s" in feedbacks[0].detail


def test_turns_still_waiting_for_a_place_time_out():
    async def provider(turn, row):
        await asyncio.Event().wait()

    feedbacks = collect(turns(3), next_state=provider, timeout=0.05, max_concurrency=1)
    assert [f.failure for f in feedbacks] == ["next_state_timeout"] * 3


def test_who_ignores_cancellation_is_left_behind(monkeypatch):
    monkeypatch.setattr("trl_openclaw.feedback._GRACE", 0.05)

    async def stubborn(turn, row):
        end = time.perf_counter() + 1.0
        while (left := end - time.perf_counter()) > 0:
            try:
                await asyncio.sleep(left)
            except asyncio.CancelledError:
                continue

    async def main():
        start = time.perf_counter()
        feedbacks = await collect_feedback(turns(1), [{}], next_state=stubborn, judge=good_judge, timeout=0.05)
        return feedbacks[0], time.perf_counter() - start

    feedback, seconds = asyncio.run(main())
    assert feedback.failure == "next_state_timeout"
    assert seconds < 0.8


def test_a_turn_cancelled_from_inside_fails_alone():
    async def judge(turn):
        if turn.completion == "0":
            raise asyncio.CancelledError
        return GOOD

    assert [f.failure for f in collect(turns(2), judge=judge)] == ["judge_failed", None]


def test_cancelling_the_batch_cancels_its_turns():
    stopped = []

    async def provider(turn, row):
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(turn.completion)

    async def main():
        batch = asyncio.create_task(collect_feedback(turns(2), [{}, {}], next_state=provider, judge=good_judge))
        await asyncio.sleep(0.02)
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch

    asyncio.run(main())
    assert sorted(stopped) == ["0", "1"]


def test_a_keyboard_interrupt_in_the_main_thread_is_the_users_and_comes_through():
    async def judge(turn):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(turns(2), judge=judge)


class Odd(BaseException):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Odd])
def test_what_would_end_the_loop_of_another_thread_fails_its_own_turn(error):
    def stop(turn):
        if turn.completion == "0":
            raise error

    async def provider(turn, row):
        stop(turn)
        return NextState("x")

    async def judge(turn):
        stop(turn)
        return GOOD

    def failures(**kwargs):
        batch = collect_feedback(turns(2), [{}] * 2, **({"next_state": echo, "judge": judge} | kwargs))
        return [f.failure for f in asyncio.run_coroutine_threadsafe(batch, loop).result(timeout=5)]

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    assert failures() == ["judge_failed", None]
    assert failures(next_state=provider) == ["next_state_failed", None]
    assert failures(judge=RuleJudge(lambda turn: stop(turn) or 1)) == ["judge_failed", None]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_functions_that_hang_cost_their_own_turns_and_no_later_batch():
    release = threading.Event()
    barrier = threading.Barrier(32)

    def hang(turn, row):
        return None if turn.completion == "0" else release.wait(30)

    async def batch(function, timeout):
        provider = FunctionNextState(function)
        feedbacks = await collect_feedback(turns(32), [{}] * 32, next_state=provider, judge=None, timeout=timeout)
        return [feedback.failure for feedback in feedbacks]

    async def main():
        assert await batch(hang, 0.3) == [None] + ["next_state_timeout"] * 31
        assert await batch(lambda turn, row: str(barrier.wait(10)), 20) == [None] * 32

    try:
        asyncio.run(main())
    finally:
        release.set()


@pytest.mark.parametrize("kwargs", [{"max_concurrency": 0}, {"timeout": 0}, {"rows": [{}]}])
def test_wrong_arguments_are_refused(kwargs):
    with pytest.raises(ValueError):
        collect(turns(2), **kwargs)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("sne"), st.sampled_from("+-0fxe"), st.integers(0, 2)), max_size=12))
def test_feedback_stays_with_its_turn(plans):
    verdicts = {"+": [Vote(1)], "-": [Vote(-1)], "0": [Vote(0)], "f": [Vote(failure="timeout")]}

    async def provider(turn, row):
        what, _, delay = row["plan"]
        for _ in range(delay):
            await asyncio.sleep(0)
        if what == "e":
            raise OSError(turn.completion)
        return NextState(turn.completion) if what == "s" else None

    async def judge(turn):
        what = plans[int(turn.next_state.text)][1]
        for _ in range(plans[int(turn.completion)][2]):
            await asyncio.sleep(0)
        if what == "e":
            raise OSError(turn.completion)
        return Verdict.from_votes(verdicts[what]) if what in verdicts else "x"

    feedbacks = collect(
        turns(len(plans)), [{"plan": p} for p in plans], next_state=provider, judge=judge, max_concurrency=3
    )
    assert [f.turn.completion for f in feedbacks] == [str(i) for i in range(len(plans))]
    for i, (state, verdict, _) in enumerate(plans):
        feedback = feedbacks[i]
        if state != "s":
            assert feedback.failure == ("next_state_failed" if state == "e" else None)
            assert feedback.turn.next_state is None
        else:
            assert feedback.turn.next_state == NextState(str(i))
            assert feedback.score == {"+": 1, "-": -1, "0": 0}.get(verdict)
            assert feedback.failure == (None if verdict in "+-0" else "judge_failed")
    metrics = feedback_metrics(feedbacks)
    assert sum(sum(v) for k, v in metrics.items() if k.startswith("judge/score/")) == len(plans)
    assert all(len(column) == len(plans) for column in feedback_columns(feedbacks).values())


KEYS = {
    *(f"judge/score/{x}" for x in ("positive", "negative", "neutral", "tied", "failed", "unasked", "none")),
    *(f"judge/vote/{x}" for x in ("positive", "negative", "neutral", "failed")),
    *(f"judge/vote_failed/{x}" for x in VOTE_FAILURES),
    *(f"judge/hint_failed/{x}" for x in HINT_FAILURES),
    *(f"feedback/failed/{x}" for x in ("next_state_failed", "next_state_timeout", "judge_failed", "judge_timeout")),
    "judge/hinted",
    "judge/seconds",
    "next_state/missing",
    "next_state/satisfied",
    "next_state/seconds",
}


def test_every_key_is_there_even_for_nothing():
    assert feedback_metrics([]) == {key: [] for key in KEYS}


def feedback(votes=None, satisfied=None, failure=None, state=True, seconds=0.0):
    turn = Turn("p", "c", NextState("x", satisfied=satisfied) if state else None)
    verdict = None if votes is None else Verdict.from_votes(votes)
    return Feedback(turn, verdict, failure, seconds, next_state_seconds=seconds / 2)


BATCH = [
    feedback(
        [Vote(1, hint="a"), Vote(1, hint_failure="too_long"), Vote(failure="timeout")], satisfied=True, seconds=2.0
    ),
    feedback([Vote(1), Vote(-1)], satisfied=False, seconds=1.0),
    feedback([Vote(0)]),
    feedback([Vote(failure="refused")], failure="judge_failed"),
    feedback([Vote(hint="b")], satisfied=True),
    feedback(failure="judge_timeout", seconds=9.0),
    feedback(failure="next_state_failed", state=False),
    feedback(state=False),
]


def test_metrics_by_hand():
    metrics = feedback_metrics(BATCH)
    assert set(metrics) == KEYS
    assert metrics["judge/score/positive"] == [1, 0, 0, 0, 0, 0, 0, 0]
    assert metrics["judge/score/negative"] == [0] * 8
    assert metrics["judge/score/tied"] == [0, 1, 0, 0, 0, 0, 0, 0]
    assert metrics["judge/score/neutral"] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert metrics["judge/score/failed"] == [0, 0, 0, 1, 0, 1, 0, 0]
    assert metrics["judge/score/unasked"] == [0, 0, 0, 0, 1, 0, 0, 0]
    assert metrics["judge/score/none"] == [0, 0, 0, 0, 0, 0, 1, 1]
    assert metrics["judge/vote/positive"] == [1, 1, 0, 1, 0, 0, 0]
    assert metrics["judge/vote/failed"] == [0, 0, 1, 0, 0, 0, 1]
    assert metrics["judge/vote_failed/timeout"] == [0, 0, 1, 0, 0, 0, 0]
    assert metrics["judge/vote_failed/refused"] == [0, 0, 0, 0, 0, 0, 1]
    assert metrics["judge/hint_failed/too_long"] == [0, 1, 0, 0, 0, 0, 0, 0]
    assert metrics["judge/hinted"] == [1, 0, 0, 0, 1]
    assert metrics["judge/seconds"] == [2, 1, 0, 0, 0, 9]
    assert metrics["next_state/seconds"] == [1, 0.5, 0, 0, 0, 4.5, 0, 0]
    assert metrics["feedback/failed/judge_failed"] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert metrics["feedback/failed/next_state_failed"] == [0, 0, 0, 0, 0, 0, 1, 0]
    assert metrics["next_state/missing"] == [0, 0, 0, 0, 0, 0, 0, 1]
    assert metrics["next_state/satisfied"] == [1, 0, 1]


def test_the_docstring_names_every_key():
    documented = feedback_metrics.__doc__
    for key in KEYS:
        head, name = key.rsplit("/", 1)
        ways = (f"`{key}`", f"`{head}/<kind>`", f"`.../{name}`")
        assert any(way in documented for way in ways), key


def test_columns_by_hand():
    columns = feedback_columns([*BATCH, feedback([Vote(1, hint="a"), Vote(1, hint="b")])])
    assert columns["next_state"] == ["x"] * 6 + [None, None, "x"]
    failed = ["judge_failed", "unasked", "judge_timeout", "next_state_failed"]
    assert columns["verdict"] == ["positive", "tied", "neutral", *failed, "none", "positive"]
    assert columns["judge_score"] == [1, None, 0, None, None, None, None, None, 1]
    assert columns["hints"] == ["a", "", "", "", "b", "", "", "", "a\nb"]
