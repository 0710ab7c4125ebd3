"""The benchmark of shared prefixes, on a tiny model: every way scores the same rows, and the last line is JSON."""

import re

from benchmark_script import run_script, save_tiny_model

from benchmarks import multi_hint


def test_runs_and_ends_in_json(tmp_path):
    small = "--prompt 300 --hint 12 --tokens 5 --completions 2 --hints 2 --rounds 1"
    out, result = run_script("python benchmarks/multi_hint.py", save_tiny_model(tmp_path), small)
    assert list(result) == ["speedup", "max_abs_diff"]
    assert result["speedup"] > 0
    assert 0 < result["max_abs_diff"] < 1e-4  # not the same passes, yet the same numbers
    assert "\n4 rows of 317 tokens: 2 completions under 2 hints\n" in f"\n{out}"
    assert re.findall(r"^ *([\w ]+): +[\d.]+ s", out, re.M) == ["shared", "in full", "row by row"]


def test_each_hint_is_shared_by_all_completions():
    class Sizes:
        prompt, hint, tokens, completions, hints = 40, 6, 7, 4, 3

    rows = multi_hint.make_rows(Sizes, 1000)
    assert len(rows) == 12
    assert {len(row.prompt_ids) for row in rows} == {46}
    assert len({tuple(row.prompt_ids[:35]) for row in rows}) == 1
    assert len({tuple(row.prompt_ids[-5:]) for row in rows}) == 1
    assert len({tuple(row.prompt_ids) for row in rows}) == 3
    assert len({tuple(row.completion_ids) for row in rows}) == 4
    assert len({(tuple(row.prompt_ids), tuple(row.completion_ids)) for row in rows}) == 12


def test_the_speedup_is_over_the_faster_way_without_sharing(monkeypatch, capsys, tmp_path):
    clock = iter([0, 1, 10, 15, 20, 28]).__next__  # 1 s shared, 5 s in full, 8 s row by row
    monkeypatch.setattr(multi_hint, "now", lambda: float(clock()))
    sizes = {"prompt": 40, "hint": 4, "tokens": 3, "completions": 2, "hints": 2, "rounds": 1}
    small = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr("sys.argv", ["multi_hint.py", "--model", save_tiny_model(tmp_path), *small])
    multi_hint.main()
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith('{"speedup": 5.0, ')
