"""Run by `test_refused.py` in two processes: settings that cannot be, one after another, and a word at the end."""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from launch_ranks import take_leave
from trainer_harness import make_trainer

RANK = os.environ["RANK"]

CASES = {
    "more rows than fill the processes": {"generation_batch_size": 12},
    "rows that make no whole groups": {"per_device_train_batch_size": 3, "num_generations": 4},
    "evaluation rows that make no whole groups": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 1,
        "num_generations_eval": 4,
    },
    "a mistake that TRL finds": {"vllm_importance_sampling_clip_min": 5.0},
    "a mistake that the trainer of TRL finds": {"sync_ref_model": True},
    "a mistake that we find": {"importance_sampling_level": "sequence"},
    "too few prompts for all processes": {"generation_batch_size": 32},
}


def main(folder: str) -> None:
    """Try each, and write down what was said."""
    said = {name: what_is_said(partial(train, folder, config)) for name, config in CASES.items()}
    said["an average that one process alone has"] = what_is_said(partial(resume, folder))
    said["checkpoints that one process alone has"] = what_is_said(partial(resume, folder, True))
    Path(folder, f"rank{RANK}.json").write_text(json.dumps(said))


def what_is_said(tried: Callable[[], None]) -> str | None:
    try:
        tried()
    except ValueError as error:
        return str(error)
    return None


def train(folder: str, config: dict[str, Any]) -> None:
    make_trainer(folder, config=config).train()


def resume(folder: str, last: bool = False) -> None:
    """Go on from a folder that each process has of its own, as on machines that share no disk."""
    own = Path(folder, f"machine{RANK}")
    own.mkdir(exist_ok=True)
    trainer = make_trainer(own, config={"teacher": "ema"})
    trainer.teacher.save(own / "checkpoint-1", writes=RANK == "0")
    trainer.train(resume_from_checkpoint=last or str(own / "checkpoint-1"))


if __name__ == "__main__":
    main(*sys.argv[1:])
    take_leave()
