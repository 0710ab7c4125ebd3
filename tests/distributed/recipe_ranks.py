"""Run under `accelerate launch` on a CPU: recipes one after another, each as the script that it is.

    recipe_ranks.py FOLDER recipes/opd.py --config opd.yaml ... --then recipes/combine.py ...

What each process trained is left in the folder, and every recipe's model where it is told to.
"""

import json
import os
import runpy
import sys
from itertools import groupby
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import transformers.training_args
from accelerate import Accelerator
from two_ranks import prepare_engine

from trl_openclaw import recipe

RANK = int(os.environ.get("RANK", "0"))


def run_recipe(folder: str, script: str, *arguments: str) -> None:
    """Run a recipe, and write down what this process found when it had trained."""
    train = recipe.train

    def watched(trainer, *args):
        train(trainer, *args)
        found = {
            "engine": type(trainer.model_wrapped).__name__,
            "processes": trainer.accelerator.num_processes,
            "precision": trainer.accelerator.mixed_precision,
            "log": [entry for entry in trainer.state.log_history if "grad_norm" in entry],
        }
        Path(folder, f"{Path(script).stem}{RANK}.json").write_text(json.dumps(found))
        return trainer

    sys.argv = [script, *arguments]
    with patch.object(recipe, "train", watched):
        runpy.run_path(script, run_name="__main__")


def main(folder: str, *arguments: str) -> None:
    # On a CPU `bf16` has to be asked for with `use_cpu`, which would leave engines out.
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    *commands, last = (list(group) for is_end, group in groupby(arguments, "--then".__eq__) if not is_end)
    with patch.object(
        Accelerator, "end_training", lambda self: None
    ):  # the processes stay together until the last ends
        for command in commands:
            run_recipe(folder, *command)
    run_recipe(folder, *last)


if __name__ == "__main__":
    prepare_engine()
    main(*sys.argv[1:])
