"""What the benchmarks share: the model, the trainers that are compared, their work, and how it is measured.

All trainers get the same prompts, sample the same number of tokens and take the same optimizer steps on micro-batches
of the same size; each samples one prompt a step. The first step warms up, at a quarter of the prompt, and is not
counted: it pays for the optimizer's state, our self-test and the first look at whether the model can share prefixes.
"""

import gc
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_openclaw import CombineConfig, CombineTrainer, NextState, OPDConfig, OPDTrainer, OutcomeJudge, Verdict, Vote
from trl_openclaw.trainer.step_profile import ProfiledSteps, peak_resident

PROMPT = "What is a good way to keep fresh herbs from wilting within a few days?"
REPLY = "That is too long. Please answer in one short sentence."
HINTS = (
    "Answer in one short sentence and leave everything else out.",
    "The user wants to read the most useful advice and nothing more.",
    "Keep to a single sentence, without lists and without an introduction.",
    "Name one way to do it, in at most fifteen words, and then stop.",
    "Do not explain anything: the reply should fit into one line.",
)


@dataclass(frozen=True)
class Shape:
    """The work of a step.

    Args:
        prompt: Tokens of the prompt; 0 for a short question.
        completions: Completions G of the prompt.
        tokens: Tokens of each completion.
        rows: Rows of a micro-batch at most; 0 for all of them.
        hints: Hint candidates M of each completion, where a trainer takes several.
    """

    prompt: int = 0
    completions: int = 8
    tokens: int = 64
    rows: int = 0
    hints: int = 3

    @property
    def micro_batch(self) -> int:
        """Rows of a micro-batch."""
        return min(self.rows or self.completions, self.completions)

    def __str__(self) -> str:
        prompt = f"a prompt of {self.prompt:,} tokens" if self.prompt else "a short prompt"
        parts = f", {self.micro_batch} in a micro-batch" if self.micro_batch < self.completions else ""
        return f"{self.completions} completions of {self.tokens} tokens of {prompt}{parts}"


async def reply(turn, row):
    """A user who is never satisfied, so that every row has a hint."""
    return NextState(REPLY, satisfied=False)


def judge_with(hints: int):
    """A judge that asks nobody, and has this many hints for every turn."""

    async def judge(turn):
        return Verdict.from_votes([Vote(score=-1, hint=hint) for hint in HINTS[:hints]])

    return judge


def varied_reward(completions, **kwargs):
    """Some reward that differs within the group, so that stock GRPO has something to learn."""
    return [float(len(completion[0]["content"]) % 7) for completion in completions]


class ProfiledGRPOTrainer(ProfiledSteps, GRPOTrainer):
    """Stock `GRPOTrainer` with the split of a step that our trainers log."""

    def record_metric(self, name, value):
        self._metrics["train"][name].append(value)

    def _generate(self, prompts):
        with self.timed("generate"):
            return super()._generate(prompts)

    def _tokenize_prompts(self, prompts):
        with self.timed("tokenize"):
            return super()._tokenize_prompts(prompts)

    def _calculate_rewards(self, *args):
        with self.timed("rewards"):
            return super()._calculate_rewards(*args)


def grpo(model: str, settings: dict, data: Dataset, shape: Shape) -> GRPOTrainer:
    """Stock GRPO, which runs no teacher."""
    return GRPOTrainer(model, varied_reward, GRPOConfig(**settings), data)


def profiled_grpo(model: str, settings: dict, data: Dataset, shape: Shape) -> GRPOTrainer:
    """The same, with the split of its steps."""
    return ProfiledGRPOTrainer(model, varied_reward, GRPOConfig(**settings), data)


def opd(model: str, settings: dict, data: Dataset, shape: Shape, **ours: Any) -> GRPOTrainer:
    """Distillation with one hint for each completion."""
    return OPDTrainer(model, None, OPDConfig(**settings, **ours), data, judge=OutcomeJudge(), next_state=reply)


def combine(model: str, settings: dict, data: Dataset, shape: Shape, **ours: Any) -> GRPOTrainer:
    """Rewards and distillation on four tokens a position, with the best of M hints for each completion."""
    method = {"opd_loss": "topk_surrogate", "topk": 4, "max_hints": shape.hints, **ours}
    if shape.hints > 1:
        method["hint_selection"] = "sequence"
    config = CombineConfig(**settings, **method)
    return CombineTrainer(model, None, config, data, judge=judge_with(shape.hints), next_state=reply)


def sdpo(model: str, settings: dict, data: Dataset, shape: Shape) -> Any:
    """TRL's experimental SDPO, where every completion's teacher reads the feedback that `opd` takes its hint from."""
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    config = SDPOConfig(
        **settings,
        max_prompt_length=None,
        use_successful_as_teacher=False,
        include_environment_feedback=True,
        teacher_model_kind="base",  # frozen, as our teacher is
    )
    return SDPOTrainer(model, varied_reward, config, data.add_column("privileged_context", [REPLY] * len(data)))


KINDS: dict[str, Callable[[str, dict, Dataset, Shape], Any]] = {
    "grpo": grpo,
    "profiled_grpo": profiled_grpo,
    "opd": opd,
    "combine": combine,
    "opd_in_full": partial(opd, prefix_sharing=False),
    "combine_in_full": partial(combine, prefix_sharing=False),
    "sdpo": sdpo,
}

EVERY_ROW_IS_TAUGHT = {
    "opd": "hint/accepted",
    "combine": "hint/accepted",
    "opd_in_full": "hint/accepted",
    "combine_in_full": "hint/accepted",
    "sdpo": "self_distillation/reprompt_sample_fraction",
}
"""What says so in the log."""


def make_trainer(kind: str, model: str, shape: Shape, steps: int, folder: str, **more: Any) -> Any:
    """A trainer for one step that warms up and `steps` others, with `more` settings."""
    settings = {
        "output_dir": folder,
        "per_device_train_batch_size": shape.micro_batch,
        "gradient_accumulation_steps": shape.completions // shape.micro_batch,
        "num_generations": shape.completions,
        "max_completion_length": shape.tokens,
        "generation_kwargs": {"min_new_tokens": shape.tokens},  # all trainers sample just as many tokens
        "shuffle_dataset": False,
        "max_steps": steps + 1,
        "learning_rate": 1e-6,
        "bf16": torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **more,
    }
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [prompt_of(tokenizer, shape.prompt // 4), *[prompt_of(tokenizer, shape.prompt)] * steps]
    trainer = KINDS[kind](model, settings, Dataset.from_list([{"prompt": prompt} for prompt in prompts]), shape)
    trainer.pop_callback(PrinterCallback)
    return trainer


def prompt_of(tokenizer: Any, tokens: int) -> list[dict[str, str]]:
    """A user's message that has this many tokens with the template around it; the short question for 0."""

    def message(words: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": " ".join([*(["and"] * words), PROMPT])}]

    def length(words: int) -> int:
        template = tokenizer.apply_chat_template(message(words), add_generation_prompt=True, return_dict=True)
        return len(template["input_ids"])

    if length(0) >= tokens:
        return message(0)
    per_word = (length(100) - length(0)) / 100
    return message(round((tokens - length(0)) / per_word))


class StepTimer(TrainerCallback):
    """Wall time and log of every optimizer step after the first."""

    def __init__(self):
        self.seconds: list[float] = []
        self.logs: list[dict[str, float]] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = now()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step > 1:
            self.seconds.append(now() - self.started)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.global_step > 1 and "loss" in logs:
            self.logs.append(dict(logs))

    def check(self, kind: str, shape: Shape) -> None:
        """Stop where a step was not the work that it should have been."""
        for log in self.logs:
            for length in ("completions/min_length", "completions/max_length"):
                if log[length] != shape.tokens:
                    sys.exit(f"{kind} sampled completions of {log[length]:g} tokens, not {shape.tokens}")
            taught = EVERY_ROW_IS_TAUGHT.get(kind)
            if taught is not None and log[taught] != 1:
                sys.exit(f"{kind} taught only some of its completions: `{taught}` is {log[taught]:g}")
            if kind.startswith("combine") and log["hint/candidates"] != shape.hints:
                sys.exit(f"{kind} compared {log['hint/candidates']:g} hints, not {shape.hints}")


def now() -> float:
    """The time once a GPU has done all that was asked of it so far."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def run_steps(
    kind: str, model: str, shape: Shape, steps: int, timer: StepTimer, meter: Any = None, settings: dict | None = None
) -> None:
    """Take one step that warms up and `steps` measured ones with a fresh trainer.

    Args:
        kind: Which of `KINDS`.
        model: A folder or Hub name.
        shape: The work of a step.
        steps: How many are measured.
        timer: Measures them.
        meter: Makes the meter of each part's memory from the device, for a trainer that splits its steps.
        settings: More settings of the trainer's config.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(kind, model, shape, steps, folder, **(settings or {}))
        trainer.add_callback(timer)
        if meter is not None:
            trainer.profile.meter = meter(trainer.accelerator.device)
        trainer.train()
    timer.check(kind, shape)
    del trainer
    gc.collect()


class PeakMeter:
    """Bytes at the peak since it was last asked. It resets the system's own counter (Linux) or that of CUDA."""

    def __init__(self, device: torch.device):
        self.device = device

    def __call__(self) -> int:
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            peak = peak_resident()
            Path("/proc/self/clear_refs").write_text("5")
        return peak


def fetch_model() -> str:
    """The demo's model, fetched on first use."""
    path = Path(__file__).parents[1] / "recipes" / "demo" / "smollm2.py"
    spec = importlib.util.spec_from_file_location("smollm2", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.fetch_smollm2())


def in_fresh_process(script: str, point: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
    """Have a script measure one point in a process of its own, which finds no memory that another left behind.

    Args:
        script: The script; given `--point` and JSON, its last line is the answer as JSON.
        point: What it measures.
        timeout: Seconds after which it is stopped.

    Raises:
        subprocess.TimeoutExpired: It took longer.
        RuntimeError: It failed; the message is the end of what it said.
    """
    command = [sys.executable, script, "--point", json.dumps(point)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
