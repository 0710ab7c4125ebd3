"""The benchmark of a step, on a tiny model: it runs, and its last line is the JSON that others read."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tiny import tiny_llama, tiny_tokenizer

ROOT = Path(__file__).parents[2]


def test_runs_and_ends_in_json(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    _, script = shlex.split("python benchmarks/step_overhead.py")
    small = f"--model {tmp_path} --completions 2 --tokens 4 --steps 1 --rounds 1".split()
    done = subprocess.run(
        [sys.executable, script, *small],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.strip().splitlines()
    result = json.loads(lines[-1])
    assert list(result) == ["opd_over_grpo"]
    seconds = {name: float(value) for name, value in re.findall(r"^ *(\w+)(?: step)?: +([-\d.]+) s", done.stdout, re.M)}
    assert list(seconds) == ["grpo", "opd", "generate", "judge", "teacher", "train"]
    assert 0 < result["opd_over_grpo"] < 100
    # The parts are those of the OPD step; each is printed to a hundredth of a second.
    assert abs(sum(list(seconds.values())[2:]) - seconds["opd"]) < 0.03
    assert lines[0] == "2 completions of 4 tokens, median of 1 steps each"
