"""Prefix sharing where PyTorch shards the weights (FSDP2). accelerate does so on accelerators only, so without it."""

import pytest
from launch_ranks import launch_script


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What both processes found."""
    return launch_script("sharded_ranks.py", tmp_path_factory.mktemp("ranks"))


def test_one_rank_shares_prompts_and_the_other_cannot(ranks):
    first, second = ranks
    assert max(first["differences"].values()) < 1e-5
    assert first["differences"] == second["differences"]
    assert first["shared_tokens"] < 0.5 * first["tokens"]
    assert second["shared_tokens"] >= second["tokens"]


def test_one_rank_scores_a_trajectory_and_the_other_a_turn(ranks):
    first, second = ranks
    assert first["score_passes"] == second["score_passes"] > 4
    assert max(rank["score_difference"] for rank in ranks) < 1e-5
    assert [rank["scored"] for rank in ranks] == [[2 * (9 + 1 + 4 + 14)] * 2, [9] * 2]
    assert first["shared_scored_tokens"] < 0.5 * first["scored_tokens"]
    # One token for each pass that only the other rank needs.
    assert second["shared_scored_tokens"] == second["scored_tokens"] + second["score_passes"] - 1
