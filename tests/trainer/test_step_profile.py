"""The split of a step's time: every moment has one part, the parts add up, and a log has the mean over its steps."""

import asyncio
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from datasets import Dataset
from trainer_harness import always_replies, judge_that, logged, make_trainer, prompts, rollout_by_prompt

from trl_openclaw import CombineTrainer, NextState
from trl_openclaw.teachers.ema import EMACallback
from trl_openclaw.trainer import step_profile
from trl_openclaw.trainer.step_profile import (
    GIB,
    PARTS,
    PEAK_MEMORY,
    StepProfile,
    memory_key,
    peak_resident,
    seconds_key,
)


class Trainer:
    """What a profile needs of a trainer."""

    accelerator = SimpleNamespace(device=torch.device("cpu"))

    def __init__(self):
        self.metrics = {}

    def record_metric(self, name, value):
        self.metrics.setdefault(name, []).append(value)


def profile_at(*times):
    """A profile whose clock shows these times."""
    return StepProfile(Trainer(), clock=iter(times).__next__)


def test_every_moment_belongs_to_one_part():
    profile = profile_at(0, 100, 101, 103, 106, 110, 115)
    profile.on_step_begin(None, None, None)
    assert profile.switch("generate") == "rest"  # 1 s of it
    assert profile.switch("tokenize") == "generate"  # 2 s
    assert profile.switch("generate") == "tokenize"  # 3 s
    assert profile.switch("student") == "generate"  # 4 s more
    profile.on_step_end(None, None, None)  # 5 s
    spent = {"rest": 1, "generate": 2 + 4, "tokenize": 3, "student": 5}
    metrics = profile.trainer.metrics
    assert {part: metrics[seconds_key(part)] for part in PARTS} == {part: [spent.get(part, 0)] for part in PARTS}
    assert metrics[seconds_key("total")] == [15]


def test_a_step_begins_without_what_was_before_it():
    profile = profile_at(0, 5, 10, 11, 13)
    profile.switch("generate")  # of an evaluation, say
    profile.on_step_begin(None, None, None)
    assert profile.switch("generate") == "rest"
    profile.on_step_end(None, None, None)
    assert profile.trainer.metrics[seconds_key("rest")] == [1]
    assert profile.trainer.metrics[seconds_key("total")] == [3]


def test_next_states_and_judge_share_the_wait_for_them_by_their_turns():
    profile = profile_at(0)
    profile.seconds["rewards"] = 10.0
    rows = [SimpleNamespace(next_state_seconds=2.0, seconds=4.0), SimpleNamespace(next_state_seconds=0.0, seconds=2.0)]
    profile.divide_rewards(SimpleNamespace(last=rows, seconds=8.0))
    assert profile.seconds["next_state"] == pytest.approx(8 * 2 / 8)
    assert profile.seconds["judge"] == pytest.approx(8 * 6 / 8)
    assert profile.seconds["rewards"] == pytest.approx(2)  # of other reward functions


def test_nothing_is_divided_where_nobody_was_waited_for():
    profile = profile_at(0)
    profile.seconds["rewards"] = 3.0
    profile.divide_rewards(SimpleNamespace(last=[], seconds=1.0))
    assert (profile.seconds["rewards"], profile.seconds["judge"]) == (3.0, 0.0)


def test_a_meter_gives_each_part_its_own_peak():
    profile = profile_at(*range(10))
    peaks = iter([9, 1, 7, 2, 5, 3])
    profile.meter = lambda: next(peaks) * GIB
    profile.on_step_begin(None, None, None)  # forgets the 9 of what was before
    for part in ("generate", "student", "generate", "teacher"):
        profile.switch(part)
    profile.on_step_end(None, None, None)
    metrics = profile.trainer.metrics
    found = {part: metrics[memory_key(part)] for part in PARTS if memory_key(part) in metrics}
    assert found == {"rest": [1], "generate": [7], "student": [2], "teacher": [3]}


def test_the_peak_is_that_of_this_process():
    before = peak_resident()
    size = before - psutil.Process().memory_info().rss + 64 * 2**20  # what ran before may have left room below the peak
    block = bytearray(size)
    block[::4096] = b"\1" * len(block[::4096])
    grown = peak_resident()
    assert grown - before > 32 * 2**20
    del block
    assert peak_resident() >= grown - 2**20


PAUSE = 0.05


async def slow_reply(turn, row):
    await asyncio.sleep(PAUSE)
    return NextState("Shorter, please.")


def slow_judge():
    judge = judge_that(-1, "Be brief.")

    async def slow(turn):
        await asyncio.sleep(2 * PAUSE)
        return await judge(turn)

    return slow


def slow(method, pause=PAUSE):
    def slowed(*args, **kwargs):
        time.sleep(pause)
        return method(*args, **kwargs)

    return slowed


def reward(completions, **kwargs):
    time.sleep(PAUSE)
    return [float(i % 2) for i in range(len(completions))]


@pytest.fixture
def seconds_of(tmp_path):
    def train(trainer):
        trainer.train()
        return {part: logged(trainer, seconds_key(part)) for part in (*PARTS, "total")}

    return train


def test_each_part_has_the_time_that_was_spent_in_it(tmp_path, seconds_of):
    trainer = make_trainer(
        tmp_path,
        CombineTrainer,
        reward_funcs=reward,
        next_state=slow_reply,
        judge=slow_judge(),
        config={"self_test": False, "gradient_accumulation_steps": 2, "max_steps": 2, "steps_per_generation": 2},
    )
    trainer.model.generate = slow(trainer.model.generate, 4 * PAUSE)
    trainer.processing_class.apply_chat_template = slow(trainer.processing_class.apply_chat_template, 3 * PAUSE)
    trainer.teacher.score = slow(trainer.teacher.score, 5 * PAUSE)
    trainer.accelerator.backward = slow(trainer.accelerator.backward, 3 * PAUSE)
    trainer.create_optimizer()
    trainer.optimizer.step = slow(trainer.optimizer.step, 2 * PAUSE)
    found = seconds_of(trainer)
    # Of the two micro-batches of a step, one samples for both; the prompts are rendered plain and hinted. While the
    # reward function has its pause, a third of the feedback comes in.
    floor = {
        "generate": 4, "next_state": 2 / 3, "judge": 4 / 3, "rewards": 1, "tokenize": 2 * 3, "teacher": 5,
        "student": 2 * 3, "optimizer": 2, "rest": 0,
    }  # fmt: skip
    for step in range(2):
        busy = max(found["total"][step] / (PAUSE * sum(floor.values())), 1.0)  # by which other work slows all parts
        for part in PARTS:
            assert found[part][step] >= 0.9 * PAUSE * floor[part], part
            assert found[part][step] < PAUSE * (floor[part] + 3) * busy, part
        assert sum(found[part][step] for part in PARTS) == pytest.approx(found["total"][step])


def test_what_came_in_while_the_teacher_worked_was_not_waited_for(tmp_path, seconds_of):
    config = {"self_test": False, "hint_source": "privileged_context"}
    data = Dataset.from_list([{**row, "privileged_context": "It is 4."} for row in prompts()])
    trainer = make_trainer(
        tmp_path, CombineTrainer, config=config, data=data, next_state=slow_reply, judge=slow_judge(),
        rollout_func=rollout_by_prompt,
    )  # fmt: skip
    trainer.teacher.score = slow(trainer.teacher.score, 8 * PAUSE)
    found = {part: seconds for part, (seconds,) in seconds_of(trainer).items()}
    assert found["teacher"] >= 8 * PAUSE
    assert found["next_state"] + found["judge"] + found["rewards"] < PAUSE
    assert sum(found[part] for part in PARTS) == pytest.approx(found["total"])


def test_an_average_of_the_weights_is_moved_within_the_step(tmp_path, seconds_of):
    config = {"self_test": False, "teacher": "ema", "max_steps": 2}
    trainer = make_trainer(tmp_path, config=config, rollout_func=rollout_by_prompt)
    (mover,) = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, EMACallback)]
    mover.on_step_end = slow(mover.on_step_end, 8 * PAUSE)
    found = seconds_of(trainer)
    assert min(found["optimizer"]) >= 8 * PAUSE
    assert max(found["rest"]) < 4 * PAUSE


def test_a_pass_of_trl_over_the_sampled_batch_is_the_students(tmp_path, seconds_of):
    config = {"self_test": False, "num_iterations": 2, "max_steps": 2}
    trainer = make_trainer(tmp_path, config=config, rollout_func=rollout_by_prompt)
    forward, passes = trainer.model.forward, []

    def slow_without_gradients(*args, **kwargs):
        if not torch.is_grad_enabled():
            passes.append(time.sleep(8 * PAUSE))
        return forward(*args, **kwargs)

    trainer.model.forward = slow_without_gradients
    found = seconds_of(trainer)
    assert len(passes) == 1
    assert found["student"][0] >= 8 * PAUSE > 2 * found["student"][1]
    assert max(found["rest"]) < 4 * PAUSE


def test_a_log_has_the_mean_over_its_steps(tmp_path, seconds_of):
    config = {"self_test": False, "steps_per_generation": 2, "max_steps": 4, "logging_steps": 4}
    trainer = make_trainer(tmp_path, config=config, next_state=always_replies)
    trainer.teacher.score = slow(trainer.teacher.score, 8 * PAUSE)  # twice in four steps
    found = seconds_of(trainer)
    (teacher,) = found["teacher"]
    assert 4 * PAUSE < teacher < 6 * PAUSE
    assert sum(values[0] for part, values in found.items() if part != "total") == pytest.approx(found["total"][0])


def test_peak_memory_is_in_every_log(tmp_path, monkeypatch):
    monkeypatch.setattr(step_profile, "peak_resident", lambda: 3 * GIB)
    trainer = make_trainer(tmp_path, config={"max_steps": 2})
    trainer.train()
    assert logged(trainer, PEAK_MEMORY) == [3.0, 3.0]


def test_an_evaluation_leaves_the_steps_alone(tmp_path, seconds_of):
    trainer = make_trainer(
        tmp_path,
        judge=judge_that(),
        config={"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
        eval_dataset=make_trainer(tmp_path).train_dataset.select(range(4)),
    )
    trainer.evaluate = slow(trainer.evaluate, 10 * PAUSE)
    found = seconds_of(trainer)
    assert len(logged(trainer, "eval_loss")) == 2
    assert found["total"][1] < 10 * PAUSE


def test_the_documentation_names_every_part():
    for part in (*PARTS, "total"):
        assert f"`{seconds_key(part)}`" in step_profile.__doc__
    assert f"`{PEAK_MEMORY}`" in step_profile.__doc__
