"""Prefix sharing under DeepSpeed, which spreads gradients (ZeRO-2) and weights (ZeRO-3) over two real processes."""

import pytest
from launch_ranks import assert_shared_on_one_rank, assert_turns_of_two_ranks, launch

pytest.importorskip("deepspeed")


@pytest.mark.parametrize(
    ("engine", "scenario"),
    [
        ("zero2", "one rank shares"),
        ("zero3", "one rank shares"),
        pytest.param("zero3", "one rank shares an adapter", marks=pytest.mark.slow),
        pytest.param("zero3", "one rank shares a whole vocabulary", marks=pytest.mark.slow),
    ],
)
def test_one_rank_shares_prompts_and_the_other_cannot(tmp_path, engine, scenario):
    """Gradients are reduced in the order in which they come, so both ranks must have them in the same one."""
    whole = launch(f"{scenario}, in whole rows", tmp_path / "whole", engine=engine)
    shared = launch(scenario, tmp_path / "shared", engine=engine)
    assert shared[0]["engine"] == "DeepSpeedEngine"
    assert_shared_on_one_rank(shared, whole)


def test_ranks_whose_rows_have_different_numbers_of_turns(tmp_path):
    assert_turns_of_two_ranks(*launch("more turns on rank zero", tmp_path, engine="zero3"))
