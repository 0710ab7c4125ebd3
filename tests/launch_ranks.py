"""Runs scenarios of `distributed/two_ranks.py` in real processes, which talk over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "distributed" / "two_ranks.py"


def launch(scenario: str, folder: Path, processes: int = 2, engine: str | None = None) -> list[dict]:
    """What each process found in a scenario; a hang becomes a failure by the time limit.

    Args:
        scenario: Its name.
        folder: Where the processes leave what they found.
        processes: How many.
        engine: A file of `accelerate_configs` without its ending; by default each process has the whole model.
    """
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if engine is None:
        command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        env["ACCELERATE_USE_CPU"] = "true"
    else:
        command += ["--config_file", str(ROOT / "accelerate_configs" / f"{engine}.yaml")]
        env["CUDA_VISIBLE_DEVICES"] = ""
    if processes > 1:
        command += ["--main_process_port", "0"]
    if processes > 1 and engine is None:  # accelerate's name for "start them with torchrun"; the CPU is asked for above
        command += ["--multi_gpu"]
    result = subprocess.run(
        [*command, str(SCRIPT), scenario, str(folder)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    found = [folder / f"rank{rank}.json" for rank in range(processes)]
    assert all(path.exists() for path in found), result.stderr[-3000:]
    return [json.loads(path.read_text()) for path in found]


def assert_shared_on_one_rank(shared: list[dict], whole: list[dict]) -> None:
    """Rank 0 ran less than without sharing, both as many passes, and losses and weights are those without."""
    assert [rank["error"] for rank in shared] == [None, None]
    assert shared[0]["student_tokens"] < 0.5 * whole[0]["student_tokens"]
    assert shared[0]["student_passes"] == shared[1]["student_passes"] == 2 * whole[0]["student_passes"]
    assert shared[0]["teacher_tokens"] < 0.6 * whole[0]["teacher_tokens"]
    for found, expected in zip(shared, whole, strict=True):
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        for name, sums in expected["weights_by_name"].items():
            assert found["weights_by_name"][name] == pytest.approx(sums, abs=1e-4), name


def assert_turns_of_two_ranks(first: dict, second: dict) -> None:
    """Both ranks trained to the end, on three turns a row and on one, and their logs tell of the turns of both."""
    assert first["error"] is second["error"] is None
    assert first["step_advantages"] == [[[-1.0, 1.0, -1.0]] * 4] * 2
    assert second["step_advantages"] == [[-1.0] * 4] * 2
    assert first["active_tokens"] == [4 * 9] * 2
    assert second["active_tokens"] == [4 * 3] * 2
    for log in (*first["log"], *second["log"]):
        assert [log[f"steps/{step}/turns"] for step in range(3)] == [1.0, 0.5, 0.5]
        assert [log[f"steps/{step}/hint_accepted"] for step in range(3)] == [1.0, 0.0, 1.0]
        assert [log[f"steps/{step}/reward"] for step in range(3)] == [-1.0, 1.0, -1.0]
        assert log["turns/mean"] == 2.0
