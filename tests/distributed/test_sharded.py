"""Prefix sharing where PyTorch shards the weights (FSDP2). accelerate does so on accelerators only, so without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("sharded_ranks.py")
ROOT = Path(__file__).parents[2]


def test_one_rank_shares_prompts_and_the_other_cannot(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", SCRIPT, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert max(first["differences"].values()) < 1e-5
    assert first["differences"] == second["differences"]
    assert first["shared_tokens"] < 0.5 * first["tokens"]
    assert second["shared_tokens"] >= second["tokens"]
