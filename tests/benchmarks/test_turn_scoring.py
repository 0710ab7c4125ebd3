"""The benchmark of a trajectory's turns, on a tiny model: all ways score the same tokens, and the last line is JSON."""

import math
import re

import pytest
import torch
from benchmark_script import run_script, save_tiny_model

from benchmarks import turn_scoring

SIZES = {"prompt": 30, "turns": 3, "tokens": 6, "tool": 8, "hint": 4, "rounds": 1}
SMALL = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


def test_runs_and_ends_in_json(tmp_path):
    small = "--prompt 200 --turns 3 --tokens 60 --tool 60 --hint 20 --rounds 1"
    out, result = run_script("python benchmarks/turn_scoring.py", save_tiny_model(tmp_path), small)
    assert list(result) == ["turns8_over_full_pass", "max_abs_diff"]
    assert result["turns8_over_full_pass"] > 0
    assert 0 < result["max_abs_diff"] < 1e-4  # not the same passes, yet the same numbers
    assert "\n3 turns of a trajectory of 515 tokens, scored in 4 passes\n" in f"\n{out}"
    ratios = dict(re.findall(r"^ *([\w ]+): .* of one pass, ([\d.]+) in tokens$", out, re.M))
    in_full = sum(200 + 125 * turn + 20 + 65 for turn in range(3))
    assert ratios == {"shared": "1.45", "in full": f"{in_full / 515:.2f}", "one pass": "1.00"}


class Sizes:
    prompt, turns, tokens, tool, hint = (SIZES[name] for name in ("prompt", "turns", "tokens", "tool", "hint"))


def test_each_hint_stands_in_front_of_its_turn_alone():
    rows, whole = turn_scoring.make_rows(Sizes, 1000)
    assert [len(row.prompt_ids) for row in rows] == [30 + 4 + 5, 30 + 19 + 4 + 5, 30 + 2 * 19 + 4 + 5]
    trajectory = [*whole.prompt_ids, *whole.completion_ids]
    assert len(whole.prompt_ids) == 30
    for turn, row in enumerate(rows):
        hint = 30 + 19 * turn
        assert row.prompt_ids[:hint] == trajectory[:hint]
        without_hint = [*row.prompt_ids[hint + 4 :], *row.completion_ids]
        assert without_hint == trajectory[hint : hint + 5 + 6]
    assert len(trajectory) == hint + 5 + 6


def run_main(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("sys.argv", ["turn_scoring.py", "--model", save_tiny_model(tmp_path), *SMALL])
    turn_scoring.main()


def test_the_ratio_is_over_one_pass(monkeypatch, capsys, tmp_path):
    clock = iter([0, 3, 10, 18, 20, 22]).__next__  # 3 s shared, 8 s in full, 2 s for one pass
    monkeypatch.setattr(turn_scoring, "now", lambda: float(clock()))
    run_main(monkeypatch, tmp_path)
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith('{"turns8_over_full_pass": 1.5, ')


@pytest.mark.parametrize("difference", [1e-3, float("nan")])
def test_other_numbers_are_an_error(monkeypatch, tmp_path, difference):
    monkeypatch.setattr(turn_scoring, "largest_difference", lambda *args: difference)
    with pytest.raises(SystemExit, match="differ by"):
        run_main(monkeypatch, tmp_path)


def test_the_largest_difference():
    nan = float("nan")
    a, b = torch.tensor([[-1.0, nan], [-2.0, -3.0]]), torch.tensor([[-1.25, nan], [-2.0, -2.5]])
    assert turn_scoring.largest_difference(a, b) == 0.5
    assert math.isnan(turn_scoring.largest_difference(a, torch.tensor([[-1.0, 0.0], [-2.0, -3.0]])))
