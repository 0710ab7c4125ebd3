"""The benchmark of a step, on a tiny model: it runs, and its last line is the JSON that others read."""

import re
import sys
from types import SimpleNamespace

import pytest
from benchmark_script import run_script, save_tiny_model

from benchmarks import step_overhead
from benchmarks.common import Shape, StepTimer
from trl_openclaw.trainer.step_profile import PARTS

SMALL = "--completions 4 --tokens 4 --prompt 160 --steps 1 --rounds 1 --long-steps 1 --long-rounds 1 --rows 2"


def test_runs_and_ends_in_json(tmp_path):
    out, result = run_script("python benchmarks/step_overhead.py", save_tiny_model(tmp_path), SMALL)
    shapes = dict(
        zip(("short", "long", "long_g8"), re.split(r"^(?=\d+ completions)", out, flags=re.M)[1:], strict=True)
    )
    assert shapes["short"].startswith("4 completions of 4 tokens of a short prompt, median of 1 steps each\n")
    assert shapes["long"].startswith("2 completions of 4 tokens of a prompt of 160 tokens, median")
    assert shapes["long_g8"].startswith(
        "4 completions of 4 tokens of a prompt of 160 tokens, 2 in a micro-batch, median"
    )
    seconds = {
        (name, kind): float(value)
        for name, text in shapes.items()
        for kind, value in re.findall(r"^ *(\w+) step: +([\d.]+) s", text, re.M)
    }
    assert set(seconds) == {(name, kind) for name, *kinds in step_overhead.COMPARISONS.values() for kind in kinds}
    assert list(result) == list(step_overhead.COMPARISONS)
    for ratio, (name, one, other) in step_overhead.COMPARISONS.items():  # of times printed to a hundredth of a second
        low = (seconds[name, one] - 0.005) / (seconds[name, other] + 0.005)
        high = (seconds[name, one] + 0.005) / max(seconds[name, other] - 0.005, 1e-3)
        assert low - 0.001 <= result[ratio] <= high + 0.001
    split = {name: float(s) for name, s in re.findall(r"^ *(\w+): +([\d.]+) s", shapes["short"], re.M)}
    assert list(split) == list(PARTS)
    assert sum(split.values()) == pytest.approx(seconds["short", "opd"], abs=0.06)


def test_a_subset_runs_only_what_it_needs(monkeypatch, capsys):
    ran = []

    def measured(shape, kinds, model, rounds, steps):
        ran.append((shape, kinds, rounds, steps))
        return {kind: SimpleNamespace(seconds=[{"grpo": 2.0, "opd": 3.0, "sdpo": 4.0}[kind]]) for kind in kinds}

    monkeypatch.setattr(step_overhead, "measure", measured)
    options = ["--only", "opd_over_sdpo", "opd_long_g8_over_grpo", "--model", "x", "--rows", "2"]
    monkeypatch.setattr(sys, "argv", ["step_overhead.py", *options])
    step_overhead.main()
    assert ran == [
        (Shape(0, 8, 64), ["sdpo", "opd"], 3, 3),
        (Shape(1024, 8, 64, rows=2), ["grpo", "opd"], 2, 2),
    ]
    assert capsys.readouterr().out == '{"opd_long_g8_over_grpo": 1.5, "opd_over_sdpo": 0.75}\n'


def test_trainers_take_turns(monkeypatch, capsys):
    ran = []

    def step(kind, model, shape, steps, timer):
        ran.append(kind)
        timer.seconds += [float(len(ran))] * steps

    monkeypatch.setattr(step_overhead, "run_steps", step)
    timers = step_overhead.measure(Shape(), ["grpo", "sdpo"], "x", 2, 3)
    assert ran == ["grpo", "sdpo", "grpo", "sdpo"]
    assert timers["grpo"].seconds == [1.0] * 3 + [3.0] * 3
    assert "grpo step:   2.00 s (1.00 to 3.00)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ({"completions/min_length": 3.0}, "completions of 3 tokens, not 4"),
        ({"completions/max_length": 5.0}, "completions of 5 tokens, not 4"),
        ({"hint/accepted": 0.5}, "taught only some"),
        ({"hint/candidates": 2.0}, "compared 2 hints, not 3"),
    ],
)
def test_a_step_that_did_other_work_stops_the_comparison(log, message):
    timer = StepTimer()
    good = {"completions/min_length": 4.0, "completions/max_length": 4.0, "hint/accepted": 1.0, "hint/candidates": 3.0}
    timer.logs = [good]
    timer.check("combine", Shape(tokens=4))
    timer.logs = [good, good | log]
    with pytest.raises(SystemExit, match=message):
        timer.check("combine", Shape(tokens=4))
