"""The benchmark of the judge's concurrency: it runs, its last line is JSON, and all votes are in flight together."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(command):
    """The JSON of the benchmark, run as the docs say."""
    _, *arguments = shlex.split(command)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_runs_and_ends_in_json():
    result = run("python benchmarks/judge_concurrency.py" + " --turns 3 --votes 2 --delay 0.05")
    assert list(result) == ["judge_seconds", "sequential_seconds", "max_in_flight"]
    assert result["max_in_flight"] == 3 * 2
    assert result["judge_seconds"] > 0
    assert result["sequential_seconds"] > 0


def test_the_turns_of_a_trajectory_are_judged_at_once():
    result = run("python benchmarks/judge_concurrency.py --trajectory --turns 8 --votes 1 --delay 0.5")
    assert result["max_in_flight"] == 8
    assert result["judge_seconds"] < result["sequential_seconds"] / 2
