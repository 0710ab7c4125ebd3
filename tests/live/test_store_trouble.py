"""A full disk, a locked file and a clock that jumps: one clear error, or the right order; and nothing lost."""

import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live_traffic import new_turn, ready_turn, record, user

from trl_openclaw import Verdict
from trl_openclaw.errors import StoreBusyError, StoreFullError
from trl_openclaw.live.store import Store


def test_a_store_that_others_hold_says_so_and_can_still_be_read(tmp_path):
    store = Store(tmp_path / "store.db", busy_seconds=0.2)
    turn = record(store)
    holder = sqlite3.connect(store.path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    started = time.monotonic()
    for write in (
        lambda: record(store),
        lambda: store.add_next_state(turn.turn_id, [user("hi")]),
        lambda: store.add_verdict(turn.turn_id, Verdict(1, "positive")),
        lambda: store.opt_out("default"),
    ):
        with pytest.raises(StoreBusyError, match=r"in use by another process for more than 0\.2 s"):
            write()
    assert time.monotonic() - started < 20
    assert store.show(None, turn.turn_id).next_state is None
    other = Store(store.path, busy_seconds=0.2)
    assert other.show(None, turn.turn_id).turn_id == turn.turn_id
    holder.execute("ROLLBACK")
    holder.close()
    assert store.add_next_state(turn.turn_id, [user("hi")])


def test_a_store_waits_for_a_writer_that_is_about_to_end(tmp_path):
    store = Store(tmp_path / "store.db", busy_seconds=30)
    code = (
        "import sqlite3, sys, time\n"
        "c = sqlite3.connect(sys.argv[1], isolation_level=None); c.execute('BEGIN IMMEDIATE')\n"
        "print('held', flush=True); time.sleep(0.5); c.execute('COMMIT')"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(store.path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        record(store)
    assert len(store.turns()) == 1


def test_a_store_of_limited_size_is_full_and_goes_on_when_there_is_room(tmp_path):
    store = Store(tmp_path / "store.db")
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages + 30}")
    kept: list[str] = []

    def fill():
        while True:
            kept.append(record(store, messages=[user("word " * 1000)]).turn_id)

    with pytest.raises(StoreFullError, match="no room is left"):
        fill()
    assert kept
    assert [turn.turn_id for turn in store.all_turns()] == kept
    assert not store._connection.in_transaction
    store._connection.execute("PRAGMA max_page_count = 1000000")
    kept.append(record(store, messages=[user("word " * 1000)]).turn_id)
    assert [turn.turn_id for turn in store.all_turns()] == kept


FILLER = """
import json, resource, sys
sys.path.insert(0, sys.argv[2])
from live_traffic import chat, new_turn, record, user
from trl_openclaw.errors import StoreFullError
from trl_openclaw.live.store import Store

store = Store(sys.argv[1])
kept, failures = [], []
for limit in (300_000, 600_000, resource.RLIM_INFINITY):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        for _ in range(200):
            kept.append(record(store, messages=[user("word " * 1000)]).turn_id)
    except StoreFullError as error:
        failures.append(str(error))
print(json.dumps([kept, failures]))
"""


def test_files_that_may_not_grow_lose_nothing(tmp_path):
    path = tmp_path / "store.db"
    command = [sys.executable, "-c", FILLER, str(path), str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    kept, failures = json.loads(done.stdout)
    assert len(failures) == 2
    assert all("no room is left" in failure for failure in failures)
    store = Store(path)
    assert [turn.turn_id for turn in store.all_turns()] == kept
    assert len(kept) > 200
    assert store._connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def test_a_clock_that_jumps_back_changes_no_order(tmp_path):
    now = iter(range(100_000, 0, -10))
    store = Store(tmp_path / "store.db", clock=lambda: float(next(now)))
    turns = [ready_turn(store).turn_id for _ in range(4)]
    assert [turn.turn_id for turn in store.turns()] == turns[::-1]
    assert store.show(None, turns[0]).created > store.show(None, turns[3]).created
    store.add_verdict(turns[0], Verdict(1, "positive"))
    assert store.show(None, turns[0]).verdict.score == 1
    store.add_feedback("default", turns[1], 1, None, "a")
    store.add_feedback("default", turns[1], -1, None, "b")
    assert store.show(None, turns[1]).verdict.score == -1
    batch = store.claim("default", 2, 0)
    assert [turn.turn_id for turn in batch.turns] == turns[:2]
    second = store.claim("default", 1, 0)
    assert [found.batch_id for found in store.open_batches("default")] == [batch.batch_id, second.batch_id]
    store.end_batch(batch.batch_id, "trained", "v000001")
    store.end_batch(batch.batch_id, "rejected", "v000001")
    assert store.show(None, turns[0]).state == "rejected"
    for name in ("v000001", "v000002"):
        store.add_version("default", name, "base", f"/{name}")
        store.publish("default", name)
    assert store.published_version("default") == "v000002"
    assert store.show(None, turns[3]).lag == 2
    store.opt_out("default", True)
    store.opt_out("default", False)
    assert not store.opted_out("default")
    assert store.show(None, turns[2]).state == "claimed"
    assert store.show(None, turns[3]).state == "ready"


def test_an_error_in_the_middle_undoes_what_came_before(tmp_path):
    store = Store(tmp_path / "store.db")
    turn = record(store)

    def fail():
        with store._write() as connection:
            connection.execute("DELETE FROM turns")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert store.show(None, turn.turn_id) is not None
    record(store, new_turn())
    assert len(store.turns()) == 2
