"""The benchmark of a teacher on a server: it runs, and its last line is JSON."""

import re

import pytest
from benchmark_script import run_plain_script


def test_runs_and_ends_in_json():
    printed, result = run_plain_script(
        "python benchmarks/server_teacher.py --topk 4 --token-ms 0.1",
        "--rows 6 --prompt 60 --completion 10 --rounds 1 --token-ms 1",
    )
    seconds, alone = map(float, re.search(r"420 tokens: ([\d.]+) s, of the server alone ([\d.]+) s", printed).groups())
    assert alone >= 0.42
    assert list(result) == ["added_over_server"]
    assert result["added_over_server"] + 1 == pytest.approx(seconds / alone, rel=0.03)
