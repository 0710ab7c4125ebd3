"""Prefix sharing where PyTorch shards the weights (FSDP2). accelerate does so on accelerators only, so without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("sharded_ranks.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What both processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", SCRIPT, folder],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


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
