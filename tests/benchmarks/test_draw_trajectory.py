"""The picture of a trajectory: made from a real one, and of the one that tells most."""

import pytest
from benchmark_script import run_script
from matplotlib import image
from tiny import tiny_llama, tiny_tokenizer

from benchmarks.draw_trajectory import WIDTH, DrawnTurn, _rows, draw, telling

SMALL = "--batches 1 --per_device_train_batch_size 2 --num_generations 2 --max_completion_length 12 --disable_tqdm true"


def turn(score=None, hint=None, tokens=("a", "b\n"), advantages=(0.5, -1.5)) -> DrawnTurn:
    return DrawnTurn(list(tokens), list(advantages), score, score, hint, "1 of 3 tests passed.\nIt got $6.")


@pytest.mark.slow
def test_runs_and_ends_in_json(tmp_path):
    options = f"{SMALL} --folder {tmp_path / 'drawn'}"
    tiny_llama(max_position_embeddings=8192).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    command = "python benchmarks/draw_trajectory.py --model runs/agent --folder docs/images"
    _, turns = run_script(command, str(tmp_path), options)
    assert image.imread(tmp_path / "drawn" / "agents.png").shape[1] > 200
    (only,) = turns
    assert len(only["tokens"]) == len(only["advantages"]) > 0
    assert (only["score"], only["reward"]) == (-1, -1.0)
    assert only["hint"] == "Call `run_tests` with the whole code before you answer."
    assert only["followed"] == "The tests were never run."


def test_a_repair_tells_more_than_a_success_and_that_more_than_nothing():
    repaired = [turn(-1, "Add one."), turn(1)]
    in_vain = [turn(-1, "Add one."), turn(-1, "Add one.")]
    at_once = [turn(1), turn(1)]
    assert max([at_once, in_vain, repaired, [turn(-1, "Call.")]], key=telling) == repaired
    assert max([at_once, in_vain], key=telling) == in_vain
    assert max([at_once, [turn()]], key=telling) == at_once


def test_every_token_has_a_place_in_the_picture(tmp_path):
    long = turn(-1, "Use `$x`. " * 30, tokens=["word "] * 50, advantages=[0.1] * 50)
    rows = _rows(0, long)
    drawn = [text for row in rows for text, kind in row if isinstance(kind, float)]
    assert drawn == ["word "] * 50
    assert max(sum(len(text) for text, _ in row) for row in rows) <= WIDTH
    draw([long, turn(1)], tmp_path / "picture.png")
    assert image.imread(tmp_path / "picture.png").shape[1] > 200
