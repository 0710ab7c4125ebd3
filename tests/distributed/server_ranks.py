"""Run by `test_teacher_server.py` in two processes: trains with a teacher on each of some servers, one by one."""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from launch_ranks import take_leave
from trainer_harness import make_trainer

from trl_openclaw import ServerTeacher
from trl_openclaw.errors import OpenClawError

RANK = os.environ["RANK"]

TEACHERS = {
    "an adapter that it does not have": {"adapter": "rude"},
    "slow for rank 1": {"timeout": 3.0},
}
"""What `ServerTeacher` is given beyond the address."""

CONFIGS = {
    "too few log-probs": {"hint_selection": "sequence", "topk": 6},
    "too small a window": {"max_completion_length": 511},
    "hardly a window": {"max_completion_length": 510},
}
"""What the trainer is."""


def main(folder: str, addresses: str) -> None:
    """Train, and write down how it ended.

    Args:
        folder: Where to.
        addresses: JSON of names, with the address of a server each.
    """
    found = {name: train(f"{folder}/{name}", name, url) for name, url in json.loads(addresses).items()}
    Path(folder, f"rank{RANK}.json").write_text(json.dumps(found))


def train(folder: str, name: str, base_url: str) -> dict[str, Any]:
    """How it ends with one of them."""
    error, trainer = None, None
    try:
        given = {"api_key": f"rank{RANK}", "max_retries": 0, **TEACHERS.get(name, {})}
        teacher = ServerTeacher("stub-model", base_url, **given)
        trainer = make_trainer(folder, teacher_model=teacher, config={"max_steps": 2, **CONFIGS.get(name, {})})
        trainer.train()
    except OpenClawError as caught:
        error = f"{type(caught).__name__}: {caught}"
    window = trainer and trainer.teacher.max_length
    return {"error": error, "steps": trainer and trainer.state.global_step, "max_length": window}


if __name__ == "__main__":
    main(*sys.argv[1:])
    take_leave()
