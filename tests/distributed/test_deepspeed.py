"""Prefix sharing under DeepSpeed, which spreads gradients (ZeRO-2) and weights (ZeRO-3) over two real processes."""

import pytest
from launch_ranks import assert_shared_on_one_rank, assert_turns_of_two_ranks

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("engine", "scenario"),
    [
        ("zero2", "one rank shares"),
        ("zero3", "one rank shares"),
        ("zero3", "one rank shares an adapter"),
        ("zero3", "one rank shares a whole vocabulary"),
    ],
)
def test_one_rank_shares_prompts_and_the_other_cannot(ranks_under, engine, scenario):
    """Gradients are reduced in the order in which they come, so both ranks must have them in the same one."""
    found = ranks_under(engine)
    shared, whole = found[scenario], found[f"{scenario}, in whole rows"]
    assert shared[0]["engine"] == "DeepSpeedEngine"
    assert_shared_on_one_rank(shared, whole)


def test_ranks_whose_rows_have_different_numbers_of_turns(ranks_under):
    assert_turns_of_two_ranks(*ranks_under("zero3")["more turns on rank zero"])
