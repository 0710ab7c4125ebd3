"""Two real processes with a teacher on a server: each asks for its own rows, and both hear of what one meets."""

import json
import os
import subprocess
import sys
from pathlib import Path

from stub_chat_server import Reply
from stub_teacher_server import StubTeacherServer

SCRIPT = Path(__file__).with_name("server_ranks.py")
ROOT = Path(__file__).parents[2]


class FailsForRankOne(StubTeacherServer):
    """Gives rank 1, which it knows by its key, no log-probs."""

    def post(self, path, request, headers):
        if path == "/v1/completions" and "Bearer rank1" in headers.values():
            return Reply(status=500, error="down for rank 1"), {}
        return super().post(path, request, headers)


def launch(server: StubTeacherServer, folder: Path) -> list[dict]:
    """What both processes found."""
    result = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
            *(SCRIPT, folder, server.base_url),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_each_rank_asks_for_its_own_rows_and_one_of_them_checks(tmp_path):
    with StubTeacherServer() as server:
        assert launch(server, tmp_path) == [{"error": None, "steps": 2, "max_length": 511}] * 2
        keys = [headers["authorization"] for headers in server.headers]
    assert keys.count("Bearer rank1") == 2  # a batch each
    assert keys.count("Bearer rank0") == 3  # and the check


def test_both_stop_with_one_message_when_the_server_fails_one(tmp_path):
    with FailsForRankOne() as server:
        first, second = launch(server, tmp_path)
    assert first == second
    assert "down for rank 1" in first["error"]
    assert first["steps"] == 0


def test_both_are_refused_when_the_server_has_another_model(tmp_path):
    with StubTeacherServer(models={"other": None}) as server:
        first, second = launch(server, tmp_path)
    assert first == second
    assert "does not serve 'stub-model'" in first["error"]
