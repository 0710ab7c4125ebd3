"""The benchmark of the losses' memory, at a small size: all losses run, agree, and the last line is JSON."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the resident set is measured on Linux")
def test_runs_and_ends_in_json():
    _, script = shlex.split("python benchmarks/loss_memory.py")
    small = ["--rows", "2", "--tokens", "128", "--top", "5", "--hidden", "36", "--vocabulary", "10000"]
    done = subprocess.run(
        [sys.executable, script, *small],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]  # also where losses that should be one number differ
    first, *lines, last = done.stdout.strip().splitlines()
    assert first == "2 completions of 128 tokens, hidden size 36, vocabulary 10000"
    table = {
        name: float(mib)
        for name, mib in re.findall(r"^ *(\w+): +(\d+) MiB +[\d.]+ s  loss [\d.]+$", "\n".join(lines), re.M)
    }
    assert list(table) == ["sdpo_topk", "topk_surrogate", "topk_reverse_kl", "sdpo_full", "full_divergence"]
    # Logits of both models are 2 * 128 * 10,000 numbers of four bytes, or 10 MiB, each.
    assert table["sdpo_topk"] >= 2 * 9
    result = json.loads(last)
    assert list(result) == ["topk_over_sdpo", "full_over_sdpo"]
    ours = max(table["topk_surrogate"], table["topk_reverse_kl"])
    assert result["topk_over_sdpo"] == pytest.approx(ours / table["sdpo_topk"], rel=0.1)
    assert result["full_over_sdpo"] == pytest.approx(table["full_divergence"] / table["sdpo_full"], rel=0.1)
