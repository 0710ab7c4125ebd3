"""A turn that was started before its batch gets the feedback it would have got, once, and leaves nothing behind."""

import asyncio
import gc

import numpy as np
import pytest
from feedback_harness import GOOD, echo, good_judge, turns

from trl_openclaw.feedback import FeedbackBatch, collect_feedback
from trl_openclaw.rewards import HindsightReward
from trl_openclaw.types import NextState, Turn, Verdict, Vote


class Asked:
    """A judge that counts how often it was asked about each completion, and what was cancelled."""

    def __init__(self, hang=()):
        self.asked, self.cancelled, self.hang = [], [], hang

    async def __call__(self, turn):
        self.asked.append(turn.completion)
        try:
            if turn.completion in self.hang:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(turn.completion)
            raise
        return GOOD


def run(started, batch_of, rows=None, *, judge=good_judge, next_state=echo, timeout=5.0, max_concurrency=32, lead=1):
    """Start `(place, turn, row)`s, let them run for `lead` rounds of the loop, then collect; the batch and its result.

    Whatever asyncio complains about fails the test.
    """

    async def main():
        complaints = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        batch = FeedbackBatch(next_state, judge, max_concurrency)
        for place, turn, row in started:
            batch.start(place, turn, row)
        for _ in range(lead):
            await asyncio.sleep(0)
        try:
            found = await batch.collect(batch_of, rows if rows is not None else [{} for _ in batch_of], timeout)
        finally:
            await batch.close()
        assert len(asyncio.all_tasks()) == 1
        gc.collect()
        assert complaints == []
        return batch, found

    return asyncio.run(main())


@pytest.mark.parametrize("lead", [0, 1, 20])
def test_what_was_started_is_not_started_again(lead):
    judge = Asked()
    batch, found = run([(2, turns(4)[2], {}), (0, turns(4)[0], {})], turns(4), judge=judge, lead=lead)
    assert sorted(judge.asked) == ["0", "1", "2", "3"]
    assert [feedback.turn for feedback in found] == [Turn("p", str(i), NextState(f"re {i}")) for i in range(4)]
    assert [feedback.score for feedback in found] == [1] * 4
    assert batch.num_early == 2


def test_a_turn_may_be_started_without_being_counted():
    async def main():
        judge = Asked()
        batch = FeedbackBatch(echo, judge, 4)
        for place in (0, 2):
            batch.start(place, turns(3)[place], {}, early=place == 0)
        found = await batch.collect(turns(3), [{}] * 3, 5.0)
        await batch.close()
        return batch.num_early, judge.asked, len(found)

    num_early, asked, number = asyncio.run(main())
    assert (num_early, sorted(asked), number) == (1, ["0", "1", "2"], 3)


@pytest.mark.parametrize(
    ("turn", "row"),
    [
        (Turn("p", "other"), {"answer": 4}),
        (Turn("other", "0"), {"answer": 4}),
        (Turn("p", "0", truncated=True), {"answer": 4}),
        (Turn("p", "0"), {"answer": 5}),
        (Turn("p", "0"), {}),
        (Turn("p", "0"), {"answer": np.ones(2)}),
    ],
)
@pytest.mark.parametrize("lead", [0, 20])
def test_a_turn_that_turns_out_otherwise_is_given_up_and_started_afresh(turn, row, lead):
    seen = []

    async def provider(turn, row):
        seen.append((turn, row))
        if len(seen) == 1 and lead:
            await asyncio.Event().wait()
        return NextState("x")

    right = {"answer": np.ones(2)} if isinstance(row.get("answer"), np.ndarray) else {"answer": 4}
    batch, found = run([(0, turn, row)], turns(1), [right], next_state=provider, lead=lead)
    assert len(seen) == (2 if lead else 1)
    assert seen[-1][0] == Turn("p", "0")
    assert seen[-1][1] is right
    assert found[0].turn == Turn("p", "0", NextState("x"))
    assert batch.num_early == 0


def test_values_that_cannot_be_compared_are_the_same_when_they_are_the_same_object():
    values = np.ones(2)
    batch, _ = run([(0, turns(1)[0], {"answer": values})], turns(1), [{"answer": values}])
    assert batch.num_early == 1


def test_a_provider_may_write_into_its_row():
    async def provider(turn, row):
        row["seen"] = True
        return NextState("x")

    batch, _ = run([(0, turns(1)[0], {})], turns(1), [{}], next_state=provider, lead=20)
    assert batch.num_early == 1


def test_a_turn_beyond_the_batch_is_given_up():
    judge = Asked(hang=["7"])
    batch, found = run([(7, Turn("p", "7"), {})], turns(1), judge=judge, lead=20)
    assert len(found) == 1
    assert judge.cancelled == ["7"]
    assert batch.num_early == 0


def test_one_limit_holds_for_early_and_late_turns():
    running = peak = 0

    async def judge(turn):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0)
        running -= 1
        return GOOD

    started = [(i, turn, {}) for i, turn in enumerate(turns(8)[:4])]
    batch, _ = run(started, turns(8), judge=judge, max_concurrency=3, lead=1)
    assert (peak, batch.num_early) == (3, 4)


def kinds(early):
    """The failures of a batch in which all that can go wrong does, started early or not."""

    async def provider(turn, row):
        if turn.completion == "0":
            raise ValueError("no user today")
        if turn.completion == "1":
            raise SystemExit(3)
        if turn.completion == "2":
            await asyncio.Event().wait()
        return NextState("x")

    async def judge(turn):
        await asyncio.sleep(0)
        if turn.completion == "3":
            raise ValueError("no judge today")
        if turn.completion == "4":
            raise SystemExit
        if turn.completion == "5":
            raise asyncio.CancelledError
        if turn.completion == "6":
            await asyncio.Event().wait()
        if turn.completion == "7":
            return Verdict.from_votes([Vote(failure="timeout")])
        return "no verdict" if turn.completion == "8" else GOOD

    started = [(i, turn, {}) for i, turn in enumerate(turns(10))] if early else []
    _, found = run(started, turns(10), next_state=provider, judge=judge, timeout=0.1, lead=50)
    return [(feedback.failure, feedback.detail, feedback.score, feedback.turn) for feedback in found]


def test_early_failures_are_the_same_failures():
    assert kinds(early=True) == kinds(early=False)
    assert [failure for failure, *_ in kinds(early=True)] == [
        "next_state_failed", "next_state_failed", "next_state_timeout", "judge_failed", "judge_failed",
        "judge_failed", "judge_timeout", "judge_failed", "judge_failed", None,
    ]  # fmt: skip


def test_the_deadline_counts_from_the_call():
    async def main():
        release = asyncio.Event()

        async def judge(turn):
            await release.wait()
            return GOOD

        batch = FeedbackBatch(echo, judge, 32)
        batch.start(0, turns(1)[0], {})
        await asyncio.sleep(0.2)
        asyncio.get_running_loop().call_later(0.02, release.set)
        return await batch.collect(turns(1), [{}], timeout=0.15)

    assert [feedback.failure for feedback in asyncio.run(main())] == [None]


@pytest.mark.parametrize("lead", [0, 1, 20])
def test_closing_without_a_call_stops_everything(lead):
    judge = Asked(hang=["0", "1"])

    async def main():
        batch = FeedbackBatch(echo, judge, 32)
        for i, turn in enumerate(turns(2)):
            batch.start(i, turn, {})
        for _ in range(lead):
            await asyncio.sleep(0)
        await batch.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert judge.cancelled == judge.asked


def test_a_turn_given_up_may_tidy_up_until_the_end():
    tidied = []

    async def provider(turn, row):
        if turn.completion == "0":
            return NextState("x")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)  # the others are done by then
            tidied.append(turn.completion)

    async def judge(turn):
        await asyncio.sleep(0.02)
        return GOOD

    run([(0, Turn("p", "other"), {}), (7, Turn("p", "7"), {})], turns(1), next_state=provider, judge=judge, lead=5)
    assert tidied == ["other", "7"]


def test_wrong_numbers_still_stop_what_was_started():
    judge = Asked(hang=["0"])
    with pytest.raises(ValueError, match="1 turns but 0 rows"):
        run([(0, turns(1)[0], {})], turns(1), [], judge=judge, lead=20)
    assert judge.cancelled == ["0"]


# The reward function


def call(reward, completions, **kwargs):
    return reward(prompts=["p"] * len(completions), completions=completions, **kwargs)


def test_the_next_call_takes_the_batch_and_the_one_after_it_none():
    judge = Asked()

    async def main():
        reward = HindsightReward(judge, echo, eos_token_ids=2)
        batch = reward.open_batch()
        batch.start(1, reward.turns("p", "b", [7], {})[0], {"answer": 5})
        first = await call(reward, ["a", "b"], completion_ids=[[2], [7]], answer=[4, 5])
        assert [f.turn.truncated for f in reward.last] == [False, True]
        early = reward.early
        second = await call(reward, ["a", "b"], completion_ids=[[2], [7]], answer=[4, 5])
        return first, early, second, reward.early

    assert asyncio.run(main()) == ([1.0, 1.0], 0.5, [1.0, 1.0], 0.0)
    assert sorted(judge.asked) == ["a", "a", "b", "b"]


def test_a_call_that_cannot_be_read_stops_what_was_started():
    judge = Asked(hang=["a"])

    async def main():
        reward = HindsightReward(judge, echo, eos_token_ids=2)
        reward.open_batch().start(0, reward.turns("p", "a", [2], {})[0], {})
        await asyncio.sleep(0.01)
        scores = await call(reward, ["a"], completion_ids=5)
        assert len(asyncio.all_tasks()) == 1
        return scores, reward.last[0].failure, reward.early

    assert asyncio.run(main()) == ([None], "judge_failed", 0.0)
    assert judge.cancelled == ["a"]


def test_a_batch_that_is_taken_is_waited_for_no_more():
    async def main():
        reward = HindsightReward(good_judge, echo)
        batch = reward.open_batch()
        assert reward.take_batch() is batch
        assert reward.take_batch() is None
        batch.start(0, reward.turns("p", "a", None, {})[0], {})
        await call(reward, ["a"])
        await batch.close()
        return reward.early

    assert asyncio.run(main()) == 0.0


def test_collect_feedback_still_checks_its_limits():
    for limits in ({"max_concurrency": 0}, {"timeout": 0}):
        with pytest.raises(ValueError, match=next(iter(limits))):
            asyncio.run(collect_feedback([], [], next_state=echo, judge=good_judge, **limits))


def test_closing_cancels_a_call_that_still_waits():
    judge = Asked(hang=["0"])

    async def main():
        batch = FeedbackBatch(echo, judge, 32)
        call = asyncio.ensure_future(batch.collect(turns(1), [{}], timeout=60))
        while not judge.asked:
            await asyncio.sleep(0)
        await batch.close()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(main())
    assert judge.cancelled == ["0"]
