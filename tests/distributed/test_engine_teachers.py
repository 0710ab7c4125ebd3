"""Each kind of teacher, and rows that differ from process to process, under engines that spread models."""

import pytest
from launch_ranks import assert_like_one, launch_all, whole_batch

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

AVERAGES = ["average", "average of an adapter"]

UNEVEN = [
    "one rank without hints",
    "uneven lengths",
    "judge broken on one rank",
    "no hints at all",
    "one rank samples equal prompts",
]

SPREAD = ["zero3", "fsdp2"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, dict]:
    """What one process finds, scenario by scenario."""
    names = [*TEACHERS, *AVERAGES]
    found = launch_all(names, tmp_path_factory.mktemp("alone"), 1, "single")
    return {name: whole_batch(ranks) for name, ranks in zip(names, found, strict=True)}


@pytest.fixture(scope="module", params=SPREAD)
def spread(request, tmp_path_factory) -> dict[str, tuple[dict, ...]]:
    """What two processes find that have a part of the weights each, scenario by scenario."""
    names = [*TEACHERS, *AVERAGES, *UNEVEN]
    found = launch_all(names, tmp_path_factory.mktemp(request.param), engine=request.param)
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("name", TEACHERS)
def test_a_teacher_that_is_spread_teaches_like_one_that_is_whole(alone, spread, name):
    assert_like_one(name, spread[name], alone[name])


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_of_spread_weights_is_refused_on_all_ranks(spread, name):
    errors = {rank["error"] for rank in spread[name]}
    assert len(errors) == 1
    assert "`teacher='ema'` does not work with weights that are spread over processes" in errors.pop()


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


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["multi_gpu", "zero2"])
def test_a_teacher_that_each_process_holds_teaches_like_one(alone, tmp_path, engine):
    """The average, too: it follows weights that every process has."""
    names = [*TEACHERS, *AVERAGES]
    for name, ranks in zip(names, launch_all(names, tmp_path, engine=engine), strict=True):
        assert_like_one(name, ranks, alone[name])
