"""Run by `test_resume.py`: four steps, each with a checkpoint; killed in the third, gone on from there, or neither.

Arguments: a folder, and what to do one after another, such as `whole-ema killed-ema`.
"""

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from datasets import Dataset
from launch_ranks import take_leave
from tiny import tiny_llama
from trainer_harness import always_replies, judge_that, make_trainer, rollout_by_prompt
from two_ranks import RANK, WITH_DEEPSPEED, WITH_FSDP, prepare_engine, weights_of

STEPS, KILLED_IN = 4, 2


def run(folder: str, mode: str, teacher: str) -> None:
    """Train with a kind of teacher; what this process found goes to a file, unless it is killed."""
    rows = []

    def rollout(prompts, trainer):
        rows.append([prompt[0]["content"] for prompt in prompts])
        return rollout_by_prompt(prompts, trainer)

    world = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = make_trainer(
        Path(folder, teacher, "whole" if mode == "whole" else "killed"),
        model=tiny_llama(),
        judge=judge_that(),
        next_state=always_replies,
        rollout_func=rollout,
        data=Dataset.from_list([{"prompt": [{"role": "user", "content": f"hi {i}" * (i % 4 + 1)}]} for i in range(40)]),
        config={
            "max_steps": STEPS,
            "per_device_train_batch_size": 4 // world,
            "save_strategy": "steps",
            "save_steps": 1,
            "teacher": teacher,
            **({"teacher_ema_rate": 0.3} if teacher == "ema" else {}),
            **({"use_cpu": False, "ddp_backend": "gloo"} if WITH_DEEPSPEED or WITH_FSDP else {}),
        },
    )
    losses, step = [], trainer.training_step

    def training_step(*args, **kwargs):
        losses.append(step(*args, **kwargs).item())
        if mode == "killed" and trainer.state.global_step == KILLED_IN:  # its gradients are there, its step is not
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(losses[-1])

    trainer.training_step = training_step
    trainer.train(resume_from_checkpoint=mode == "resumed")
    found = {"rows": rows, "losses": losses, "weights": weights_of(trainer.model)}
    if teacher == "ema":
        found["teacher"] = weights_of(trainer.teacher.model)
    Path(folder, f"{mode}-{teacher}{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    prepare_engine()
    for done in sys.argv[2:]:
        run(sys.argv[1], *done.split("-"))
    take_leave()
