"""A reply is judged while others are still being sampled, and nothing but the wait is different."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from tiny import tiny_llama, tiny_tokenizer
from trainer_harness import (
    ScriptedTeacher,
    always_replies,
    logged,
    make_trainer,
    prompts,
    rollout_by_prompt,
    snapshot,
)

from trl_openclaw import CombineTrainer, FunctionNextState, NextState, OPDTrainer, Verdict, Vote

EOS = 256
LENGTHS = [2, 6, 3, 6, 4, 5, 2, 6]
"""Tokens of each row of a batch, the end token included; 6 is the limit, where a row of 6 is cut."""

BATCH = {"per_device_train_batch_size": 8, "num_generations": 2}


class Script:
    """Lets the policy sample `LENGTHS` tokens a row, row i the i-th letter, and looks on at every step."""

    def __init__(self, model, on_step=lambda step: None):
        self.on_step, self.step = on_step, 0
        self.letters = [tiny_tokenizer()(chr(97 + i))["input_ids"][0] for i in range(len(LENGTHS))]
        model.register_forward_hook(self, with_kwargs=True)

    def __call__(self, model, args, kwargs, output):
        if getattr(output, "logits", None) is None or kwargs.get("labels") is not None:
            return  # not sampling
        self.step = 1 if kwargs["input_ids"].size(1) > 1 else self.step + 1
        self.on_step(self.step)
        rows = output.logits.size(0)
        wanted = [EOS if self.step == LENGTHS[i] < 6 else self.letters[i] for i in range(rows)]
        output.logits[:, -1] = -torch.inf
        output.logits[range(rows), -1, wanted] = 0.0


def trainer_of(tmp_path, trainer_class=OPDTrainer, *, on_step=lambda step: None, model=None, config=None, **kwargs):
    model = tiny_llama() if model is None else model
    Script(model, on_step)
    return make_trainer(tmp_path, trainer_class, model=model, config=BATCH | (config or {}), **kwargs)


def good(turn):
    return Verdict.from_votes([Vote(score=1, hint="Be brief.")])


async def good_judge(turn):
    return good(turn)


def test_a_reply_is_judged_before_the_batch_is_sampled(tmp_path):
    judged, waited = threading.Event(), []

    async def judge(turn):
        if turn.reply == "a":
            judged.set()
        return good(turn)

    def on_step(step):
        if step == 5:
            waited.append(judged.wait(20))

    trainer = trainer_of(tmp_path, judge=judge, on_step=on_step)
    trainer.train()
    assert waited == [True]
    assert logged(trainer, "feedback/early") == [5 / 8]  # not the three that were cut


def test_a_function_that_blocks_is_called_before_the_batch_is_sampled(tmp_path):
    called, waited = threading.Event(), []

    def next_state(turn, row):
        called.set()
        return "Shorter, please."

    trainer = trainer_of(
        tmp_path,
        next_state=FunctionNextState(next_state),
        on_step=lambda step: step == 5 and waited.append(called.wait(20)),
    )
    trainer.train()
    assert waited == [True]


def test_the_wait_for_slow_judges_shrinks(tmp_path):
    """Replies that end early take the judge as long as the others take to be sampled."""

    def wait(runs_in_process):
        async def judge(turn):
            await asyncio.sleep(0.3 if turn.reply in ("a", "cc", "g") else 0.0)
            return good(turn)

        judge.runs_in_process = runs_in_process
        trainer = trainer_of(tmp_path, judge=judge, on_step=lambda step: step == 6 and time.sleep(0.3))
        trainer.train()
        return trainer.feedback.seconds

    assert wait(runs_in_process=False) < wait(runs_in_process=True) / 3


# What may go wrong, by reply: the first five rows end early, the others with the batch.


async def odd_next_state(turn, row):
    if turn.reply in ("a", "bbbbbb"):
        raise ValueError("no user today")
    if turn.reply == "cc":
        raise SystemExit(3)
    return NextState("x" if turn.reply != "ddd" else " ")


class OddJudge:
    """Good or bad, an error, `exit()`, a cancellation, or a wait for ever, by the reply alone."""

    def __init__(self, runs_in_process):
        self.runs_in_process = runs_in_process

    async def __call__(self, turn):
        if turn.reply[0] in "eg":
            raise {"e": SystemExit, "g": asyncio.CancelledError}[turn.reply[0]]
        if turn.reply[0] == "f":
            await asyncio.Event().wait()
        return Verdict.from_votes([Vote(score=1, hint=f"Not {turn.reply}.")])


@pytest.mark.parametrize("trainer_class", [OPDTrainer, CombineTrainer])
def test_a_head_start_changes_nothing(tmp_path, trainer_class):
    def train(runs_in_process):
        seen = []
        trainer = trainer_of(
            tmp_path,
            trainer_class,
            judge=OddJudge(runs_in_process),
            next_state=odd_next_state,
            config={"max_steps": 2, "feedback_timeout": 0.3, "judge_failure_limit": 1.0},
        )
        trainer.feedback_listeners.append(lambda mode, feedback: seen.append(feedback))
        trainer.train()
        untimed = [[replace(f, seconds=0.0, next_state_seconds=0.0) for f in batch] for batch in seen]
        return untimed, snapshot(trainer.model), logged(trainer, "feedback/early"), logged(trainer, "loss")

    early, late = train(runs_in_process=False), train(runs_in_process=True)
    assert early[0] == late[0]
    assert [f.failure for f in early[0][0]] == [
        "next_state_failed", "next_state_failed", "next_state_failed", None, "judge_failed", "judge_timeout",
        "judge_failed", None,
    ]  # fmt: skip
    assert all(torch.equal(early[1][name], late[1][name]) for name in early[1])
    assert (early[2], late[2]) == ([5 / 8] * 2, [])
    assert early[3] == late[3]


def test_batches_never_mix_and_every_turn_is_judged_once(tmp_path):
    asked, shown = [], []

    async def judge(turn):
        asked.append((turn.prompt, turn.completion))
        return good(turn)

    def reward(prompts, completions, **kwargs):
        shown.append(list(zip(prompts, completions, strict=True)))
        return [0.0] * len(prompts)

    trainer = trainer_of(tmp_path, CombineTrainer, judge=judge, reward_funcs=reward, config={"max_steps": 3})
    feedback = []
    trainer.feedback_listeners.append(
        lambda mode, batch: feedback.append([(f.turn.prompt, f.turn.completion) for f in batch])
    )
    trainer.train()
    assert feedback == shown
    assert len(asked) == 3 * 8
    for batch in range(3):
        assert sorted(map(str, asked[8 * batch : 8 * batch + 8])) == sorted(map(str, shown[batch]))
    assert logged(trainer, "feedback/early") == [5 / 8] * 3


def test_a_turn_that_a_reward_function_rewrites_is_judged_as_rewritten(tmp_path):
    def rewrite(prompts, completions, **kwargs):
        completions[0][0]["content"] = "rewritten"
        prompts[2][0]["content"] = "asked otherwise"
        return [0.0] * len(prompts)

    seen = []

    async def judge(turn):
        seen.append((turn.prompt_text, turn.reply))
        return good(turn)

    config = {"opd_weight": 0.0}  # a teacher would score another prompt than was sampled from
    trainer = trainer_of(tmp_path, CombineTrainer, judge=judge, reward_funcs=rewrite, config=config)
    trainer.train()
    turns = [f.turn for f in trainer.feedback.last]
    assert [turn.reply for turn in turns][:3] == ["rewritten", "bbbbbb", "cc"]
    assert turns[2].prompt_text == "asked otherwise"
    assert {(turn.prompt_text, turn.reply) for turn in turns} <= set(seen)
    assert logged(trainer, "feedback/early") == [3 / 8]


class Hanging:
    """A judge that says when it was cancelled."""

    def __init__(self):
        self.asked, self.cancelled = threading.Event(), threading.Event()

    async def __call__(self, turn):
        self.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.mark.parametrize("where", ["sampling", "rewards"])
def test_an_error_stops_what_was_started(tmp_path, where, caplog):
    judge = Hanging()

    def on_step(step):
        if where == "sampling" and step == 5:
            assert judge.asked.wait(20)
            raise RuntimeError("broken")

    def reward(prompts, **kwargs):
        if where == "rewards":
            assert judge.asked.wait(20)
            raise RuntimeError("broken")
        return [0.0] * len(prompts)

    trainer = trainer_of(tmp_path, CombineTrainer, judge=judge, on_step=on_step, reward_funcs=reward)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    assert judge.cancelled.is_set()
    assert "generate" not in vars(trainer.model)
    assert trainer.run_async(others()) == 0
    assert caplog.records == []


def test_a_batch_that_another_reward_function_gave_up_is_not_mixed_with_the_next(tmp_path):
    """Its judge is cancelled at once, long before its time limit, and nothing of it is logged."""
    judge, first = Hanging(), [True]

    async def ask(turn):
        return await judge(turn) if first[0] else good(turn)

    async def reward(prompts, **kwargs):
        while first[0] and not judge.asked.is_set():
            await asyncio.sleep(0.01)
        if first[0]:
            raise RuntimeError("broken")
        return [0.0] * len(prompts)

    trainer = trainer_of(tmp_path, CombineTrainer, judge=ask, reward_funcs=reward)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    assert judge.cancelled.wait(20)
    while trainer.run_async(others()):
        time.sleep(0.01)
    assert trainer.feedback.last == []
    first[0] = False
    trainer.train()
    assert [f.score for f in trainer.feedback.last] == [1] * 8
    assert logged(trainer, "judge/score/positive") == [1.0]
    assert logged(trainer, "judge/score/failed") == [0.0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_does_not_wait_for_a_judge_that_blocks_the_others(tmp_path, error):
    asked, over, waited = threading.Event(), threading.Event(), []

    async def judge(turn):
        asked.set()
        waited.append(over.wait(10))
        return good(turn)

    def on_step(step):
        if step == 5:
            assert asked.wait(20)
            raise error

    trainer = trainer_of(tmp_path, judge=judge, on_step=on_step)
    with pytest.raises(error):
        trainer.train()
    assert waited == []
    over.set()


async def others():
    return len(asyncio.all_tasks()) - 1


def test_an_evaluation_has_its_head_start_too(tmp_path):
    trainer = trainer_of(
        tmp_path,
        config={"per_device_eval_batch_size": 8, "eval_strategy": "no"},
        eval_dataset=prompts(4),
    )
    assert trainer.evaluate()["eval_feedback/early"] == 5 / 8


def test_an_adapter_is_trained_with_a_head_start(tmp_path):
    trainer = trainer_of(
        tmp_path,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    assert logged(trainer, "feedback/early") == [5 / 8]


def test_next_states_alone_have_a_head_start(tmp_path):
    trainer = trainer_of(
        tmp_path, judge=None, teacher_model=ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids))
    )
    trainer.train()
    assert logged(trainer, "feedback/early") == [5 / 8]


def test_a_rollout_function_is_left_alone(tmp_path):
    trainer = make_trainer(tmp_path, rollout_func=rollout_by_prompt)
    trainer.train()
    assert logged(trainer, "feedback/early") == [0.0]
    assert [f.score for f in trainer.feedback.last] == [-1] * 4


@pytest.mark.parametrize("part", ["judge", "next_state"])
def test_a_model_in_this_process_is_asked_when_sampling_is_over(tmp_path, part):
    sampling, seen = [False], []

    async def ask(*args):
        seen.append(sampling[0])
        return NextState("x") if part == "next_state" else good(args[0])

    ask.runs_in_process = True

    def on_step(step):
        sampling[0] = step < 6

    rest = {"judge": good_judge, "next_state": always_replies}
    trainer = trainer_of(tmp_path, on_step=on_step, **{**rest, part: ask})
    trainer.train()
    assert seen == [False] * 8
    assert logged(trainer, "feedback/early") == []


def test_nobody_to_ask_needs_no_head_start(tmp_path):
    teacher = ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids))
    trainer = trainer_of(tmp_path, judge=None, next_state=None, teacher_model=teacher)
    trainer.train()
    assert logged(trainer, "feedback/early") == []
