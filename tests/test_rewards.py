import asyncio
import math
from types import SimpleNamespace

import pytest
from tiny import tiny_llama, tiny_tokenizer

from trl_openclaw.next_states import PERSONAS
from trl_openclaw.rewards import HindsightReward
from trl_openclaw.types import NextState, Verdict, Vote

CHAT = [{"role": "user", "content": "hi"}]


def reply(text):
    return [{"role": "assistant", "content": text}]


async def judge(turn):
    """Good for short replies, bad for long ones, an error for `boom`."""
    if turn.reply == "boom":
        raise RuntimeError("boom")
    return Verdict.from_votes([Vote(1 if len(turn.reply) < 5 else -1)])


async def answer(turn, row):
    return NextState("ok", satisfied=len(turn.reply) < 5)


class Logs:
    def __init__(self):
        self.metrics, self.extra = {}, {}

    def log_metric(self, name, value):
        assert isinstance(value, float)
        self.metrics.setdefault(name, []).append(value)

    def log_extra(self, column, values):
        self.extra.setdefault(column, []).extend(values)


def call(reward, completions, prompts=None, **columns):
    return asyncio.run(reward(prompts=prompts or [CHAT] * len(completions), completions=completions, **columns))


def test_scores_and_logs():
    logs = Logs()
    reward = HindsightReward(judge, answer)
    scores = call(
        reward,
        [reply("yes"), reply("a long one"), reply("boom")],
        log_metric=logs.log_metric,
        log_extra=logs.log_extra,
        trainer_state=object(),
    )
    assert scores == [1.0, -1.0, None]
    assert logs.metrics["judge/score/positive"] == [1.0, 0.0, 0.0]
    assert logs.metrics["feedback/failed/judge_failed"] == [0.0, 0.0, 1.0]
    assert logs.metrics["next_state/satisfied"] == [1.0, 0.0, 1.0]
    assert "judge/hint_failed/timeout" in logs.metrics
    assert logs.extra["verdict"] == ["positive", "negative", "judge_failed"]
    assert logs.extra["judge_score"] == [1, -1, None]
    assert [f.failure for f in reward.last] == [None, None, "judge_failed"]


def test_neutral_is_zero_and_a_tie_is_nothing():
    votes = {"a": [Vote(0)], "b": [Vote(1), Vote(-1)]}

    async def by_reply(turn):
        return Verdict.from_votes(votes[turn.reply])

    assert call(HindsightReward(by_reply, answer), [reply("a"), reply("b")]) == [0.0, None]


def test_plain_text_rows_with_their_own_next_state():
    reward = HindsightReward(judge)
    scores = call(reward, ["yes", "yes", "a long one"], prompts=["p"] * 3, next_state=["thanks", None, "no"])
    assert scores == [1.0, None, -1.0]
    assert reward.last[1].failure is None


def test_the_provider_gets_its_row():
    rows = []

    async def provider(turn, row):
        rows.append(row)

    shared = object()
    call(HindsightReward(judge, provider), [reply("a"), reply("b")], answer=[4, 5], environments=shared)
    assert rows == [{"answer": 4, "environments": shared}, {"answer": 5, "environments": shared}]


def test_truncated_is_read_off_the_last_id():
    ids = [[5, 2], [5, 7], [], [3]]
    batch = [reply("x")] * 4

    def truncated(reward, completion_ids):
        call(reward, batch, completion_ids=completion_ids)
        return [f.turn.truncated for f in reward.last]

    assert truncated(HindsightReward(judge, answer, eos_token_ids=[2, 3]), ids) == [False, True, False, False]
    assert truncated(HindsightReward(judge, answer, eos_token_ids=2), ids) == [False, True, False, True]
    assert truncated(HindsightReward(judge, answer), ids) == [False] * 4
    assert truncated(HindsightReward(judge, answer, eos_token_ids=2), None) == [False] * 4


def test_no_judge_collects_next_states_only():
    reward = HindsightReward(None, answer)
    assert call(reward, [reply("a")]) == [None]
    assert reward.last[0].turn.next_state.text == "ok"
    assert call(HindsightReward(None), [reply("a")]) == [None]


def test_score_only_asks_for_no_hints():
    class Hinting:
        def __init__(self, hints=True):
            self.hints = hints

        def without_hints(self):
            return Hinting(False)

        async def __call__(self, turn):
            return Verdict.from_votes([Vote(1, hint="h" if self.hints else None)])

    def hints(**kwargs):
        reward = HindsightReward(Hinting(), answer, **kwargs)
        call(reward, [reply("a")])
        return reward.last[0].hints

    assert hints() == ()
    assert hints(score_only=False) == ("h",)


@pytest.mark.parametrize("ids", [5, [[1]], [[1], "x"], [[1], [object()]]])
def test_what_cannot_be_read_gives_none_and_is_counted(ids):
    logs = Logs()
    reward = HindsightReward(judge, answer, eos_token_ids=2)
    scores = call(reward, [reply("a"), reply("b")], completion_ids=ids, log_metric=logs.log_metric)
    assert scores == [None, None]
    assert logs.metrics["feedback/failed/judge_failed"] == [1.0, 1.0]


def test_logging_that_breaks_does_not_lose_the_scores(caplog):
    def broken(*args):
        raise OSError("disk full")

    assert call(HindsightReward(judge, answer), [reply("a")], log_metric=broken, log_extra=broken) == [1.0]
    assert "disk full" in caplog.text


def test_the_deadline_reaches_the_batch():
    async def never(turn):
        await asyncio.Event().wait()

    assert call(HindsightReward(never, answer, timeout=0.05), [reply("a")] * 3) == [None] * 3


def test_limits_are_checked_at_construction():
    with pytest.raises(ValueError, match="max_concurrency"):
        HindsightReward(judge, max_concurrency=0)
    with pytest.raises(ValueError, match="timeout"):
        HindsightReward(judge, timeout=0)


def train(tmp_path, judge, next_state):
    """One step of stock GRPO on a tiny model; returns the trainer and its log of that step."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = tiny_tokenizer()
    reward = HindsightReward(judge, next_state, eos_token_ids=[tokenizer.eos_token_id, tokenizer.pad_token_id])
    trainer = GRPOTrainer(
        model=tiny_llama(),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=6,
            logging_steps=1,
            log_completions=True,
            save_strategy="no",
            report_to="none",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": CHAT, "topic": "greeting"}] * 4),
        processing_class=tokenizer,
    )
    trainer.train()
    return SimpleNamespace(reward=reward, logs=trainer.state.log_history[0], trainer=trainer)


def test_inside_a_stock_grpo_trainer(tmp_path):
    scores = iter([1, -1, 1, 1])

    async def in_turn(turn):
        assert turn.prompt == CHAT
        return Verdict.from_votes([Vote(next(scores))])

    run = train(tmp_path, in_turn, PERSONAS["one-sentence"])
    assert run.logs["rewards/judge/mean"] == pytest.approx(0.5)
    assert run.logs["judge/score/positive"] == pytest.approx(0.75)
    assert run.logs["judge/vote/failed"] == 0.0
    assert 0.0 <= run.logs["next_state/satisfied"] <= 1.0
    assert len(run.reward.last) == 4
    assert run.trainer._logs["extra"].keys() >= {"next_state", "verdict", "judge_score", "hints"}
    assert all(math.isfinite(run.logs[key]) for key in ("loss", "grad_norm"))


def test_training_goes_on_when_the_judge_fails_for_all(tmp_path):
    async def broken(turn):
        raise ConnectionError("nobody there")

    before = tiny_llama().state_dict()
    run = train(tmp_path, broken, answer)
    mean = run.logs["rewards/judge/mean"]
    assert mean is None or math.isnan(mean)
    assert run.logs["feedback/failed/judge_failed"] == 1.0
    assert run.logs["judge/score/failed"] == 1.0
    assert run.logs["loss"] == 0.0
    after = run.trainer.model.state_dict()
    assert all((before[name] == after[name]).all() for name in before)


def test_the_reward_of_a_trajectory_is_the_mean_of_its_turns():
    logs = Logs()
    tool = {"role": "tool", "name": "look", "content": "seen"}
    completions = [
        [*reply("a long one"), tool, *reply("yes"), tool, *reply("ok")],
        [*reply("boom"), tool, *reply("no")],
        reply("a long one"),
    ]
    reward = HindsightReward(judge, answer)
    assert call(reward, completions, log_extra=logs.log_extra) == [pytest.approx(1 / 3), 1.0, -1.0]
    assert reward.places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
    assert [feedback.turn.next_state.text for feedback in reward.last] == ["seen", "seen", "ok", "seen", "ok", "ok"]
    assert logs.extra["judge_score"] == [pytest.approx(1 / 3), 1, -1]
    assert logs.extra["verdict"][1] == "[0] judge_failed\n[1] positive"
    assert logs.extra["next_state"][2] == "ok"


def test_the_mean_of_the_votes_as_a_reward():
    async def torn(turn):
        return Verdict.from_votes([Vote(1), Vote(1), Vote(-1)])

    assert call(HindsightReward(torn, answer), [reply("a")]) == [1.0]
    assert call(HindsightReward(torn, answer, judge_reward="mean"), [reply("a")]) == [pytest.approx(1 / 3)]
    with pytest.raises(ValueError, match="judge_reward"):
        HindsightReward(torn, answer, judge_reward="median")


def test_the_environment_of_a_row_says_what_followed_its_last_turn():
    class Environment:
        next_state = "left open"

    completions = [[*reply("a"), {"role": "tool", "content": "x"}, *reply("b")], reply("c")]
    reward = HindsightReward(judge, answer)
    call(reward, completions, environments=[Environment(), object()])
    assert [feedback.turn.next_state.text for feedback in reward.last] == ["x", "left open", "ok"]
