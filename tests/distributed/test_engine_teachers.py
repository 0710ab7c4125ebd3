"""Each kind of teacher, and rows that differ from process to process, under engines that spread models."""

import pytest
import torch
from launch_ranks import assert_like_one
from rank_runs import AVERAGES, TEACHERS, UNEVEN, Run
from safetensors.torch import load_file
from tiny import tiny_llama

from trl_openclaw.teachers.ema import STATE_FILE

pytestmark = pytest.mark.timeout(600)

SPREAD = ["zero3", "fsdp2"]


@pytest.fixture
def alone(ranks_under) -> Run:
    """One process with all of the batch."""
    return ranks_under("single")


@pytest.fixture(params=SPREAD)
def spread(request, ranks_under) -> Run:
    """Two processes that have a part of the weights each."""
    return ranks_under(request.param)


def assert_same(name: str, run: Run, alone: Run) -> None:
    """Losses, weights and, where the teacher is one, the average are those of one process."""
    assert_like_one(name, run[name], alone[name])
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
    first, second = spread[name]
    assert first["error"] is second["error"] is None
    assert len(first["losses"]) == len(second["losses"]) == 2
    assert first["weights_by_name"] == second["weights_by_name"]
    assert first["teacher_forwards"] == second["teacher_forwards"]


def test_what_ranks_have_nothing_to_learn_from_adds_nothing(spread):
    assert any(spread["one rank without hints"][0]["losses"])
    assert spread["one rank without hints"][1]["losses"] == [0.0, 0.0]
    assert [rank["losses"] for rank in spread["no hints at all"]] == [[0.0, 0.0]] * 2
    logs = [rank["log"] for rank in spread["judge broken on one rank"]]
    assert [[entry["feedback/failed/judge_failed"] for entry in log] for log in logs] == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("name", [*TEACHERS, *AVERAGES])
@pytest.mark.parametrize("engine", ["multi_gpu", "zero2"])
def test_a_teacher_that_each_process_holds_teaches_like_one(alone, ranks_under, engine, name):
    """The average, too: it follows weights that every process has."""
    assert_same(name, ranks_under(engine), alone)
