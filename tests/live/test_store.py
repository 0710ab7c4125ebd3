"""The store: what goes in comes out, once, and everyone sees the same state of a turn."""

import json
import sqlite3
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
from live_traffic import assistant, new_turn, ready_turn, record, turn_ids, user

from trl_openclaw import Verdict, Vote
from trl_openclaw.errors import StoreError, UnknownTurnError
from trl_openclaw.live.canonical import turn_hashes
from trl_openclaw.live.database import from_json, to_json
from trl_openclaw.live.records import TURN_STATES, StoredTurn, TokenScores
from trl_openclaw.live.store import Store


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "live" / "store.db", clock=lambda: 1000.0)


def state(store, turn):
    return store.show(None, turn.turn_id).state


def test_a_turn_comes_back_as_it_was(store):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
    turn = new_turn(
        messages=[user([{"type": "text", "text": "Hé 你好 \ud83d"}]), user(None), {"role": "tool", "content": "\x00"}],
        tools=[{"type": "function", "function": {"name": "look", "parameters": {}}}],
        reply=assistant(None, tool_calls=[call], reasoning_content="hm"),
        parent="chatcmpl-before",
        prompt_ids=(0, 2**31 - 1),
        completion_ids=(1, 2, 3),
        logprobs=(-0.5, -0.0, -1e30),
        sampling={"temperature": 0.7, "seed": 2**70},
    )
    record(store, turn)
    found = store.show("default", turn.turn_id)
    assert {name: value for name, value in asdict(found).items() if name in asdict(turn)} == {
        **asdict(turn),
        "logprobs": pytest.approx(turn.logprobs),
    }
    assert (found.number, found.created, found.state) == (1, 1000.0, "open")


def test_recording_twice_changes_nothing(store):
    turn = record(store)
    again = replace(turn, reply=assistant("Something else."))
    assert store.record_turn(again, turn_hashes(again.messages, again.reply)) is False
    assert store.show(None, turn.turn_id).reply == assistant("Water.")
    assert len(store.turns()) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": (-1.0,)}, "one log-prob"),
        ({"completion_ids": (8, -1)}, "token id"),
        ({"prompt_ids": (2**31,)}, "token id"),
        ({"logprobs": (float("nan"), 0.0)}, "finite"),
        ({"logprobs": (float("-inf"), 0.0)}, "finite"),
        ({"logprobs": (-1e39, 0.0)}, "finite"),
        ({"kind": "other"}, "kind"),
    ],
)
def test_what_is_no_turn_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        new_turn(**changes)


def test_the_first_next_state_stays(store):
    turn = record(store)
    assert store.add_next_state(turn.turn_id, [user("first")], told_by="chatcmpl-x")
    assert not store.add_next_state(turn.turn_id, [user("second")])
    found = store.show(None, turn.turn_id)
    assert (found.next_state, found.next_state_source, found.next_state_told_by) == (
        [user("first")],
        "request",
        "chatcmpl-x",
    )


def test_what_belongs_to_a_turn_that_is_gone_is_dropped(store):
    assert not store.add_next_state("chatcmpl-gone", [user("hi")])
    assert not store.add_verdict("chatcmpl-gone", Verdict(1, "positive"))
    turn = ready_turn(store)
    batch = store.claim("default", 1, 0)
    scores = TokenScores([0.0], [0.0], [0.0])
    store.add_token_scores(batch.batch_id, {"chatcmpl-gone": scores, turn.turn_id: scores})
    assert store.token_scores(turn.turn_id) is not None


def test_verdicts_come_back_with_their_votes(store):
    turn = record(store)
    votes = [
        Vote(score=-1, hint="Be brief.", raw="x"),
        Vote(failure="timeout", hint_failure="too_long"),
        Vote(score=-1),
    ]
    verdict = Verdict.from_votes(votes)
    store.add_verdict(turn.turn_id, verdict)
    found = store.show(None, turn.turn_id).verdict
    assert (found.score, found.outcome, found.hints, found.votes) == (-1, "negative", ("Be brief.",), verdict.votes)
    assert (found.source, found.hint_source, found.created) == ("judge", "judge", 1000.0)


JUDGE = Verdict(-1, "negative", ("Judge's.",))


def judge(store, turn):
    store.add_verdict(turn.turn_id, JUDGE)


def thumb(value, correction=None, key="k"):
    return lambda store, turn: store.add_feedback(turn.user, turn.turn_id, value, correction, key)


def edit(*hints):
    return lambda store, turn: store.edit_hint(turn.user, turn.turn_id, hints)


@pytest.mark.parametrize(
    ("said", "score", "hints", "source", "hint_source"),
    [
        ([judge], -1, ("Judge's.",), "judge", "judge"),
        ([judge, thumb(1)], 1, ("Judge's.",), "feedback", "judge"),
        ([thumb(1), judge], 1, ("Judge's.",), "feedback", "judge"),
        ([thumb(-1, "Mine."), judge], -1, ("Mine.",), "feedback", "feedback"),
        ([thumb(1, None, "a"), thumb(-1, None, "b")], -1, (), "feedback", None),
        ([thumb(-1, "Mine.", "a"), thumb(1, None, "b")], 1, (), "feedback", None),
        ([judge, thumb(-1, "Mine.", "a"), thumb(1, None, "b")], 1, ("Judge's.",), "feedback", "judge"),
        ([thumb(-1, "Mine.", "a"), judge, thumb(-1, "Better.", "b")], -1, ("Better.",), "feedback", "feedback"),
        ([thumb(0)], 0, (), "feedback", None),
        ([judge, edit("Edited.", "  ", "Twice.")], -1, ("Edited.", "Twice."), "judge", "edit"),
        ([judge, edit("Edited."), judge, thumb(1, "Late.")], 1, ("Edited.",), "feedback", "edit"),
        ([judge, edit("Edited."), edit()], -1, (), "judge", None),
        ([edit("Alone.")], None, ("Alone.",), "edit", "edit"),
    ],
)
def test_people_outrank_judges(store, said, score, hints, source, hint_source):
    turn = record(store)
    for say in said:
        say(store, turn)
    found = store.show(None, turn.turn_id).verdict
    assert (found.score, found.hints, found.source, found.hint_source) == (score, hints, source, hint_source)


def test_feedback_counts_once_and_only_for_ones_own_turns(store):
    turn = record(store, user="ann")
    assert store.add_feedback("ann", turn.turn_id, -1, "  Half an emoji \ud83d ", "key")
    assert not store.add_feedback("ann", turn.turn_id, 1, None, "key")
    assert store.show("ann", turn.turn_id).verdict.hints == ("Half an emoji ?",)
    assert state(store, turn) == "ready"
    for owner, turn_id in (("bob", turn.turn_id), ("ann", "chatcmpl-none")):
        with pytest.raises(UnknownTurnError, match="no turn"):
            store.add_feedback(owner, turn_id, 1, None, "other")
    with pytest.raises(ValueError, match="thumb"):
        store.add_feedback("ann", turn.turn_id, 2, None, "other")


def test_states(store):
    seen = {}

    def now(turn, expected):
        seen[expected] = state(store, turn)
        assert seen[expected] == expected

    turn = record(store)
    now(turn, "open")
    store.add_next_state(turn.turn_id, [user("Hm.")])
    now(turn, "answered")
    store.add_verdict(turn.turn_id, Verdict(None, "tied"))
    now(turn, "judged")
    store.add_verdict(turn.turn_id, Verdict(None, "tied", ("Be brief.",)))
    now(turn, "ready")
    store.opt_out("default")
    now(turn, "opted_out")
    store.opt_out("default", False)
    batch = store.claim("default", 1, 0)
    now(turn, "claimed")
    store.end_batch(batch.batch_id, "trained", "v000001")
    now(turn, "trained")
    store.opt_out("default")
    now(turn, "trained")
    store.opt_out("default", False)
    store.end_batch(batch.batch_id, "rejected", "v000001")
    now(turn, "rejected")
    now(ready_turn(store, turn_id=next(turn_ids(held_out=True))), "held_out")
    now(ready_turn(store, kind="side", side_reason="title"), "side")
    for broken in (
        {"prompt_ids": ()},
        {"completion_ids": (), "logprobs": ()},
        {"logprobs": ()},
        {"finish_reason": "disconnect"},
    ):
        now(ready_turn(store, **broken), "unusable")
    old = record(store)
    store.add_version("default", "v000001", "base", "/a")
    store.publish("default", "v000001")
    store.claim("default", 1, 0)
    now(old, "expired")
    assert set(seen) == set(TURN_STATES)
    counts = store.counts("default")
    assert counts == {"rejected": 1, "held_out": 1, "side": 1, "unusable": 4, "expired": 1}
    assert store.counts("nobody") == {}


def test_only_what_can_teach_is_judged(store):
    waiting = [record(store) for _ in range(3)]
    for turn in reversed(waiting):
        store.add_next_state(turn.turn_id, [user("Hm.")])
    held_out = record(store, turn_id=next(turn_ids(held_out=True)))
    store.add_next_state(held_out.turn_id, [user("Hm.")])
    record(store)  # open
    for changes in ({"kind": "side"}, {"logprobs": ()}, {"user": "out"}):
        turn = record(store, **changes)
        store.add_next_state(turn.turn_id, [user("Hm.")])
    store.opt_out("out")
    expected = [turn.turn_id for turn in [*reversed(waiting), held_out]]
    assert [turn.turn_id for turn in store.unjudged(10)] == expected
    assert [turn.turn_id for turn in store.unjudged(2)] == expected[:2]
    store.add_verdict(expected[0], Verdict(None, "failed"))
    store.add_feedback("default", expected[1], -1, None, "a")  # a hint may still be found
    store.add_feedback("default", expected[2], -1, "Like so.", "b")
    assert [turn.turn_id for turn in store.unjudged(10)] == [expected[1], expected[3]]
    store.add_feedback("default", expected[2], 1, None, "c")  # withdraws the correction
    assert [turn.turn_id for turn in store.unjudged(10)] == expected[1:]


def test_a_store_of_an_earlier_schema_learns_that_corrections_can_be_withdrawn(store):
    turn = record(store)
    thumb(-1, "Mine.", "a")(store, turn)
    thumb(1, None, "b")(store, turn)
    with store._write() as connection:
        (sql,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'current_verdicts'").fetchone()
        connection.execute("DROP VIEW current_verdicts")
        connection.execute(
            sql.replace(
                "SELECT max(number) FROM verdicts WHERE turn = t.number AND source = 'feedback'",
                "SELECT min(number) FROM verdicts WHERE turn = t.number AND source = 'feedback'",
            )
        )
        connection.execute("PRAGMA user_version = 3")
    assert store.show(None, turn.turn_id).verdict.hints == ("Mine.",)
    assert Store(store.path).show(None, turn.turn_id).verdict.hints == ()


def test_one_turn_in_eight_is_held_out(store):
    ids = turn_ids(held_out=True)
    assert all(ready_turn(store, turn_id=next(ids)) for _ in range(20))
    assert store.ready_count("default", 9) == 0
    from trl_openclaw.live.store_turns import is_held_out

    share = sum(is_held_out(f"chatcmpl-{i:032x}") for i in range(4000)) / 4000
    assert abs(share - 1 / 8) < 0.02


def test_turns_are_listed_newest_first(store):
    turns = [record(store, user=f"u{i % 2}", session_id=f"s{i % 3}") for i in range(12)]
    listed = store.turns(limit=5)
    assert [turn.turn_id for turn in listed] == [turn.turn_id for turn in turns[:-6:-1]]
    more = store.turns(limit=5, before=listed[-1].number)
    assert [turn.turn_id for turn in more] == [turn.turn_id for turn in turns[-6:-11:-1]]
    assert {turn.user for turn in store.turns("u1")} == {"u1"}
    assert len(store.turns("u1", "s1")) == 2
    assert store.turns(state="ready") == []
    assert len(store.turns(state="open")) == 12
    assert store.users() == ["u0", "u1"]


def test_all_turns_are_walked_in_order(store):
    turns = [record(store) for _ in range(450)]
    assert [turn.turn_id for turn in store.all_turns()] == [turn.turn_id for turn in turns]
    assert [turn.turn_id for turn in store.all_turns(turn_id=turns[7].turn_id)] == [turns[7].turn_id]


def test_ids_can_be_shortened(store):
    for turn_id in ("chatcmpl-ab1", "chatcmpl-ab", "chatcmpl-b%", "chatcmpl-bc"):
        record(store, turn_id=turn_id)
    assert store.complete("turn", "chatcmpl-ab1") == "chatcmpl-ab1"
    assert store.complete("turn", "chatcmpl-ab") == "chatcmpl-ab"
    assert store.complete("turn", "chatcmpl-b%") == "chatcmpl-b%"
    assert store.complete("turn", "nothing") == "nothing"
    assert store.complete("turn", "chatcmpl-bc", "ann") == "chatcmpl-bc"
    with pytest.raises(UnknownTurnError, match="Several turns"):
        store.complete("turn", "chatcmpl-")


def test_another_process_is_noticed(store):
    other = Store(store.path)
    before = store.data_version()
    assert store.data_version() == before
    record(other)
    assert store.data_version() != before


def test_threads_share_a_store(tmp_path):
    store = Store(tmp_path / "store.db", busy_seconds=60)

    def work(_):
        for _ in range(20):
            record(store)
        store.close()

    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(work, range(4)))) == 4
    assert len(store.turns(limit=100)) == 80


def test_only_its_owner_reads_the_file(store):
    record(store)
    files = list(store.path.parent.iterdir())
    assert {path.name for path in files} == {"store.db", "store.db-shm", "store.db-wal"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_opening_again_keeps_everything(store):
    turn = record(store)
    store.close()
    assert Store(store.path).show(None, turn.turn_id).turn_id == turn.turn_id


def test_files_that_are_no_store_are_refused(tmp_path):
    (tmp_path / "text").write_text("not a database " * 100)
    with pytest.raises(StoreError, match="not a database"):
        Store(tmp_path / "text")
    with pytest.raises(StoreError, match="cannot be opened"):
        Store(tmp_path / "text" / "store.db")
    newer = Store(tmp_path / "newer.db")
    newer.close()
    with sqlite3.connect(tmp_path / "newer.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="newer version"):
        Store(tmp_path / "newer.db")


def test_a_store_of_an_earlier_version_opens_and_gets_what_is_new(tmp_path):
    old = Store(tmp_path / "store.db")
    record(old)
    old._connection.executescript("DROP TABLE deletions; PRAGMA user_version = 1")
    old.close()
    store = Store(tmp_path / "store.db")
    assert store.delete("default").turns == 1
    assert store.last_deletion() == 1


def test_records_are_only_added(store):
    """Whatever happens to a turn, no row that was written is written again."""
    turn = ready_turn(store)
    tables = [row[0] for row in store._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]

    def rows():
        return {
            t: set(map(tuple, store._connection.execute(f"SELECT * FROM {t}"))) for t in tables if "sqlite" not in t
        }

    before = rows()
    store.add_feedback("default", turn.turn_id, 1, "Like so.", "key")
    store.edit_hint("default", turn.turn_id, ["Edited."])
    batch = store.claim("default", 1, 0)
    store.add_token_scores(batch.batch_id, {turn.turn_id: TokenScores([0.0], [0.0], [0.0], [[["a", 0.5, 0.25]]])})
    store.end_batch(batch.batch_id, "trained", "v000001")
    store.add_version("default", "v000001", "base", "/a")
    store.publish("default", "v000001")
    store.roll_back("default")
    store.opt_out("default")
    after = rows()
    assert all(before[table] <= after[table] for table in before)
    assert sum(map(len, after.values())) > sum(map(len, before.values())) + 8


def test_the_store_needs_no_torch():
    code = (
        "import trl_openclaw.live.store, trl_openclaw.live.sessions, trl_openclaw.live.side_traffic\n"
        "import trl_openclaw.live.replay, trl_openclaw.live.data_cli\n"
        "import json, sys; print(json.dumps(list(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    heavy = {"torch", "transformers", "trl", "accelerate", "datasets", "numpy", "openai", "filelock"}
    assert set(json.loads(done.stdout)).isdisjoint(heavy)


def test_a_stored_turn_is_a_turn():
    assert issubclass(StoredTurn, type(new_turn()))


def test_what_json_has_no_number_for_is_null_in_the_file_and_when_it_is_read():
    assert to_json({"a": [float("nan"), float("inf"), 1.5]}) == '{"a":[null,null,1.5]}'
    assert from_json('{"a":[NaN,-Infinity,1.5]}') == {"a": [None, None, 1.5]}
