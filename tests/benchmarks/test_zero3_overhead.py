"""The benchmark of a step under ZeRO-3, on a tiny model: it runs, and its last line is the JSON that others read."""

import argparse
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
import yaml
from benchmark_script import ROOT, run_script, save_tiny_model

from benchmarks import zero3_overhead

pytest.importorskip("deepspeed")


@pytest.mark.slow
def test_runs_and_ends_in_json(tmp_path):
    small = "--completions 2 --tokens 4 --steps 1 --rounds 1"
    out, result = run_script("python benchmarks/zero3_overhead.py", save_tiny_model(tmp_path), small)
    steps = re.findall(r"^ *(\w+) step: +([\d.]+) s", out, re.M)
    assert [kind for kind, _ in steps] == ["grpo", "opd"]
    assert list(result) == ["opd_over_grpo_zero3"]
    grpo, opd = (float(seconds) for _, seconds in steps)
    assert (opd - 0.01) / (grpo + 0.01) < result["opd_over_grpo_zero3"] < (opd + 0.01) / max(grpo - 0.01, 1e-9)


def test_the_processes_run_under_zero3(monkeypatch):
    started = []

    def run(command, **kwargs):
        started.append((command, kwargs["env"]))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(zero3_overhead.subprocess, "run", run)
    with pytest.raises(SystemExit):
        zero3_overhead.launch([], argparse.Namespace(processes=3, model="tiny"))
    ((command, env),) = started
    given = dict(pairwise(command))
    config = yaml.safe_load((ROOT / given["--config_file"]).read_text())
    assert (config["distributed_type"], config["deepspeed_config"]["zero_stage"]) == ("DEEPSPEED", 3)
    assert (given["--num_processes"], given["--model"]) == ("3", "tiny")
    assert zero3_overhead.RANK in env
