"""Old logs come in through the same path as live traffic, and coming in twice changes nothing."""

import json
import sqlite3
from dataclasses import asdict, replace

import pytest
from live_traffic import assistant, chat, next_text, ready_turn, record, user

from trl_openclaw import Verdict, Vote
from trl_openclaw.errors import StoreBusyError
from trl_openclaw.live.replay import replay
from trl_openclaw.live.store import Store


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "a" / "store.db")


@pytest.fixture
def other(tmp_path):
    return Store(tmp_path / "b" / "store.db")


def pair(messages, reply, **more):
    response = {"id": more.pop("id", None), "model": "gpt", "choices": [{"message": reply, "finish_reason": "stop"}]}
    return json.dumps(
        {"request": {"model": "gpt", "messages": messages, "temperature": 0.5}, "response": response} | more
    )


def everything(store):
    """All that is known, but for the numbers and what only the first store has seen."""
    turns = [replace(turn, number=0, use=None, lag=0) for turn in store.all_turns()]
    return {
        turn.turn_id: {
            **asdict(turn),
            "verdict": turn.verdict and asdict(replace(turn.verdict, created=0)),
            "state": "ready" if turn.state == "claimed" else turn.state,
        }
        for turn in turns
    }


def test_an_export_comes_back_as_it_was(store, other):
    one, _ = chat(store, [user("Hi")], "Hello.", owner="ann", session_id="s")
    two, _ = chat(store, [user("Hi"), assistant("Hello."), user("Shorter!")], "Hey.", owner="ann", session_id="s")
    chat(store, [user("Hi"), assistant("Hello."), user("Longer!")], "Good day.", owner="ann")
    store.add_verdict(one, Verdict.from_votes([Vote(-1, hint="Be brief.", raw="x"), Vote(failure="timeout")]))
    store.add_feedback("ann", two, 1, None, "k")
    store.add_verdict(two, Verdict(-1, "negative", ("Judge's hint.",)))
    ready_turn(store)
    store.edit_hint(None, ready_turn(store).turn_id, ["Edited."])
    store.edit_hint(None, record(store).turn_id, ["Only edited."])
    record(store, kind="side", side_reason="title", user="bob")
    record(store, prompt_ids=(), completion_ids=(), logprobs=())
    store.claim("default", 1, 0)
    path, count = store.export()
    report = replay(other, path.read_text().splitlines())
    assert (report.turns, report.known, report.failed) == (count, 0, 0)
    assert everything(other) == everything(store)
    again = replay(other, path.read_text().splitlines())
    assert (again.turns, again.known, again.next_states) == (0, count, 0)
    assert everything(other) == everything(store)
    verdicts = other._connection.execute("SELECT count(*) FROM verdicts").fetchone()[0]
    replay(other, path.read_text().splitlines())
    assert other._connection.execute("SELECT count(*) FROM verdicts").fetchone()[0] == verdicts


def test_an_export_has_no_number_that_an_import_refuses(store, other):
    endless = float("inf")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"maximum": endless, "default": [1.5]}}}]
    turn = record(store, messages=[user("Hi") | {"weight": -endless}], sampling={"top_p": float("nan")}, tools=tools)
    old = record(store)
    with store._write() as connection:  # as it was written before
        connection.execute("UPDATE turns SET sampling = '{\"seed\":Infinity}' WHERE turn_id = ?", (old.turn_id,))
    path, _ = store.export()
    assert replay(other, path.read_text().splitlines()).failures == []
    for found in (store.show(None, turn.turn_id), other.show(None, turn.turn_id)):
        assert (found.messages, found.sampling) == ([user("Hi") | {"weight": None}], {"top_p": None})
        assert found.tools[0]["function"]["parameters"] == {"maximum": None, "default": [1.5]}
    assert other.show(None, old.turn_id).sampling == {"seed": None}


def test_what_came_in_is_deleted_as_if_it_had_been_live(store, other):
    one, _ = chat(store, [user("a")], "b")
    two, _ = chat(store, [user("a"), assistant("b"), user("complaint")], "d")
    replay(other, store.export()[0].read_text().splitlines())
    assert next_text(other.show(None, one)) == ["complaint"]
    other.delete(turn_id=two)
    assert other.show(None, one).next_state is None


TALK = [user("Hi"), assistant("Hello.")]
LOG = [
    pair([user("Hi")], assistant("Hello.")),
    pair([*TALK, user("Shorter!")], assistant("Hey."), id="chatcmpl-7", user="ann", session_id="s", created=5),
    pair([*TALK, user("Generate a title for this conversation")], assistant("Greeting")),
    "",
    pair([*TALK, user("Shorter!")], assistant("Hey.")),
]


def test_logged_requests_become_turns_with_their_next_states(store):
    report = replay(store, LOG)
    assert (report.turns, report.next_states, report.failed) == (4, 1, 0)
    turns = list(store.all_turns())
    assert [turn.state for turn in turns] == ["unusable", "unusable", "side", "unusable"]
    assert [next_text(turn) for turn in turns] == [["Shorter!"], None, None, None]
    first, anns, _, last = turns
    assert (anns.turn_id, anns.user, anns.session_id, anns.created) == ("chatcmpl-7", "ann", "s", 5.0)
    assert (last.parent, last.session_id) == (first.turn_id, first.turn_id)
    assert (first.model, first.model_version, first.sampling) == ("gpt", "imported", {"temperature": 0.5})
    assert first.turn_id.startswith("chatcmpl-")
    again = replay(store, LOG)
    assert (again.turns, again.known, again.next_states) == (0, 4, 0)
    assert len(list(store.all_turns())) == 4
    assert store.export(form="dataset")[1] == 3


def test_a_user_can_be_named_for_all_lines(store):
    replay(store, LOG, "carl")
    assert store.users() == ["carl"]


def test_a_turn_of_another_user_stays_theirs(store):
    replay(store, LOG)
    report = replay(store, [LOG[1]], "carl")
    assert (report.turns, report.failed) == (0, 1)
    assert "chatcmpl-7 is another user's already" in report.failures[0]


def test_each_choice_is_a_reply(store):
    line = json.loads(pair([user("Hi")], assistant("A"), id="r"))
    line["response"]["choices"].append({"message": assistant("B"), "finish_reason": "length"})
    replay(store, [json.dumps(line), pair([user("Hi"), assistant("B"), user("Why?")], assistant("C"))])
    assert {turn.turn_id: next_text(turn) for turn in store.turns()}["r-1"] == ["Why?"]
    assert store.show(None, "r-1").finish_reason == "length"


ROW = {"turn_id": "t", "prompt": [user("Hi")], "completion": [assistant("Hello.")]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting"),
        ("[]", "neither a line of an export"),
        ("null", "neither"),
        ('{"request": {}}', "neither"),
        ('{"request": {}, "response": {}}', "`request.messages` is no list"),
        (pair([user("Hi")], None), "no message"),
        (pair([], assistant("x")), "`request.messages` is no list"),
        (pair([{"content": "x"}], assistant("x")), "no message"),
        (pair([user(5)], assistant("x")), "neither text nor parts"),
        ('{"request": {"messages": [{"role": "user", "content": "x"}]}, "response": {"choices": []}}', "no `choices`"),
        (json.dumps({**ROW, "turn_id": 5}), "`turn_id` is no text"),
        (json.dumps({**ROW, "user": ""}), "`user` is no text"),
        (json.dumps({**ROW, "created": "now"}), "`created` is no number"),
        (json.dumps({**ROW, "created": True}), "`created` is no number"),
        (json.dumps({**ROW, "created": 10**30}), "`created` is no number"),
        (json.dumps({**ROW, "created": float("nan")}), "finite"),
        (json.dumps(ROW)[:-1] + ', "created": 1e999}', "finite"),
        (json.dumps(ROW)[:-1] + ', "tools": [{"maximum": -1e999}]}', "finite"),
        (json.dumps({**ROW, "kind": "x"}), "kind"),
        (json.dumps({**ROW, "side_reason": {}}), "`side_reason` is no text"),
        (json.dumps({**ROW, "finish_reason": {"a": 1}}), "`finish_reason` is no text"),
        (json.dumps({**ROW, "model": 5}), "`model` is no text"),
        (json.dumps({**ROW, "model_version": ["v"]}), "`model_version` is no text"),
        (json.dumps({**ROW, "tools": "x"}), "`tools` is no list"),
        (json.dumps({**ROW, "session_id": "\ud800"}), "surrogates"),
        (json.dumps({**ROW, "logprobs": [10**400], "completion_ids": [1]}), "too large"),
        (json.dumps({**ROW, "next_state_messages": [user("x")], "next_state_told_by": {}}), "`next_state_told_by`"),
        (json.dumps({**ROW, "verdict_source": "judge", "outcome": {}}), "`outcome`"),
        (json.dumps({**ROW, "verdict_source": "judge", "outcome": "positive", "judge_score": 7}), "`judge_score`"),
        (json.dumps({**ROW, "verdict_source": "nobody", "outcome": "positive"}), "`verdict_source`"),
        (json.dumps({**ROW, "verdict_source": "edit", "hints": [5]}), "`hints` are texts"),
        (json.dumps({**ROW, "completion": []}), "`completion` is no list"),
        (json.dumps({**ROW, "logprobs": [float("nan")], "completion_ids": [1]}), "finite"),
        (json.dumps({**ROW, "completion_ids": ["a"]}), "not supported"),
        (json.dumps({**ROW, "verdict_source": "judge", "outcome": "tied", "votes": [{"score": 7}]}), "score"),
        (json.dumps({**ROW, "next_state_messages": ["x"]}), "no message"),
    ],
)
def test_a_line_that_cannot_be_read_costs_itself(store, line, message):
    report = replay(store, [LOG[0], line, LOG[1]])
    assert report.failed == 1
    assert report.failures[0].startswith("line 2: ")
    assert message in report.failures[0]
    assert report.turns == 2
    assert len(list(store.all_turns())) == 2  # nothing of it is there


def test_a_store_that_cannot_be_written_ends_it(tmp_path, store):
    busy = Store(store.path, busy_seconds=0)
    with sqlite3.connect(store.path, isolation_level=None) as lock:
        lock.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusyError):
            replay(busy, LOG)


def test_versions_keep_their_names_where_they_are_known(store):
    store.add_version("default", "v000003", "base", "adapters/v000003")
    for number, owner in enumerate(("default", "ann")):
        replay(store, [json.dumps({**ROW, "turn_id": f"t{number}", "user": owner, "model_version": "v000003"})])
    replay(store, [json.dumps({**ROW, "turn_id": "b", "model_version": "base"})])
    found = {turn.turn_id: turn.model_version for turn in store.all_turns()}
    assert found == {"t0": "v000003", "t1": "imported", "b": "base"}


def test_the_least_that_a_row_needs(store):
    assert replay(store, [json.dumps(ROW)]).turns == 1
    assert store.show("default", "t").model_version == "imported"
