"""The benchmark of growth: tables, picture and JSON from a tiny model, and points that do not fit are named."""

import argparse
import subprocess

import pytest
from benchmark_script import run_script, save_tiny_model

from benchmarks import growth
from benchmarks.common import Shape
from benchmarks.growth import Point


@pytest.mark.slow
def test_runs_and_ends_in_json(tmp_path):
    small = f"--quick --only completions --folder {tmp_path}/a"
    out, points = run_script("python benchmarks/growth.py --folder docs/images", save_tiny_model(tmp_path), small)
    assert (tmp_path / "a" / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert [(p["who"], p["completions"]) for p in points] == [("ours", 1), ("ours", 2), ("stock", 1), ("stock", 2)]
    for point in points:
        assert point["axis"] == "completions"
        if (point["who"], point["completions"]) == ("stock", 1):
            assert (point["seconds"], point["peak_gib"]) == (None, None)
            assert point["left_out"].startswith("refused")
        else:
            assert point["left_out"] == ""
            assert 0 < point["seconds"] < 60
            assert 0.1 < point["peak_gib"] < 8
    assert "| completions G | ours, s (floor) |" in out
    assert "Left out: stock at 1 (refused: stock GRPO needs two completions to compare)." in out


@pytest.mark.slow
def test_a_step_that_gets_no_memory_is_left_out(tmp_path):
    args = argparse.Namespace(model=save_tiny_model(tmp_path), memory=0.2, minutes=4)
    point = growth.try_point("ours", growth.QUICK, args)
    assert (point.seconds, point.left_out) == (None, "more than 0.2 GiB")


ARGS = argparse.Namespace(model="x", memory=16, minutes=10)


def answers(monkeypatch, answer):
    """Let `answer` measure the points; returns what was asked."""
    asked = []

    def measure(script, point, timeout):
        asked.append((point["kind"], point["shape"]["prompt"], point["shape"]["hints"]))
        return answer(point)

    monkeypatch.setattr(growth, "in_fresh_process", measure)
    return asked


def test_what_is_larger_than_what_did_not_fit_is_not_tried(monkeypatch):
    def answer(point):
        if point["kind"] == "grpo" and point["shape"]["prompt"] > 256:
            raise RuntimeError("exit status 1: RuntimeError: ... can't allocate memory: you tried to allocate 9 bytes")
        return {"seconds": 1.0, "peak_gib": 2.0}

    asked = answers(monkeypatch, answer)
    points = growth.run_axis("prompt", (256, 512, 1024), growth.BASE, ARGS, {})
    assert [kind for kind, *_ in asked] == ["combine"] * 3 + ["grpo"] * 2
    assert [p.left_out for p in points] == ["", "", "", "", "more than 16 GiB", "more than 16 GiB"]


def test_what_takes_too_long_is_left_out_and_other_failures_are_not_hidden(monkeypatch):
    def late(point):
        raise subprocess.TimeoutExpired("growth.py", 600)

    answers(monkeypatch, late)
    assert growth.try_point("ours", growth.BASE, ARGS).left_out == "more than 10 minutes"

    def broken(point):
        raise RuntimeError("exit status 1: UserWarning: pinned memory won't be used\nKeyError: 'hints'")

    answers(monkeypatch, broken)
    with pytest.raises(RuntimeError, match="KeyError"):
        growth.try_point("ours", growth.BASE, ARGS)


def test_no_point_is_measured_twice(monkeypatch):
    asked = answers(monkeypatch, lambda point: {"seconds": 1.0, "peak_gib": 2.0})
    known = {}
    growth.run_axis("prompt", (512, 1024), growth.BASE, ARGS, known)
    points = growth.run_axis("hints", (1, 3), growth.BASE, ARGS, known)
    assert asked == [
        ("combine", 512, 3),
        ("combine", 1024, 3),
        ("grpo", 512, 3),
        ("grpo", 1024, 3),
        ("combine", 1024, 1),
    ]
    assert [(p.who, p.shape.hints) for p in points] == [("ours", 1), ("ours", 3), ("stock", 3), ("stock", 3)]


def test_the_floor_by_hand():
    shape = Shape(prompt=100, completions=4, tokens=10, hints=3)
    assert growth.tokens_run("stock", shape) == 4 * (100 + 10) * (1 + 3)  # sampled, and trained forward and backward
    sampled, trained = 100 + 40, 3 * (100 + 40)
    taught = 100 + 3 * growth.HINT_TOKENS + 3 * 40
    assert growth.tokens_run("ours", shape) == sampled + trained + taught
    seconds, gib = growth.floors(Point("ours", shape), 0.5, 2**28)
    assert (seconds, gib) == (0.5 * (sampled + trained + taught), 5.0)
    assert growth.floors(Point("stock", shape), 0.5, 2**28)[1] == 4.0


def test_the_table_has_ratios_beside_their_floors(capsys):
    shapes = [Shape(prompt=100, completions=4, tokens=10), Shape(prompt=200, completions=4, tokens=10)]
    ours = [Point("ours", shape, 3.0, 1.5) for shape in shapes]
    stock = [Point("stock", shapes[0], 6.0, 4.0), Point("stock", shapes[1], left_out="more than 16 GiB")]
    growth.print_table("prompt", (100, 200), [*ours, *stock], (0.001, 1))
    lines = capsys.readouterr().out.splitlines()
    low, high = growth.tokens_run("ours", shapes[0]), growth.tokens_run("stock", shapes[0])
    assert (
        lines[3] == f"| 100 | 3.0 ({low / 1000:.1f}) | 6.0 ({high / 1000:.1f}) | 0.50 ({low / high:.2f}) | 1.5 | 4.0 |"
    )
    assert lines[4].startswith("| 200 | 3.0 (")
    assert lines[4].endswith("| 1.5 | – |")
    assert lines[-1] == "Left out: stock at 200 (more than 16 GiB)."
