"""What needs no verdict is scored while verdicts come in, and every number is what it would be without."""

import asyncio
import itertools
import threading

import pytest
import torch
from datasets import Dataset
from tiny import tiny_llama, tiny_tokenizer
from trainer_harness import (
    ScriptedTeacher,
    always_replies,
    assert_same_steps,
    batches_of,
    judge_that,
    logged,
    make_trainer,
    prompts,
    record_gradients,
    rollout_by_prompt,
)

from trl_openclaw import CombineTrainer, NextState, OPDTrainer, Verdict, Vote
from trl_openclaw.errors import TeacherError
from trl_openclaw.scoring import TeacherRow

pytestmark = pytest.mark.filterwarnings("ignore:.*drift")

APART = {"teacher": "live", "reward_scale": 1.5, "self_test": False}
"""A reference, the initial policy, that is another model than the teacher."""

AT_ONCE = {"teacher": "frozen", "reward_scale": 1.5, "self_test": False}
"""A reference that is the teacher."""


def with_context() -> Dataset:
    """Prompts of which every third has no privileged context."""
    return Dataset.from_list(
        [{**row, "privileged_context": None if i % 3 == 2 else f"It is {i}."} for i, row in enumerate(prompts())]
    )


def by_prompt(prompt) -> Verdict:
    """A hint for every other length of prompt, a score by the length."""
    length = len(prompt[0]["content"]) // 2
    return Verdict.from_votes([Vote(score=length % 3 - 1, hint="Be brief." if length % 2 else None)])


class Log:
    """Notes the order of what happens, in any thread."""

    def __init__(self):
        self.events: list[str] = []
        self.rows: dict[str, list[list[TeacherRow]]] = {"teacher": [], "reference": []}

    def watch(self, trainer) -> None:
        """Note whenever teacher and reference have scored, and what."""
        lessons = trainer._teaching.lessons
        self._watch("teacher", lessons.teacher)
        if lessons.has_reference_apart:
            self._watch("reference", lessons.reference)

    def _watch(self, name: str, teacher) -> None:
        score = teacher.score

        def noting(rows, **wanted):
            found = score(rows, **wanted)
            self.events.append(name)
            self.rows[name].append(list(rows))
            return found

        teacher.score = noting

    def judge(self, after: str | None = None, runs_in_process: bool = False):
        """A judge that answers about the four rows of a batch when somebody else has scored them."""
        calls = itertools.count()

        async def judge(turn):
            batch = next(calls) // 4
            while after is not None and len(self.rows[after]) <= batch:
                await asyncio.sleep(0.002)
            self.events.append("judge")
            return by_prompt(turn.prompt)

        judge.runs_in_process = runs_in_process
        return judge


def trainer_of(tmp_path, trainer_class=OPDTrainer, config=None, **kwargs):
    config = {"max_steps": 2, "feedback_timeout": 10.0, "judge_failure_limit": 1.0, **(config or {})}
    return make_trainer(tmp_path, trainer_class, config=config, **kwargs)


def external() -> dict:
    return {"teacher_model": tiny_llama(1), "teacher_processing_class": tiny_tokenizer()}


def scripted() -> dict:
    return {"teacher_model": ScriptedTeacher(lambda row: [-1.0] * len(row.completion_ids))}


CONTEXT = {"hint_source": "privileged_context", "self_test": False}
AHEAD = {
    "the reference": (APART, dict, prompts, "reference"),
    "the reference of an objective": ({**APART, "opd_loss": "topk_surrogate"}, dict, prompts, "reference"),
    "a privileged context": (CONTEXT, dict, with_context, "teacher"),
    "a context and a reference": ({**CONTEXT, **APART}, dict, with_context, "reference"),
    "a context, one model for both": ({**CONTEXT, **AT_ONCE}, dict, with_context, "teacher"),
    "another prompt's context": ({**CONTEXT, "control": "random_hint"}, dict, with_context, "teacher"),
    "no hint": ({"hint_source": "none", "self_test": False}, external, prompts, "teacher"),
    "a teacher of one's own": ({"hint_source": "none"}, scripted, prompts, "teacher"),
}


@pytest.mark.parametrize("case", AHEAD)
def test_a_judge_that_waits_for_the_teacher_is_not_waited_for_by_it(tmp_path, case):
    config, kwargs, data, who = AHEAD[case]
    log = Log()
    trainer = trainer_of(tmp_path, CombineTrainer, config, judge=log.judge(after=who), data=data(), **kwargs())
    log.watch(trainer)
    trainer.train()
    assert logged(trainer, "feedback/failed/judge_timeout") == [0.0] * 2
    assert [len(rows) for rows in log.rows[who]] == [4 if who == "reference" else len(log.rows[who][0])] * 2
    assert logged(trainer, "loss") != [0.0] * 2
    assert trainer._teaching._answers is trainer._teaching._reference is None  # nothing large stays


def test_an_evaluation_does_not_wait_either(tmp_path):
    log = Log()
    trainer = trainer_of(
        tmp_path, CombineTrainer, {**CONTEXT, "per_device_eval_batch_size": 4}, judge=log.judge(after="teacher"),
        data=with_context(), eval_dataset=with_context().select(range(4)),
    )  # fmt: skip
    log.watch(trainer)
    assert trainer.evaluate()["eval_feedback/failed/judge_timeout"] == 0.0
    assert log.events == ["teacher", *["judge"] * 4] * 2


TIMES = ("step_time", "seconds", "_gib", "runtime", "per_second", "feedback/early")


class TestSameNumbers:
    CASES = {
        **{name: (config, kwargs, data) for name, (config, kwargs, data, _) in AHEAD.items()},
        "a judge's hints": ({}, dict, prompts),
        "several steps a batch": ({**APART, "steps_per_generation": 2, "max_steps": 4}, dict, prompts),
        "cut rows are masked": ({**APART, "mask_truncated_completions": True}, dict, prompts),
        "cut rows with a context": ({**CONTEXT, "mask_truncated_completions": True}, dict, with_context),
        "next states as hints": ({**CONTEXT, "control": "raw_next_state"}, dict, with_context),
        "TRL's reference": ({**APART, "beta": 0.1}, dict, prompts),
    }  # fmt: skip

    @pytest.mark.parametrize("case", CASES)
    def test_losses_gradients_and_logs(self, tmp_path, case):
        config, kwargs, data = self.CASES[case]
        runs = []
        for runs_in_process in (False, True):
            tiny_llama().save_pretrained(tmp_path / "model")
            trainer = trainer_of(
                tmp_path, CombineTrainer, {**config, "max_grad_norm": 0.0, "optim": "sgd"},
                judge=Log().judge(runs_in_process=runs_in_process), rollout_func=cut_by_prompt, data=data(),
                model=str(tmp_path / "model"), **kwargs(),
            )  # fmt: skip
            steps, batches = record_gradients(trainer), batches_of(trainer)
            trainer.train()
            assert trainer._early.starts_all != runs_in_process
            runs.append((steps, batches, [untimed(entry) for entry in trainer.state.log_history]))
        (ahead, batches, log), (after, other_batches, other_log) = runs
        assert_same_steps(ahead, after, 1e-5, 1e-7)
        for a, b in zip(log, other_log, strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
        for a, b in zip(batches, other_batches, strict=True):
            assert a["hint_mask"].tolist() == b["hint_mask"].tolist()
            torch.testing.assert_close(a["teacher_mask"], b["teacher_mask"])


def cut_by_prompt(prompts, trainer):
    """Completions by the prompt alone, but one is cut, and one is empty."""
    found = rollout_by_prompt(prompts, trainer)
    for i, length in ((0, 3), (2, 0)):
        found["completion_ids"][i] = [70, 71, 72][:length]
        found["logprobs"][i] = [-1.0] * length
    return found


def untimed(entry: dict) -> dict:
    return {name: value for name, value in entry.items() if not any(part in name for part in TIMES)}


class TestWhatWaits:
    def events(self, tmp_path, config, data=prompts, **kwargs):
        log = Log()
        trainer = trainer_of(
            tmp_path, CombineTrainer, {**config, "max_steps": 1, "self_test": False}, data=data(), judge=log.judge(),
            **kwargs,
        )  # fmt: skip
        log.watch(trainer)
        trainer.train()
        return log.events

    def test_a_judge_in_this_process_has_it_for_itself(self, tmp_path):
        log = Log()
        judge = log.judge(runs_in_process=True)
        trainer = trainer_of(tmp_path, CombineTrainer, {**APART, "max_steps": 1}, judge=judge)
        log.watch(trainer)
        trainer.train()
        assert log.events == [*["judge"] * 4, "teacher", "reference"]

    def test_a_next_state_in_this_process_has_it_for_itself(self, tmp_path):
        log = Log()

        async def next_state(turn, row):
            log.events.append("next state")
            return NextState("x")

        next_state.runs_in_process = True
        trainer = trainer_of(
            tmp_path, CombineTrainer, {**CONTEXT, "max_steps": 1}, data=with_context(), next_state=next_state
        )
        log.watch(trainer)
        trainer.train()
        assert log.events == [*["next state"] * 4, "teacher"]

    @pytest.mark.parametrize("opd_reference", ["initial", "unhinted_teacher"])
    def test_a_reference_that_is_the_teacher_is_asked_with_it(self, tmp_path, opd_reference):
        config = {**AT_ONCE, "opd_reference": opd_reference}
        assert self.events(tmp_path, config) == [*["judge"] * 4, "teacher"]

    def test_hints_of_the_judge(self, tmp_path):
        assert self.events(tmp_path, {}) == [*["judge"] * 4, "teacher"]

    def test_hints_made_of_next_states(self, tmp_path):
        config = {**CONTEXT, "control": "raw_next_state"}
        assert self.events(tmp_path, config, with_context) == [*["judge"] * 4, "teacher"]

    def test_a_reference_that_trl_has_asked(self, tmp_path):
        tiny_llama().save_pretrained(tmp_path / "model")
        events = self.events(tmp_path, {**APART, "beta": 0.1}, model=str(tmp_path / "model"))
        assert events == [*["judge"] * 4, "teacher"]


class TestTheReferenceAhead:
    def asked(self, tmp_path, config, max_length=None):
        log = Log()
        trainer = trainer_of(
            tmp_path, CombineTrainer, {**APART, **config}, judge=log.judge(),
            rollout_func=cut_by_prompt,
        )  # fmt: skip
        log.watch(trainer)
        if max_length is not None:
            trainer._teaching.lessons.reference.max_length = max_length
        batches = batches_of(trainer)
        trainer.train()
        return log.rows["reference"], batches

    @pytest.mark.parametrize(("masks", "expected"), [(False, [0, 1, 3]), (True, [1, 3])])
    def test_it_reads_the_rows_that_may_have_a_hint_as_they_were_sampled(self, tmp_path, masks, expected):
        asked, batches = self.asked(tmp_path, {"mask_truncated_completions": masks})
        assert len(asked) == len(batches) == 2
        for rows, batch in zip(asked, batches, strict=True):
            sampled = [
                [batch[f"{part}_ids"][i][batch[f"{part}_mask"][i].bool()].tolist() for part in ("prompt", "completion")]
                for i in expected
            ]
            assert [[list(row.prompt_ids), list(row.completion_ids)] for row in rows] == sampled

    def test_what_does_not_fit_into_its_window_is_left_out(self, tmp_path):
        rows = self.asked(tmp_path, {})[0][0]
        longest = max(row.length for row in rows)
        fitting = self.asked(tmp_path, {}, max_length=longest - 1)[0][0]
        assert fitting == [row for row in rows if row.length < longest]
        assert len(fitting) < len(rows)


class Hanging:
    def __init__(self):
        self.cancelled = 0

    async def __call__(self, turn):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def others():
    return len(asyncio.all_tasks()) - 1


def test_a_teacher_that_fails_stops_what_was_started(tmp_path, caplog):
    def broken(row):
        raise RuntimeError("down")

    judge = Hanging()
    config = {**CONTEXT, "feedback_timeout": 60.0}
    teacher = ScriptedTeacher(broken)
    trainer = trainer_of(
        tmp_path, CombineTrainer, config, judge=judge, data=with_context(), teacher_model=teacher,
        rollout_func=rollout_by_prompt,
    )  # fmt: skip
    with pytest.raises(TeacherError, match="The teacher `ScriptedTeacher` failed: RuntimeError: down"):
        trainer.train()
    assert judge.cancelled == 4
    assert trainer.run_async(others()) == 0
    assert caplog.records == []


class TestTurnsThatStartBeforeTheRewardCall:
    def test_they_do_not_wait_for_other_reward_functions(self, tmp_path):
        judged, waited = threading.Event(), []

        async def judge(turn):
            judged.set()
            return by_prompt(turn.prompt)

        def reward(completions, **kwargs):
            waited.append(judged.wait(20))
            return [0.0] * len(completions)

        trainer = trainer_of(
            tmp_path, CombineTrainer, {"max_steps": 1}, judge=judge, reward_funcs=reward, rollout_func=rollout_by_prompt
        )
        trainer.train()
        assert waited == [True]
        assert logged(trainer, "feedback/early") == [0.0]  # none while the batch was sampled

    def test_they_are_shown_what_the_reward_call_is_shown(self, tmp_path):
        def rollout(prompts, trainer):
            return {**rollout_by_prompt(prompts, trainer), "answer": list(range(len(prompts))), "table": torch.ones(4)}

        asked = Waited()

        async def next_state(turn, row):
            asked.add((turn.prompt_text, turn.reply, row.get("answer"), turn.truncated))
            row["answer"] = "written into"
            return NextState("x")

        trainer = trainer_of(
            tmp_path, CombineTrainer, {"max_steps": 1}, judge=judge_that(), next_state=next_state,
            reward_funcs=asked.until(4), rollout_func=rollout,
        )  # fmt: skip
        trainer.train()
        turns = [feedback.turn for feedback in trainer.feedback.last]
        assert asked.found == [(turn.prompt_text, turn.reply, i, False) for i, turn in enumerate(turns)]

    def test_one_that_a_reward_function_rewrites_is_judged_as_rewritten(self, tmp_path):
        asked = Waited()

        async def judge(turn):
            asked.add(turn.reply)
            return by_prompt(turn.prompt)

        def rewrite(prompts, completions, **kwargs):
            asked.until(4)(completions)
            completions[0][0]["content"] = "rewritten"
            return [0.0] * len(prompts)

        trainer = trainer_of(
            tmp_path, CombineTrainer, {"max_steps": 1, "opd_weight": 0.0}, judge=judge, reward_funcs=rewrite,
            rollout_func=rollout_by_prompt,
        )  # fmt: skip
        trainer.train()
        assert asked.found[4:] == ["rewritten"]
        assert trainer.feedback.last[0].turn.reply == "rewritten"


class Waited:
    """What was asked, and a reward function that waits for it."""

    def __init__(self):
        self.found, self.changed = [], threading.Condition()

    def add(self, what) -> None:
        with self.changed:
            self.found.append(what)
            self.changed.notify_all()

    def until(self, number: int):
        def reward(completions, **kwargs):
            with self.changed:
                assert self.changed.wait_for(lambda: len(self.found) >= number, 20)
            return [0.0] * len(completions)

        return reward


def test_a_batch_after_one_whose_rewards_failed_has_answers_of_its_own(tmp_path):
    calls = itertools.count()

    def reward(completions, **kwargs):
        if next(calls) == 0:
            raise RuntimeError("no reward today")
        return [0.0] * len(completions)

    trainer = trainer_of(
        tmp_path, CombineTrainer, {**CONTEXT, "max_steps": 1}, data=with_context(), reward_funcs=reward, **scripted()
    )
    with pytest.raises(RuntimeError, match="no reward today"):
        trainer.train()
    trainer.teacher.rows.clear()
    batches = batches_of(trainer)
    trainer.train()
    assert len(trainer.teacher.rows) == batches[0]["hint_mask"].sum() > 0


def test_next_states_and_rewards_that_edit_what_they_are_shown_teach_nothing_else(tmp_path):
    asked = []

    async def edits(turn, row):
        asked.append(turn)
        turn.prompt[0]["content"] = "something else, and much longer than it was"
        return NextState("Shorter, please.")

    def edits_too(prompts, completions, **kwargs):
        for prompt in prompts:
            prompt[0]["content"] = "something else, and much longer than it was"
        return [0.0] * len(prompts)

    losses = []
    for next_state, rewards in ((always_replies, []), (edits, []), (always_replies, [edits_too])):
        trainer = make_trainer(
            tmp_path,
            CombineTrainer,
            next_state=next_state,
            rollout_func=rollout_by_prompt,
            config={"max_steps": 2},
            reward_funcs=rewards,
        )
        trainer.train()
        losses.append(logged(trainer, "loss"))
    assert losses[0] == losses[1] == losses[2]
    assert len(asked) == 8


def test_training_that_was_interrupted_inside_a_batch_samples_anew(tmp_path):
    trainer = make_trainer(tmp_path, config={"num_iterations": 4, "max_steps": 4})
    sampled, step = [], trainer.training_step
    generate = trainer._generate

    def counting(prompts):
        sampled.append(trainer.state.global_step)
        return generate(prompts)

    def fails_once(*args, **kwargs):
        if trainer.state.global_step == 2:
            raise RuntimeError("once")
        return step(*args, **kwargs)

    trainer._generate, trainer.training_step = counting, fails_once
    with pytest.raises(RuntimeError, match="once"):
        trainer.train()
    trainer.training_step = step
    trainer.train()
    assert sampled == [0, 0]
