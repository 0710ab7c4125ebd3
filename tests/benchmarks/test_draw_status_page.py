"""The pictures of the status page: drawn from a store filled by hand, and from a real one that stays as it is."""

from pathlib import Path

import pytest
from benchmark_script import run_plain_script
from matplotlib import image

from benchmarks.draw_status_page import SCALE, SIZE, coloured_session, copy_store
from benchmarks.headless import NoBrowserError, start_chromium
from benchmarks.status_store import USER, add_turn, fill
from trl_openclaw.live.store import Store

COMMAND = "python benchmarks/draw_status_page.py --folder docs/images"
NAMES = ["live-status.png", "live-status-turn.png"]


@pytest.fixture(scope="module")
def _browser():
    try:
        start_chromium().quit()
    except NoBrowserError as error:
        pytest.skip(f"THE PICTURES OF THE STATUS PAGE ARE NOT DRAWN: {error}.")


def check(folder: Path, last: dict) -> None:
    """Both pictures are there, and of the right size."""
    assert last["files"] == [str(folder / name) for name in NAMES]
    whole, turn = (image.imread(folder / name) for name in NAMES)
    assert whole.shape[:2] == (SIZE[1] * SCALE, SIZE[0] * SCALE)
    assert 200 < turn.shape[0] < whole.shape[0]
    assert 600 < turn.shape[1] < whole.shape[1]
    assert min(whole.std(), turn.std()) > 0.04


@pytest.mark.usefixtures("_browser")
def test_runs_and_ends_in_json(tmp_path):
    check(tmp_path, run_plain_script(COMMAND, f"--folder {tmp_path}")[1])


@pytest.mark.usefixtures("_browser")
def test_draws_a_real_store_and_leaves_it_alone(tmp_path):
    live_dir, folder = tmp_path / "live", tmp_path / "drawn"
    store = Store(live_dir / "store.db")
    fill(store, 1e9)
    before = store.versions(USER), store.counts(USER)
    check(folder, run_plain_script(COMMAND, f"--folder {folder} --live_dir {live_dir}")[1])
    assert (store.versions(USER), store.counts(USER)) == before


def test_a_copy_holds_what_is_still_in_the_log(tmp_path):
    store = Store(tmp_path / "store.db")
    add_turn(store, "a", [{"role": "user", "content": "Why?"}], "So.", session="s")
    copy_store(tmp_path / "store.db", tmp_path / "copy.db")
    assert [turn.session_id for turn in Store(tmp_path / "copy.db").turns(USER)] == ["s"]
    with pytest.raises(SystemExit, match="There is no store"):
        copy_store(tmp_path / "nothing.db", tmp_path / "other.db")


def test_the_conversation_that_was_trained_last_is_shown(tmp_path):
    store = Store(tmp_path / "store.db")
    with pytest.raises(SystemExit, match="nothing was trained"):
        coloured_session(store, USER)
    fill(store, 1e9)
    turns = store.turns(USER, coloured_session(store, USER))
    assert len(turns) > 1
    assert any(store.token_scores(turn.turn_id) for turn in turns)
