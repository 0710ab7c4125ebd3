"""A real vLLM engine samples for the trainer, in this process or on a server, through TRL's own code."""

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from vllm_server import PYTHON, _serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-3
"""Nats, in float32."""
SCRIPT = Path(__file__).with_name("engine_rollouts.py")


@pytest.fixture
def generating_server(smollm2, tmp_path):
    """A server as TRL wants it."""
    options = ("--logprobs-mode", "processed_logprobs", "--max-num-seqs", "8")
    with _serving(smollm2, tmp_path, *options, env={"VLLM_SERVER_DEV_MODE": "1"}) as server:
        server.start()
        server.wait()
        yield server


def run(mode: str, folder: Path, *arguments: str) -> tuple[dict, str]:
    """What a training found, and what it printed."""
    if not PYTHON.exists():
        pytest.skip("there is no vLLM: `make vllm-env` makes an environment for it, `make test-vllm` runs these tests")
    command = [str(PYTHON), str(SCRIPT), sysconfig.get_path("purelib"), mode, str(folder), *arguments]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    env = {**os.environ, **quiet, "VLLM_CPU_KVCACHE_SPACE": "1", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(Path(folder, "found.json").read_text()), done.stdout + done.stderr


def logged(found: dict, key: str) -> list[float]:
    return [entry[key] for entry in found["log"] if key in entry]


def test_an_engine_in_this_process_follows_the_policy(smollm2, tmp_path):
    found, printed = run("colocate", tmp_path, str(smollm2))
    assert f"generates: {smollm2} (vLLM, in this process)\n" in printed
    assert "judges: the policy as it is now, by the engine that generates\n" in printed
    assert "teaches: the initial weights\n" in printed
    gaps = logged(found, "sampling/sampling_logp_difference/max")
    print(f"sampling/sampling_logp_difference/max: {gaps}")
    assert len(gaps) == 3
    assert max(gaps) < TOLERANCE
    assert logged(found, "hint/accepted") == [1.0] * 3
    assert all(logged(found, "loss"))
    assert logged(found, "feedback/failed/judge_timeout") == [0.0] * 3
    by_engine, by_transformers = found["answers"]
    assert by_engine == by_transformers != ""
    # The policy has moved by more than that, so that old weights in the engine would have shown.
    assert all(norm > 1 for norm in logged(found, "grad_norm"))


def test_a_server_generates_judges_and_teaches(generating_server, smollm2, tmp_path):
    url = generating_server.base_url
    found, printed = run("server", tmp_path, str(smollm2), url)
    assert f"generates: {smollm2} (vLLM at {url.removesuffix('/v1')})\n" in printed
    for role in ("judges", "teaches"):
        assert f"{role}: smollm2 at {url}, which also generates: the policy as it is now\n" in printed
    assert "such a teacher drifts" in printed
    assert logged(found, "sampling/sampling_logp_difference/max")[0] < TOLERANCE
    assert logged(found, "teacher/server_gap")[0] < TOLERANCE
    assert logged(found, "hint/accepted") == [1.0]
    assert any(logged(found, "loss"))
    (rows,) = found["completion_ids"]
    assert len({tuple(row) for row in rows}) == len(rows)
