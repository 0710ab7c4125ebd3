"""Batches and versions: no turn is trained twice, whoever claims it, and the published version is the last word."""

import json
import subprocess
import sys

import pytest
from live_traffic import assistant, chat, ready_turn, record, user

from trl_openclaw import Verdict, Vote
from trl_openclaw.errors import StoreError, UnknownTurnError
from trl_openclaw.live.records import TokenScores
from trl_openclaw.live.store import Store


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store.db")


def ids(batch):
    return [turn.turn_id for turn in batch.turns]


def test_a_batch_has_exactly_as_many_turns_the_oldest_first(store):
    turns = [ready_turn(store).turn_id for _ in range(5)]
    ready_turn(store, user="bob")
    record(store)
    assert store.ready_count("default", 0) == 5
    assert store.claim("default", 6, 0) is None
    assert store.ready_count("default", 0) == 5
    batch = store.claim("default", 3, 0)
    assert ids(batch) == turns[:3]
    assert (batch.user, {turn.state for turn in batch.turns}) == ("default", {"claimed"})
    assert {turn.use.batch_id for turn in batch.turns} == {batch.batch_id}
    assert store.claim("default", 3, 0) is None
    assert ids(store.claim("default", 2, 0)) == turns[3:]
    assert store.ready_count("default", 0) == 0


def test_released_turns_are_free_again_and_others_never(store):
    turn = ready_turn(store).turn_id
    first = store.claim("default", 1, 0)
    store.end_batch(first.batch_id, "released")
    assert store.show(None, turn).use is None
    second = store.claim("default", 1, 0)
    assert ids(second) == [turn]
    assert second.batch_id != first.batch_id
    store.end_batch(second.batch_id, "trained", "v000001")
    store.end_batch(second.batch_id, "trained", "v000001")
    assert store.claim("default", 1, 0) is None
    with pytest.raises(StoreError, match="was trained, so it cannot be released"):
        store.end_batch(second.batch_id, "released")
    with pytest.raises(StoreError, match="was released"):
        store.end_batch(first.batch_id, "trained", "v000001")
    store.end_batch(second.batch_id, "rejected", "v000001")
    use = store.show(None, turn).use
    assert (use.batch_id, use.outcome, use.version) == (second.batch_id, "rejected", "v000001")
    with pytest.raises(StoreError, match="was rejected"):
        store.end_batch(second.batch_id, "trained", "v000001")
    assert store.claim("default", 1, 0) is None
    with pytest.raises(UnknownTurnError, match="no batch"):
        store.end_batch("none", "trained")


def test_settled_turns_are_not_looked_at_again_and_late_answers_are_not_missed(store):
    for _ in range(2):
        ready_turn(store)
    others = [record(store).turn_id for _ in range(3)]
    batch = store.claim("default", 2, 0)
    assert store.ready_count("default", 0) == 0
    assert store._settled["default"] == 0
    store.end_batch(batch.batch_id, "trained")
    assert store.ready_count("default", 0) == 0
    assert store._settled["default"] == 2
    store.add_feedback("default", others[2], 1, None, "a")
    store.add_feedback("default", others[0], 1, None, "b")
    assert ids(store.claim("default", 2, 0)) == [others[0], others[2]]
    store.add_feedback("default", others[1], 1, None, "c")
    assert ids(store.claim("default", 1, 0)) == [others[1]]
    for open_batch in store.open_batches("default"):
        store.end_batch(open_batch.batch_id, "released")
    assert store.ready_count("default", 0) == 3
    assert ids(store.claim("default", 3, 0)) == others


def test_what_a_checkpoint_holds_is_trained_and_the_rest_is_released(store):
    turns = [ready_turn(store).turn_id for _ in range(4)]
    ready_turn(store, user="bob")
    batches = [store.claim("default", 1, 0) for _ in range(3)]
    theirs = store.claim("bob", 1, 0)
    assert [batch.batch_id for batch in store.open_batches("default")] == [batch.batch_id for batch in batches]
    store.end_batch(batches[0].batch_id, "trained", "v000001")
    finished = {batches[0].batch_id: "v000001", batches[1].batch_id: "v000002", "of another store": "v000009"}
    assert store.reconcile("default", finished) == 1
    assert store.reconcile("default", finished) == 0
    assert [store.show(None, turn).state for turn in turns] == ["trained", "trained", "ready", "ready"]
    assert store.show(None, turns[1]).use.version == "v000002"
    assert store.open_batches("default") == []
    assert [batch.batch_id for batch in store.open_batches("bob")] == [theirs.batch_id]


def folder(store, name):
    path = store.path.parent / name
    path.mkdir()
    return str(path)


def publish(store, *names):
    for name in names:
        store.add_version("default", name, store.published_version("default"), folder(store, name))
        store.publish("default", name)


def test_turns_of_old_versions_expire(store):
    base = ready_turn(store).turn_id
    publish(store, "v000001")
    first = ready_turn(store, model_version="v000001").turn_id
    publish(store, "v000002")
    open_one = record(store, model_version="base").turn_id
    assert [store.show(None, turn).lag for turn in (base, first)] == [2, 1]
    assert [store.ready_count("default", lag) for lag in (0, 1, 2)] == [0, 1, 2]
    assert store.claim("default", 2, 1) is None  # asks for more than there are, and lets the too old ones go
    assert [store.show(None, turn).state for turn in (base, first, open_one)] == ["expired", "ready", "expired"]
    assert store.ready_count("default", 9) == 1
    assert ids(store.claim("default", 1, 1)) == [first]


def test_a_version_that_is_published_again_is_no_longer_old(store):
    publish(store, "v000001")
    turn = ready_turn(store, model_version="v000001").turn_id
    publish(store, "v000002")
    late = ready_turn(store, model_version="v000002").turn_id
    assert store.roll_back("default") == "v000001"
    assert [store.show(None, name).lag for name in (turn, late)] == [0, 1]


def test_publishing_on_the_condition_of_what_answers(store):
    publish(store, "v000001", "v000002")
    store.roll_back("default")
    store.add_version("default", "v000003", "v000002", folder(store, "v000003"))
    assert not store.publish("default", "v000003", if_published="v000002")
    assert store.published_version("default") == "v000001"
    assert store.publish("default", "v000003", if_published="v000001")
    assert not store.publish("default", "v000003", if_published="v000003")
    assert [event.event for event in store.versions("default")[2].events] == ["published"]


def load_failed(store, *names):
    for name in names:
        store.add_version_event("default", name, "load_failed", {"error": "rank 64 is too large"})


def test_a_version_that_cannot_be_loaded_is_published_no_longer(store):
    publish(store, "v000001")
    turn = ready_turn(store, model_version="v000001").turn_id
    for name in ("v000002", "v000003", "v000004", "v000005", "v000006"):
        publish(store, name)
        load_failed(store, name)
    assert store.published_version("default") == "v000001"
    assert [info.version for info in store.versions("default") if info.published] == ["v000001"]
    assert store.show(None, turn).lag == 0
    assert store.ready_count("default", 0) == 1
    assert store.publish("default", "v000003")  # it is news: somebody has mended the engine
    assert store.published_version("default") == "v000003"
    assert store.show(None, turn).lag == 1


def test_a_version_that_was_rolled_back_does_not_come_back_by_itself(store):
    publish(store, "v000001", "v000002")
    store.roll_back("default")
    load_failed(store, "v000001")
    assert store.published_version("default") == "base"


def test_rolling_back_passes_over_what_cannot_be_loaded(store):
    publish(store, "v000001", "v000002")
    store.add_version("default", "v000003", "v000002", folder(store, "v000003"))
    store.publish("default", "v000003")
    load_failed(store, "v000002")
    assert store.published_version("default") == "v000003"
    assert store.roll_back("default") == "v000001"


def test_rolling_back_passes_over_what_was_removed_and_refuses_it(store):
    publish(store, "v000001", "v000002", "v000003")
    (store.path.parent / "v000002").rmdir()
    with pytest.raises(StoreError, match=r"The adapter of version 'v000002' was removed: .*v000002 is not there"):
        store.roll_back("default", "v000002")
    assert store.published_version("default") == "v000003"
    assert store.roll_back("default") == "v000001"
    (store.path.parent / "v000001").rmdir()
    assert store.publish("default", "v000003")
    assert store.roll_back("default") == "base"


def test_a_store_of_the_first_schema_learns_what_was_undone(store):
    publish(store, "v000001", "v000002")
    load_failed(store, "v000002")
    turn = ready_turn(store, model_version="v000001").turn_id
    with store._write() as connection:
        (sql,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'turn_states'").fetchone()
        connection.execute("DROP VIEW turn_states")
        connection.execute("DROP VIEW publications")
        connection.execute(sql.replace("FROM publications p", "FROM version_events p"))
        connection.execute("PRAGMA user_version = 1")
    assert store.show(None, turn).lag == 2
    again = Store(store.path)
    assert again.show(None, turn).lag == 0
    assert again.published_version("default") == "v000001"


def test_versions_and_what_happened_to_them(store):
    assert store.published_version("default") == "base"
    assert store.next_version("default") == "v000001"
    store.add_version("default", "v000001", "base", "/a")
    store.add_version("default", "v000001", "base", "/a")
    with pytest.raises(StoreError, match="another version"):
        store.add_version("default", "v000001", "base", "/b")
    assert store.published_version("default") == "base"
    store.add_version_event("default", "v000001", "checked", {"accuracy": 0.5})
    assert store.publish("default", "v000001")
    assert not store.publish("default", "v000001")
    store.add_version("default", "v000002", "v000001", "/b")
    store.add_version_event("default", "v000002", "rejected", {"why": "worse"})
    (first, second) = store.versions("default")
    assert (first.parent, first.path, first.published) == ("base", "/a", True)
    assert [(event.event, event.detail) for event in first.events] == [
        ("checked", {"accuracy": 0.5}),
        ("published", {}),
    ]
    assert [event.event for event in second.events] == ["rejected"]
    assert store.next_version("default") == "v000003"
    assert store.versions("bob") == []
    for act in (store.publish, store.roll_back):
        with pytest.raises(StoreError, match=r"no version 'v000009'|no published version"):
            act("default", "v000009")
        with pytest.raises(StoreError, match=r"no version 'v000001'|no published version"):
            act("bob", "v000001")


def test_rolling_back_goes_to_what_a_version_was_trained_from(store):
    publish(store, "v000001")
    store.add_version("default", "v000002", "v000001", "/never published")
    store.add_version("default", "v000003", "v000002", folder(store, "v000003"))
    store.publish("default", "v000003")
    assert store.roll_back("default") == "v000001"
    assert store.published_version("default") == "v000001"
    assert store.roll_back("default", "v000003") == "v000003"
    with pytest.raises(StoreError, match="answers already"):
        store.roll_back("default", "v000003")
    assert store.roll_back("default", "base") == "base"
    with pytest.raises(StoreError, match="nothing to roll back"):
        store.roll_back("default")
    events = [event.event for event in store.versions("default")[2].events]
    assert events == ["published", "rolled_back", "published", "rolled_back"]


def test_token_scores_come_back(store):
    turn = ready_turn(store)
    batch = store.claim("default", 1, 0)
    assert store.token_scores(turn.turn_id) is None
    scores = TokenScores([-0.5, -1.0], [float("nan"), -0.25], [0.0, 0.75], [[["a", 0.5, 0.25]], []], [" wa", "ter"])
    store.add_token_scores(batch.batch_id, {turn.turn_id: scores})
    store.add_token_scores(batch.batch_id, {turn.turn_id: scores})
    found = store.token_scores(turn.turn_id, "default")
    assert (found.student, found.advantages) == ((-0.5, -1.0), (0.0, 0.75))
    assert found.teacher == pytest.approx((float("nan"), -0.25), nan_ok=True)
    assert (found.prefers, found.tokens) == ([[["a", 0.5, 0.25]], []], [" wa", "ter"])
    with pytest.raises(UnknownTurnError):
        store.token_scores(turn.turn_id, "bob")


def test_token_scores_go_with_what_they_were_made_of(store):
    """A teacher saw hints made of what followed: the scores tell of it."""
    scores = TokenScores([0.0], [0.0], [0.0], [[["secret", 0.5, 0.25]]])
    ids, tellers = [], []
    for name in ("before", "meanwhile", "kept"):
        asked = [user(f"What about {name}?")]
        turn_id, _ = chat(store, asked, f"This is {name}.")
        teller, _ = chat(store, [*asked, assistant(f"This is {name}."), user(f"No {name}.")], "Sorry.")
        store.add_verdict(turn_id, Verdict.from_votes([Vote(score=-1)]))
        ids.append(turn_id)
        tellers.append(teller)
    batch = store.claim("default", 3, 0)
    followed = {turn.turn_id: turn.next_state for turn in batch.turns}
    store.delete("default", turn_id=tellers[1])
    store.add_token_scores(batch.batch_id, dict.fromkeys(ids, scores), on=followed)
    assert [store.token_scores(turn_id) is None for turn_id in ids] == [False, True, False]
    store.delete("default", turn_id=tellers[0])
    assert [store.token_scores(turn_id) is None for turn_id in ids] == [True, True, False]
    store.add_token_scores(batch.batch_id, dict.fromkeys(ids, scores), on=dict.fromkeys(ids))
    assert [store.token_scores(turn_id) is None for turn_id in ids] == [False, False, False]


def test_scores_are_those_of_the_later_batch_also_when_the_clock_went_back(tmp_path):
    now = iter(range(1000, 0, -1))
    store = Store(tmp_path / "store.db", clock=lambda: float(next(now)))
    turn = ready_turn(store)
    for place in range(2):
        batch = store.claim("default", 1, 0)
        store.add_token_scores(batch.batch_id, {turn.turn_id: TokenScores([0.0], [0.0], [float(place)], [[]], ["a"])})
        store.end_batch(batch.batch_id, "released")
    assert store.token_scores(turn.turn_id).advantages == (1.0,)
    assert store.scored_batches(batch.turns) == {turn.turn_id: batch.batch_id}


def backlog(path, turns):
    """A store with so many turns that are ready, all alike, of the last of two versions."""
    store = Store(path / f"{turns}.db")
    publish(store, f"v{turns:06d}", f"v{turns + 1:06d}")
    ready_turn(store, model_version=f"v{turns + 1:06d}")
    with store._write() as connection:
        for table, own in (
            ("turns", {"number": "i", "turn_id": "'turn ' || i"}),
            ("verdicts", {"number": "i", "turn": "i"}),
        ):
            names = [row["name"] for row in connection.execute(f"PRAGMA table_info({table})")]
            connection.execute(
                f"WITH RECURSIVE more (i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM more WHERE i < ?) "
                f"INSERT INTO {table} SELECT {', '.join(own.get(name, name) for name in names)} FROM {table}, more",
                (turns,),
            )
    return store


def steps(store, act, only_writing=False):
    """How many hundreds of SQLite's steps something takes; of those, if wanted, only where others have to wait."""
    taken, writing = 0, False

    def count():
        nonlocal taken
        taken += writing or not only_writing

    def trace(statement):
        nonlocal writing
        writing = statement == "BEGIN IMMEDIATE" or (writing and statement != "COMMIT")

    store._connection.set_progress_handler(count, 100)
    store._connection.set_trace_callback(trace)
    act()
    store._connection.set_progress_handler(None, 0)
    store._connection.set_trace_callback(None)
    return taken


def test_a_backlog_does_not_make_claiming_slower_nor_others_wait_longer(tmp_path):
    few, many = backlog(tmp_path, 1000), backlog(tmp_path, 8000)
    assert [store.ready_count("default", 1) for store in (few, many)] == [1000, 8000]
    cost = [steps(store, lambda store=store: store.claim("default", 8, 2)) for store in (few, many)]
    wait = [steps(store, lambda store=store: store.claim("default", 8, 0), only_writing=True) for store in (few, many)]
    assert cost[1] <= 1.5 * cost[0]
    assert 0 < wait[1] <= 1.5 * wait[0]  # here turns that are too old have to be looked for


def test_ready_turns_are_counted_again_only_when_something_was_written(tmp_path):
    store = backlog(tmp_path, 1000)
    other = Store(store.path)
    first = steps(store, lambda: store.ready_count("default", 0))
    assert 20 * steps(store, lambda: store.ready_count("default", 0)) <= first
    for writer in (store, other, other, store):
        before = store.ready_count("default", 0)
        ready_turn(writer, model_version="v001001")
        assert store.ready_count("default", 0) == before + 1
    assert store.ready_count("nobody", 0) == 0
    store.close()
    other.claim("default", 4, 0)
    assert store.ready_count("default", 0) == 1000
    publish(other, "v001002")
    assert [store.ready_count("default", lag) for lag in (0, 1)] == [0, 1000]


def test_what_is_ready_is_what_is_in_this_state_and_not_too_old(store):
    publish(store, *(f"v{i:06d}" for i in range(1, 6)))
    store.roll_back("default")
    for version in ("base", *(f"v{i:06d}" for i in range(1, 7)), "imported"):
        ready_turn(store, model_version=version)
        record(store, model_version=version)
    for max_lag in range(8):
        fits = [turn.turn_id for turn in store.all_turns() if turn.state == "ready" and turn.lag <= max_lag]
        assert store.ready_count("default", max_lag) == len(fits) > 0
    assert len({turn.lag for turn in store.all_turns()}) > 3


CLAIMER = """
import json, random, sys, time
from pathlib import Path
from trl_openclaw.live.store import Store

store = Store(sys.argv[1])
print("ready", flush=True)
while not Path(sys.argv[2]).exists():
    time.sleep(0.001)
claimed = []
while (batch := store.claim("default", 4, 0)) is not None:
    claimed.append([turn.turn_id for turn in batch.turns])
    time.sleep(random.random() / 200)
print(json.dumps(claimed), flush=True)
"""


def test_two_processes_never_claim_the_same_turn(store, tmp_path):
    turns = {ready_turn(store).turn_id for _ in range(162)}
    go = tmp_path / "go"
    command = [sys.executable, "-c", CLAIMER, str(store.path), str(go)]
    claimers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for claimer in claimers:
            assert claimer.stdout.readline() == "ready\n"
        go.touch()
        claimed = [json.loads(claimer.communicate(timeout=120)[0]) for claimer in claimers]
    finally:
        for claimer in claimers:
            claimer.kill()
            claimer.wait()
    assert all(claimed), "both must have come in between the other's claims"
    taken = [turn_id for batches in claimed for batch in batches for turn_id in batch]
    assert len(taken) == len(set(taken)) == 160
    assert set(taken) < turns
    assert store.counts() == {"claimed": 160, "ready": 2}
    assert len(store.open_batches("default")) == 40
