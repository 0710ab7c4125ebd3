"""Small trainers on a tiny model, and judges, next states and teachers that the tests can steer."""

import pytest
import torch
from datasets import Dataset
from tiny import tiny_llama, tiny_tokenizer

from trl_openclaw import CombineConfig, CombineTrainer, NextState, OPDConfig, OPDTrainer, Verdict, Vote
from trl_openclaw.scoring import TeacherScores

SETTINGS = {
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "max_completion_length": 6,
    "max_steps": 1,
    "learning_rate": 1e-3,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": "none",
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}


HINTS = ("Be brief.", "Say it kindly, please.", "Use numbers.")
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "gate_proj"]}


def prompts(n: int = 8) -> Dataset:
    """Prompts of different lengths."""
    return Dataset.from_list([{"prompt": [{"role": "user", "content": "hi" * (i % 4 + 1)}]} for i in range(n)])


async def always_replies(turn, row):
    """A next state for every turn."""
    return NextState("Shorter, please.")


def judge_that(score: int | None = -1, hint: str | None = "Be brief."):
    """A judge that always answers the same."""

    async def judge(turn):
        return Verdict.from_votes([Vote(score=score, hint=hint)])

    return judge


def judge_with_hints(*hints: str):
    """A judge that always has these hint candidates."""

    async def judge(turn):
        return Verdict.from_votes([Vote(score=-1, hint=hint) for hint in hints])

    return judge


def alternating_judge(*votes: Vote):
    """A judge that gives these votes in turn."""
    calls = iter(range(1 << 30))

    async def judge(turn):
        return Verdict.from_votes([votes[next(calls) % len(votes)]])

    return judge


def make_trainer(
    tmp_path,
    trainer_class=OPDTrainer,
    *,
    model=None,
    data=None,
    judge="default",
    next_state="default",
    config=None,
    **kwargs,
):
    """A trainer on a tiny model, with `config` on top of `SETTINGS`."""
    config_class = CombineConfig if issubclass(trainer_class, CombineTrainer) else OPDConfig
    return trainer_class(
        model=tiny_llama() if model is None else model,
        args=config_class(output_dir=str(tmp_path), **{**SETTINGS, **(config or {})}),
        processing_class=tiny_tokenizer(),
        train_dataset=prompts() if data is None else data,
        judge=judge_that() if judge == "default" else judge,
        next_state=always_replies if next_state == "default" else next_state,
        **kwargs,
    )


def logged(trainer, key: str):
    """All values of a metric, in order."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def snapshot(model) -> dict[str, torch.Tensor]:
    """A copy of all parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def moved(model, before: dict[str, torch.Tensor]) -> dict[str, bool]:
    """Which parameters differ from the snapshot."""
    return {name: not torch.equal(before[name], parameter) for name, parameter in model.named_parameters()}


class ScriptedTeacher:
    """A teacher whose log-probs come from a function of a row; keeps what it was asked."""

    def __init__(self, logps):
        self.logps = logps
        self.rows = []

    def score(self, rows):
        self.rows += rows
        width = max((len(row.completion_ids) for row in rows), default=0)
        found = torch.full((len(rows), width), float("nan"))
        for i, row in enumerate(rows):
            found[i, : len(row.completion_ids)] = torch.as_tensor(self.logps(row), dtype=torch.float32)
        return TeacherScores(found, found.isfinite())


def record_gradients(trainer) -> list[dict]:
    """Records loss and gradients of every micro-step, before the optimizer takes them."""
    seen = []
    step = trainer.training_step

    def recording(*args, **kwargs):
        loss = step(*args, **kwargs)
        gradients = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
        seen.append({"loss": loss.item(), "gradients": gradients})
        return loss

    trainer.training_step = recording
    return seen


def assert_same_steps(found: list[dict], expected: list[dict], rounding: float, least: float = 1e-6) -> None:
    """Two records of `record_gradients` are equal but for rounding: losses (at least `least`), and each gradient."""
    assert any(step["loss"] for step in found)
    for a, b in zip(found, expected, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=rounding, abs=least)
        for name, gradient in a["gradients"].items():
            other = b["gradients"][name]
            assert (gradient - other).norm() <= rounding * other.norm() + 1e-6, name


def rollout_by_prompt(prompts, trainer):
    """A `rollout_func` whose completions depend on the prompt alone: no chance, whoever samples and how often."""
    ids = trainer.tokenize_prompts(prompts)
    found = [[65 + len(row) % 26] * (len(row) % 5 + 1) + [256] for row in ids]
    return {"prompt_ids": ids, "completion_ids": found, "logprobs": [[-1.0] * len(row) for row in found]}


def micro_batches_of(trainer) -> list[dict]:
    """Records every micro-batch as the loss reads it, each time it does."""
    seen, advantages = [], trainer.token_advantages

    def recording(inputs, old_per_token_logps):
        found = advantages(inputs, old_per_token_logps)
        seen.append({**inputs, "advantages": found})
        return found

    trainer.token_advantages = recording
    return seen


def batches_of(trainer) -> list[dict]:
    """Records every generation batch on its way to the loss."""
    seen = []
    extend = trainer.extend_batch

    def recording(inputs, batch):
        batch = extend(inputs, batch)
        seen.append({key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()})
        return batch

    trainer.extend_batch = recording
    return seen
