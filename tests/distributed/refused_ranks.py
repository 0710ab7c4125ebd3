"""Run by `test_refused.py` in two processes: settings that cannot be, one after another, and a word at the end."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from launch_ranks import take_leave
from trainer_harness import make_trainer

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
    said = {}
    for name, config in CASES.items():
        try:
            make_trainer(folder, config=config).train()
            said[name] = None
        except ValueError as error:
            said[name] = str(error)
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
    take_leave()
