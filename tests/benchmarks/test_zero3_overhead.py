"""The benchmark of a step under ZeRO-3, on a tiny model: it runs, and its last line is the JSON that others read."""

import re

import pytest
from benchmark_script import run_script, save_tiny_model

pytest.importorskip("deepspeed")


@pytest.mark.slow
def test_runs_and_ends_in_json(tmp_path):
    small = "--completions 2 --tokens 4 --steps 1 --rounds 1"
    out, result = run_script("python benchmarks/zero3_overhead.py", save_tiny_model(tmp_path), small)
    assert re.findall(r"^ *(\w+) step: +[\d.]+ s", out, re.M) == ["grpo", "opd"]
    assert list(result) == ["opd_over_grpo_zero3"]
    assert result["opd_over_grpo_zero3"] > 0
