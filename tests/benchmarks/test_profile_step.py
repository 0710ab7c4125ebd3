"""The profile of a step, on a tiny model: parts that add up, for both trainers, and the last line is JSON."""

import re
from pathlib import Path

import pytest
from benchmark_script import run_script, save_tiny_model

from trl_openclaw.trainer.step_profile import PARTS


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the resident set is measured on Linux")
@pytest.mark.slow
def test_runs_and_ends_in_json(tmp_path):
    small = "--prompt 100 --completions 2 --tokens 4 --steps 1"
    out, result = run_script("python benchmarks/profile_step.py", save_tiny_model(tmp_path), small)
    assert (
        "2 completions of 4 tokens of a prompt of 100 tokens; ours is `combine`, in full with `prefix_sharing=False`\n"
        in out
    )
    rows = dict(re.findall(r"^\| ([\w ]+) \| (.*) \|$", out, re.M))
    assert list(rows) == ["part", *(part.replace("_", " ") for part in PARTS), "total"]
    assert list(result) == ["ours", "in full", "stock"]
    for who, parts in result.items():
        seconds = parts["seconds"]
        assert list(seconds) == [*PARTS, "total"]
        assert sum(seconds[part] for part in PARTS) == pytest.approx(seconds["total"])
        assert (seconds["teacher"] > 0) == (seconds["judge"] > 0) == (who != "stock")
        assert min(seconds[part] for part in ("generate", "tokenize", "student", "optimizer")) > 0
        assert parts["peak_gib"]["total"] == max(parts["peak_gib"].values())
        assert 0.1 < parts["peak_gib"]["student"] < 8
    student = result["ours"]["seconds"]["student"], result["ours"]["seconds"]["total"]
    cells = rows["student"].split(" | ")
    assert float(cells[0]) == pytest.approx(student[0], abs=0.006)
    assert float(cells[1].rstrip("%")) == pytest.approx(100 * student[0] / student[1], abs=0.06)
    assert rows["teacher"].endswith("|  |  | ")  # stock has none
