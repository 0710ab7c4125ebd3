"""TRL's loop of tool calls in two real processes, of which one has more calls to make than the other."""

import json

import pytest
from launch_ranks import SCRIPT, run_script


def test_a_process_without_calls_samples_along(tmp_path):
    """Else the one that goes on would wait for it, or take its next collective for an answer."""
    run_script(SCRIPT.with_name("tool_ranks.py"), [str(tmp_path)], tmp_path, 2, None)
    found = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in found), (tmp_path / "stderr0").read_text()[-3000:]
    first, second = (json.loads(path.read_text()) for path in found)
    assert first["rows"] == [4, 4, 4] * 2
    assert second["rows"] == [4, 1, 1] * 2
    assert first["weights"] == pytest.approx(second["weights"], rel=1e-12)
    assert [entry["turns/mean"] for entry in first["log"]] == [2.0, 2.0]
