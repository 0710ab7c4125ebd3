"""A step on recorded turns is the step that `CombineTrainer` makes on the same ids, sampled by itself."""

import math
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from learner_harness import LORA, logps_of, make_learner, make_turn, open_store, record, states
from peft import LoraConfig
from tiny import tiny_llama
from trainer_harness import make_trainer, record_gradients

from trl_openclaw import CombineTrainer, NextState, Verdict, Vote
from trl_openclaw.live.canonical import turn_hashes
from trl_openclaw.live.learner.snapshot import load_tensors, trained_tensors

TURNS = 4
VOTES = {
    0: Vote(score=-1, hint="Be brief."),
    1: Vote(score=1),
    2: Vote(score=0, hint="Say it kindly, please."),
    3: Vote(score=-1),
}
CONFIG = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_generations": 1, "seed": 3}
ALIKE = {"per_device_train_batch_size": 2, "turns_per_step": TURNS, "max_updates": 1, "learning_rate": 1e-3}


def prompt_of(number: int) -> list[dict]:
    return [{"role": "user", "content": f"question {number}" + "!" * number}]


def number_of(prompt) -> int:
    return int(prompt[0]["content"].strip("!")[-1])


async def judge(turn):
    return Verdict.from_votes([VOTES[number_of(turn.prompt)]])


async def reply(turn, row):
    return NextState("Shorter, please.")


def sampled_by_combine(folder, **config):
    """Gradients of a step of `CombineTrainer`, by turn the ids that it sampled, and the adapter that it began with."""
    rows = {}

    trainer = make_trainer(
        folder,
        CombineTrainer,
        data=Dataset.from_list([{"prompt": prompt_of(i)} for i in range(TURNS)]),
        judge=judge,
        next_state=reply,
        config={**CONFIG, "judge_reward": "majority", **config},
        peft_config=LoraConfig(**LORA),
    )
    before_rewards = trainer.before_rewards

    def watching(inputs, rollout):
        for prompt, prompt_ids, ids in zip(rollout.prompts, rollout.prompt_ids, rollout.completion_ids, strict=True):
            rows[number_of(prompt)] = (prompt_ids, ids)
        return before_rewards(inputs, rollout)

    trainer.before_rewards = watching
    steps = record_gradients(trainer)
    start = {name: tensor.clone() for name, tensor in trained_tensors(trainer).items()}
    trainer.train()
    return steps, rows, start


def record_rows(store, rows, temperatures=(1.0,) * TURNS) -> list[str]:
    """The same as turns of the store, sampled and recorded each at its temperature."""
    found = []
    for number, (prompt_ids, ids) in sorted(rows.items()):
        logps = logps_of(tiny_llama(), prompt_ids, ids, temperatures[number])
        turn = make_turn(number, tiny_llama(), messages=prompt_of(number))
        fields = {"prompt_ids": tuple(prompt_ids), "completion_ids": tuple(ids), "logprobs": tuple(logps)}
        sampling = {"temperature": temperatures[number], "logprobs_temperature": temperatures[number]}
        turn = replace(turn, sampling=sampling, **fields)
        store.record_turn(turn, turn_hashes(turn.messages, turn.reply))
        store.add_next_state(turn.turn_id, [{"role": "user", "content": "Shorter, please."}])
        store.add_verdict(turn.turn_id, Verdict.from_votes([VOTES[number]]))
        found.append(turn.turn_id)
    return found


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"opd_weight": 0.0},
        {"opd_loss": "topk_surrogate", "hint_selection": "longest"},
        {"temperature": 0.6},
        {"temperature": 0.6, "beta": 0.3},
        {"temperature": 1.7, "opd_loss": "topk_surrogate", "hint_selection": "longest"},
        {"temperature": 0.6, "opd_loss": "full_divergence", "hint_selection": "longest"},
    ],
)
def test_loss_and_gradient_are_those_of_sampling(tmp_path, config):
    expected, rows, start = sampled_by_combine(tmp_path / "combine", **config)
    assert len(rows) == TURNS
    store = open_store(tmp_path / "live")
    ids = record_rows(store, rows, (config.get("temperature", 1.0),) * TURNS)
    config = {name: value for name, value in config.items() if name != "temperature"}
    learner = make_learner(tmp_path / "live", token_preferences=False, max_engine_gap=1e-3, **ALIKE, **config)
    load_tensors(learner, start)
    found = record_gradients(learner)
    learner.train()
    assert states(store, ids) == ["trained"] * TURNS
    assert sum(step["loss"] for step in found) == pytest.approx(sum(step["loss"] for step in expected), rel=1e-5)
    assert found[-1]["gradients"].keys() == expected[-1]["gradients"].keys()
    assert any(gradient.norm() > 1e-3 for gradient in expected[-1]["gradients"].values())
    for name, gradient in expected[-1]["gradients"].items():
        other = found[-1]["gradients"][name]
        assert (gradient - other).norm() <= 1e-5 * gradient.norm() + 1e-8, name


def test_each_turn_is_trained_at_its_own_temperature(tmp_path):
    """A step is a sum over turns: two temperatures, each way round, come to one for all and the other for all."""
    _, rows, start = sampled_by_combine(tmp_path / "combine")

    def gradients(*temperatures):
        folder = tmp_path / "-".join(map(str, temperatures))
        record_rows(open_store(folder), rows, temperatures)
        learner = make_learner(folder, token_preferences=False, max_engine_gap=1e-3, **ALIKE)
        load_tensors(learner, start)
        steps = record_gradients(learner)
        learner.train()
        return steps[-1]["gradients"]

    low, high = gradients(0.5, 0.5, 0.5, 0.5), gradients(1.5, 1.5, 1.5, 1.5)
    one, other = gradients(0.5, 1.5, 1.5, 0.5), gradients(1.5, 0.5, 0.5, 1.5)
    assert any((low[name] - high[name]).norm() > 1e-2 * low[name].norm() for name in low)
    for name in low:
        assert torch.allclose(one[name] + other[name], low[name] + high[name], rtol=1e-4, atol=1e-7), name


def gradient_when_recorded(folder, score: int, shift: float) -> dict[str, torch.Tensor]:
    """The gradient of a step on turns whose recorded log-probs are those of the policy plus `shift`."""
    store = open_store(folder)
    for number in range(TURNS):
        turn = make_turn(number, tiny_llama())
        turn = type(turn)(**{**vars(turn), "logprobs": tuple(p + shift for p in turn.logprobs)})
        store.record_turn(turn, turn_hashes(turn.messages, turn.reply))
        store.add_feedback("default", turn.turn_id, score, None, f"key {number}")
    learner = make_learner(folder, opd_weight=0.0, max_engine_gap=None, **ALIKE)
    steps = record_gradients(learner)
    learner.train()
    log = learner.state.log_history[0]
    assert log["live/ratio_mean"] == pytest.approx(math.exp(-shift), rel=1e-4)
    assert log["live/log_ratio_abs"] == log["live/engine_gap"] == pytest.approx(abs(shift), abs=1e-4)
    clipped = score * shift < 0
    assert log["clip_ratio/region_mean"] == (1.0 if clipped else 0.0)
    return steps[-1]["gradients"]


def test_recorded_log_probs_are_the_old_policy_of_the_clipped_loss(tmp_path):
    on_policy = gradient_when_recorded(tmp_path / "a", -1, 0.0)
    rarer = gradient_when_recorded(tmp_path / "b", -1, -0.5)
    clipped = gradient_when_recorded(tmp_path / "c", 1, -0.5)
    assert any(gradient.norm() > 1e-3 for gradient in on_policy.values())
    for name, gradient in on_policy.items():
        assert torch.allclose(rarer[name], math.exp(0.5) * gradient, atol=1e-6), name
        assert clipped[name].abs().max() == 0.0, name


def test_the_gap_clip_is_of_the_recorded_log_probs(tmp_path):
    store = open_store(tmp_path)
    ids = record(store, range(TURNS), score=None, hints=("Be brief.",))
    learner = make_learner(tmp_path, **{**ALIKE, "rl_weight": 1.0})
    learner.train()
    for turn_id in ids:
        scores = store.token_scores(turn_id)
        for student, teacher, advantage in zip(scores.student, scores.teacher, scores.advantages, strict=True):
            assert advantage == pytest.approx(max(-1.0, min(1.0, teacher - student)), abs=1e-4)
