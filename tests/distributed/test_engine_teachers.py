"""Each kind of teacher, and rows that differ from process to process, under engines that spread models."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from launch_ranks import assert_like_one, launch_all, whole_batch
from safetensors.torch import load_file
from tiny import tiny_llama

from trl_openclaw.teachers.ema import STATE_FILE

TEACHERS = [
    "teacher loaded again",
    "teacher is the reference",
    "another model",
    "another model's path",
    "live teacher, initial reference",
    "topk_surrogate by prompt",
    "full_divergence by prompt",
]
"""The objectives read the teacher's head; a teacher that is the adapter switched off is in `test_engines.py`."""

AVERAGES = ["average", "average loaded again", "average of an adapter", "average of a head, too"]
"""Of a model in memory, of one from a path (which ZeRO-3 spreads as it is loaded), and of what LoRA trains."""

UNEVEN = [
    "one rank without hints",
    "uneven lengths",
    "judge broken on one rank",
    "no hints at all",
    "one rank samples equal prompts",
]

SPREAD = ["zero3", "fsdp2"]


class Run(NamedTuple):
    """What processes found, scenario by scenario, and where they left their averages."""

    found: dict[str, tuple[dict, ...]]
    folder: Path


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Run:
    """One process with all of the batch."""
    return run_of([*TEACHERS, *AVERAGES], tmp_path_factory.mktemp("alone"), 1, "single")


@pytest.fixture(scope="module", params=SPREAD)
def spread(request, tmp_path_factory) -> Run:
    """Two processes that have a part of the weights each."""
    return run_of([*TEACHERS, *AVERAGES, *UNEVEN], tmp_path_factory.mktemp(request.param), 2, request.param)


def run_of(names: list[str], folder: Path, processes: int, engine: str) -> Run:
    return Run(dict(zip(names, launch_all(names, folder, processes, engine), strict=True)), folder)


def assert_same(name: str, run: Run, alone: Run) -> None:
    """Losses, weights and, where the teacher is one, the average are those of one process."""
    assert_like_one(name, run.found[name], whole_batch(alone.found[name]))
    if name in AVERAGES:
        found, expected = (load_file(folder / name / STATE_FILE) for folder in (run.folder, alone.folder))
        assert found.keys() == expected.keys()
        for weight, tensor in expected.items():
            torch.testing.assert_close(found[weight], tensor, atol=1e-5, rtol=0, msg=f"{name}: {weight}")


@pytest.mark.parametrize("name", [*TEACHERS, *AVERAGES])
def test_a_teacher_that_is_spread_teaches_like_one_that_is_whole(alone, spread, name):
    assert_same(name, spread, alone)


def test_an_average_moves(alone):
    """By far more than what the engines may differ by."""
    before = tiny_llama().state_dict()
    average = load_file(alone.folder / "average" / STATE_FILE)
    assert all((average[name] - tensor).abs().max() > 1e-4 for name, tensor in before.items())


@pytest.mark.parametrize("name", UNEVEN)
def test_ranks_stay_in_step_whatever_their_rows(spread, name):
    first, second = spread.found[name]
    assert first["error"] is second["error"] is None
    assert len(first["losses"]) == len(second["losses"]) == 2
    assert first["weights_by_name"] == second["weights_by_name"]
    assert first["teacher_forwards"] == second["teacher_forwards"]


def test_what_ranks_have_nothing_to_learn_from_adds_nothing(spread):
    found = spread.found
    assert any(found["one rank without hints"][0]["losses"])
    assert found["one rank without hints"][1]["losses"] == [0.0, 0.0]
    assert [rank["losses"] for rank in found["no hints at all"]] == [[0.0, 0.0]] * 2
    logs = [rank["log"] for rank in found["judge broken on one rank"]]
    assert [[entry["feedback/failed/judge_failed"] for entry in log] for log in logs] == [[0.5, 0.5]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["multi_gpu", "zero2"])
def test_a_teacher_that_each_process_holds_teaches_like_one(alone, tmp_path, engine):
    """The average, too: it follows weights that every process has."""
    run = run_of([*TEACHERS, *AVERAGES], tmp_path, 2, engine)
    for name in run.found:
        assert_same(name, run, alone)
