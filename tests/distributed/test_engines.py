"""Each engine of `accelerate_configs`, in two real processes over gloo: what one process finds on the same batch."""

import pytest
from launch_ranks import assert_like_one, launch_all, whole_batch

TRAINED = [
    "by prompt",
    "an adapter by prompt",
    "an adapter and a head by prompt",
    "combine by prompt",
    "combine with an adapter by prompt",
]
"""Distillation alone and with rewards, of all weights, of an adapter, and of a head beside it (`modules_to_save`)."""

ENGINES = {
    "multi_gpu": "DistributedDataParallel",
    "zero2": "DeepSpeedEngine",
    "zero3": "DeepSpeedEngine",
    "fsdp2": "FSDP",
}
"""A config, and what the trainer's model is wrapped in."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[dict]:
    """What one process finds in each of the scenarios, with all of the batch."""
    return [whole_batch(ranks) for ranks in launch_all(TRAINED, tmp_path_factory.mktemp("alone"), 1, "single")]


def assert_trained_like_one(found_by_scenario: list, alone: list[dict], engine: str) -> None:
    for name, ranks, expected in zip(TRAINED, found_by_scenario, alone, strict=True):
        assert ranks[0]["engine"].startswith(engine)
        assert_like_one(name, ranks, expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes_train_like_one(alone, tmp_path, engine):
    assert_trained_like_one(launch_all(TRAINED, tmp_path, engine=engine), alone, ENGINES[engine])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero1", "zero3_offload"])
def test_the_other_stages_train_like_one_process(alone, tmp_path, engine):
    assert_trained_like_one(launch_all(TRAINED, tmp_path, engine=engine), alone, "DeepSpeedEngine")


@pytest.mark.slow
def test_two_machines_train_like_one_process(alone, tmp_path):
    """Two launchers, each of which starts its own process, as on two machines."""
    found = launch_all(TRAINED, tmp_path, engine="multi_node", machines=2)
    assert_trained_like_one(found, alone, "DeepSpeedEngine")
