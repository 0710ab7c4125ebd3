"""A learner of two processes: one talks to the store, both take the same steps, which are those of one alone."""

from pathlib import Path

import pytest
from launch_ranks import found_in, run_script
from learner_harness import USER, open_store, record, states

SCRIPT = Path(__file__).with_name("live_ranks.py")


def run(folder, processes: int, teacher: str) -> tuple[list[dict], list[str], dict]:
    """What each process found, the states of the turns, and the scores of their tokens."""
    folder.mkdir()
    (folder / "live").mkdir()
    store = open_store(folder / "live")
    ids = record(store, range(14))
    record(store, range(14, 19), held_out=True)
    status = run_script(SCRIPT, [str(folder), teacher], folder, processes, None)
    assert status == 0, (folder / "stderr0").read_text()[-3000:]
    assert store.published_version(USER) == "v000003"
    assert store.open_batches(USER) == []
    scores = [store.token_scores(turn_id) for turn_id in ids]
    return found_in(folder, processes), states(store, ids), scores


@pytest.mark.timeout(600)
@pytest.mark.parametrize("teacher", ["frozen", pytest.param("ema", marks=pytest.mark.slow)])
def test_two_processes_learn_as_one_does(tmp_path, teacher):
    (alone,), expected, scores = run(tmp_path / "one", 1, teacher)
    (first, second), found, others = run(tmp_path / "two", 2, teacher)
    assert found == expected == ["trained"] * 4 + ["rejected"] * 4 + ["trained"] * 4 + ["ready"] * 2
    assert [first["has_store"], second["has_store"]] == [True, False]
    assert first["weights"] == pytest.approx(second["weights"], abs=1e-9)
    assert first["weights"] == pytest.approx(alone["weights"], rel=1e-4)
    assert first["version"] == second["version"] == alone["version"] == "v000003"
    assert first["checks"] == second["checks"]
    for one, other in zip(first["checks"], alone["checks"], strict=True):
        assert one.keys() == other.keys()
        for name, (outcome, numbers) in one.items():
            assert outcome == other[name][0]
            assert numbers == pytest.approx(other[name][1], abs=1e-3), name
    for one, other in zip(first["logs"], alone["logs"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)
        assert one == pytest.approx(other, abs=0.05)  # means over other micro-batches
    for one, other in zip(others, scores, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.advantages == pytest.approx(other.advantages, abs=1e-4)
            assert one.tokens == other.tokens
    for rank in (first, second, alone):
        assert "recorded from the model 'tiny', not from 'another'" in rank["error"]
