"""Run by `test_teacher_server.py` in two processes: trains with the teacher on the server at a given address."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from launch_ranks import take_leave
from trainer_harness import make_trainer

from trl_openclaw import ServerTeacher
from trl_openclaw.errors import OpenClawError

RANK = os.environ["RANK"]


def main(folder: str, base_url: str) -> None:
    """Train, and write down how it ended."""
    error, trainer = None, None
    try:
        teacher = ServerTeacher("stub-model", base_url, api_key=f"rank{RANK}", max_retries=0)
        trainer = make_trainer(folder, teacher_model=teacher, config={"max_steps": 2})
        trainer.train()
    except OpenClawError as caught:
        error = f"{type(caught).__name__}: {caught}"
    window = trainer and trainer.teacher.max_length
    steps = trainer and trainer.state.global_step
    Path(folder, f"rank{RANK}.json").write_text(json.dumps({"error": error, "steps": steps, "max_length": window}))


if __name__ == "__main__":
    main(*sys.argv[1:])
    take_leave()
