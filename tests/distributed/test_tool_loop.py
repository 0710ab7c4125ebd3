"""TRL's loop of tool calls in two real processes, of which one has more calls to make than the other."""

import pytest
from launch_ranks import launch_script


def test_a_process_without_calls_samples_along(tmp_path):
    """Else the one that goes on would wait for it, or take its next collective for an answer."""
    first, second = launch_script("tool_ranks.py", tmp_path)
    assert first["rows"] == [4, 4, 4] * 2
    assert second["rows"] == [4, 1, 1] * 2
    assert first["weights"] == pytest.approx(second["weights"], rel=1e-12)
    assert [entry["turns/mean"] for entry in first["log"]] == [2.0, 2.0]
