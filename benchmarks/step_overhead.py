"""What distillation costs: one OPD step against one stock `GRPOTrainer` step on the same work, in one run.

    python benchmarks/step_overhead.py

SmolLM2-135M in float32 on CPU (or one GPU), 8 completions of 64 tokens of one short prompt, one hint per completion.
Both trainers get the same prompt, sample the same number of tokens and take the same optimizer step; their steps
alternate, so that whatever else the machine does meets both. The arithmetic floor is about 1.2: a step is one
generation, one forward and one backward (about twice the forward), and the teacher adds one forward.

The last line is JSON: `{"opd_over_grpo": r}`, the ratio of the median step times.
"""

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from trl_openclaw import NextState, OPDConfig, OPDTrainer, OutcomeJudge

PROMPT = "What is a good way to keep fresh herbs from wilting within a few days?"
REPLY = "That is too long. Please answer in one short sentence."
SPLIT = {"generate": "generate/seconds", "judge": "feedback/seconds", "teacher": "teacher/seconds"}


class StepTimer(TrainerCallback):
    """Wall time of every optimizer step after the first, and the trainer's own split of it."""

    def __init__(self):
        self.seconds: list[float] = []
        self.split: dict[str, list[float]] = {name: [] for name in SPLIT}

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = now()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step > 1:  # the first step warms up
            self.seconds.append(now() - self.started)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.global_step > 1:
            for name, key in SPLIT.items():
                if key in (logs or {}):
                    self.split[name].append(logs[key])


def now() -> float:
    """The time once a GPU has done all that was asked of it so far."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


async def reply(turn, row):
    """A user who is never satisfied, so that every row has a hint."""
    return NextState(REPLY, satisfied=False)


def varied_reward(completions, **kwargs):
    """Some reward that differs within the group, so that stock GRPO has something to learn."""
    return [float(len(completion[0]["content"]) % 7) for completion in completions]


def run(kind: str, model: str, args: argparse.Namespace, timer: StepTimer, folder: str) -> None:
    """Take one warm-up step and `args.steps` measured ones with a fresh trainer."""
    settings = {
        "output_dir": folder,
        "per_device_train_batch_size": args.completions,
        "num_generations": args.completions,
        "max_completion_length": args.tokens,
        "generation_kwargs": {"min_new_tokens": args.tokens},  # both trainers sample just as many tokens
        "max_steps": args.steps + 1,
        "learning_rate": 1e-6,
        "bf16": torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": PROMPT}]}] * 8)
    if kind == "grpo":
        trainer = GRPOTrainer(model, varied_reward, GRPOConfig(**settings), data)
    else:
        trainer = OPDTrainer(model, None, OPDConfig(**settings), data, judge=OutcomeJudge(), next_state=reply)
    trainer.pop_callback(PrinterCallback)
    trainer.add_callback(timer)
    trainer.train()


def fetch_model() -> str:
    """The demo's model, fetched on first use."""
    path = Path(__file__).parents[1] / "recipes" / "demo" / "smollm2.py"
    spec = importlib.util.spec_from_file_location("smollm2", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.fetch_smollm2())


def main() -> None:
    """Alternate both trainers and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or Hub name; by default SmolLM2-135M-Instruct, fetched once")
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each trainer in a round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = args.model or fetch_model()
    logging.disable_progress_bar()
    timers = {"grpo": StepTimer(), "opd": StepTimer()}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for kind, timer in timers.items():
                run(kind, model, args, timer, folder)
    medians = {kind: statistics.median(timer.seconds) for kind, timer in timers.items()}
    split = {name: statistics.median(values) for name, values in timers["opd"].split.items()}
    split["train"] = medians["opd"] - sum(split.values())
    print(f"{args.completions} completions of {args.tokens} tokens, median of {args.rounds * args.steps} steps each")
    for kind, timer in timers.items():
        print(f"{kind:>5} step: {medians[kind]:6.2f} s ({min(timer.seconds):.2f} to {max(timer.seconds):.2f})")
    for name, seconds in split.items():
        print(f"{name:>10}: {seconds:6.2f} s  {seconds / medians['opd']:6.1%} of the OPD step")
    print(json.dumps({"opd_over_grpo": round(medians["opd"] / medians["grpo"], 3)}))


if __name__ == "__main__":
    main()
