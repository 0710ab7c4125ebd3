"""The benchmark of the judge's concurrency: it runs, its last line is JSON, and all votes are in flight together."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_runs_and_ends_in_json():
    _, script = shlex.split("python benchmarks/judge_concurrency.py")
    done = subprocess.run(
        [sys.executable, script, "--turns", "3", "--votes", "2", "--delay", "0.05"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert list(result) == ["judge_seconds", "sequential_seconds", "max_in_flight"]
    assert result["max_in_flight"] == 3 * 2
    assert result["judge_seconds"] > 0
    assert result["sequential_seconds"] > 0
