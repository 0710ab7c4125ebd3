"""Runs that several tests share: each is done once, and one scenario that does not end takes no other with it."""

import json

import pytest
from rank_runs import RUNS, TRAINED, Run


@pytest.fixture
def cut_short(tmp_path) -> Run:
    """A run whose second process was ended in the middle of the second scenario."""
    for rank, ended in enumerate((2, 1)):
        lines = [json.dumps({"rank": rank, "losses": [i]}) for i in range(ended)]
        (tmp_path / f"rank{rank}.jsonl").write_text("\n".join([*lines, '{"rank": ']))
    (tmp_path / "stderr0").write_text("rank 1 met its end")
    return Run("zero1", tmp_path)


def test_scenarios_before_the_one_that_did_not_end_are_there(cut_short):
    assert cut_short[TRAINED[0]] == [{"rank": rank, "losses": [0]} for rank in range(2)]
    with pytest.raises(AssertionError, match=r"did not end\.\nrank 1 met its end"):
        cut_short[TRAINED[1]]


def test_nothing_is_there_where_a_process_never_began(tmp_path):
    (tmp_path / "rank0.jsonl").write_text("{}\n")
    (tmp_path / "stderr0").write_text("no such module")
    with pytest.raises(AssertionError, match="no such module"):
        Run("zero1", tmp_path)[TRAINED[0]]


def test_no_scenario_is_run_twice():
    assert {config: len(names) for config, names in RUNS.items()} == {c: len(set(names)) for c, names in RUNS.items()}


def test_what_was_run_is_not_run_again(run_once, tmp_path):
    calls = []

    def fails(folder):
        calls.append(folder)
        (folder / "left").write_text("something")
        raise RuntimeError("ended early")

    name = f"test-{tmp_path.name}"
    with pytest.raises(RuntimeError, match="ended early"):
        run_once(name, fails)
    folder = run_once(name, fails)
    assert calls == [folder]
    assert (folder / "left").read_text() == "something"
