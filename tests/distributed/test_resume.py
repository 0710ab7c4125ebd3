"""Killed in the middle of a step and gone on: the same rows in the same order, the same weights, the same average."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from launch_ranks import SCRIPTS, run_script

KILLED_IN = 2

RUNS = {
    "one process": (1, None, ["ema"]),
    "two copies": (2, None, ["ema"]),
    "zero2": (2, "zero2", ["ema"]),
    "zero3": (2, "zero3", ["frozen", "ema"]),
    "fsdp2": (2, "fsdp2", ["frozen", "ema"]),
}
"""How many processes, under which config, and the kinds of teacher."""


@pytest.fixture
def ran(run_once) -> Callable[[str], Path]:
    """Lets processes train to the end, be killed, and go on, with each kind of teacher; gives what they left.

    They take seconds to start, so they do one after another what nobody kills.
    """

    def run_all(name: str, folder: Path) -> None:
        processes, engine, teachers = RUNS[name]
        whole, (killed, *others), resumed = (
            [f"{mode}-{teacher}" for teacher in teachers] for mode in ("whole", "killed", "resumed")
        )
        for runs in ([*whole, killed], *([other] for other in others), resumed):
            is_killed = bool(run_script(SCRIPTS / "resume_ranks.py", [str(folder), *runs], folder, processes, engine))
            assert is_killed == (runs is not resumed), (folder / "stderr0").read_text()[-3000:]

    return lambda name: run_once(f"resume-{name}", partial(run_all, name))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "teacher"),
    [
        pytest.param(name, teacher, marks=[] if name == "one process" else pytest.mark.slow)
        for name, (_, _, teachers) in RUNS.items()
        for teacher in teachers
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(ran, name, teacher):
    folder = ran(name)
    assert not list(folder.glob("killed*.json"))
    for rank in range(RUNS[name][0]):
        whole, resumed = (
            json.loads((folder / f"{mode}-{teacher}{rank}.json").read_text()) for mode in ("whole", "resumed")
        )
        assert resumed["rows"] == whole["rows"][KILLED_IN:]
        rows = [text for step in whole["rows"] for text in set(step)]
        assert len(rows) == len(set(rows))
        assert resumed["losses"] == pytest.approx(whole["losses"][KILLED_IN:], abs=1e-5)
        assert any(resumed["losses"])
        for kind in ("weights", "teacher") if teacher == "ema" else ("weights",):
            for weight, sums in whole[kind].items():
                assert resumed[kind][weight] == pytest.approx(sums, abs=1e-5), (kind, weight)
