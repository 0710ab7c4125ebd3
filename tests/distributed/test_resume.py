"""Killed in the middle of a step and gone on: the same rows in the same order, the same weights, the same average."""

import json
from pathlib import Path

import pytest
from launch_ranks import run_script

SCRIPT = Path(__file__).with_name("resume_ranks.py")
KILLED_IN = 2


@pytest.mark.parametrize(
    ("processes", "engine", "teacher"),
    [
        (1, None, "ema"),
        pytest.param(2, None, "ema", marks=pytest.mark.slow),
        pytest.param(2, "zero2", "ema", marks=pytest.mark.slow),
        pytest.param(2, "zero3", "frozen", marks=pytest.mark.slow),
        pytest.param(2, "zero3", "ema", marks=pytest.mark.slow),
        pytest.param(2, "fsdp2", "frozen", marks=pytest.mark.slow),
        pytest.param(2, "fsdp2", "ema", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path, processes, engine, teacher):
    codes = [
        run_script(SCRIPT, [str(tmp_path), mode, teacher], tmp_path, processes, engine)
        for mode in ("whole", "killed", "resumed")
    ]
    assert [bool(code) for code in codes] == [False, True, False], (tmp_path / "stderr0").read_text()[-3000:]
    assert not list(tmp_path.glob("killed*.json"))
    for rank in range(processes):
        whole, resumed = (json.loads((tmp_path / f"{mode}{rank}.json").read_text()) for mode in ("whole", "resumed"))
        assert resumed["rows"] == whole["rows"][KILLED_IN:]
        rows = [text for step in whole["rows"] for text in set(step)]
        assert len(rows) == len(set(rows))
        assert resumed["losses"] == pytest.approx(whole["losses"][KILLED_IN:], abs=1e-5)
        assert any(resumed["losses"])
        for kind in ("weights", "teacher") if teacher == "ema" else ("weights",):
            for name, sums in whole[kind].items():
                assert resumed[kind][name] == pytest.approx(sums, abs=1e-5), (kind, name)
