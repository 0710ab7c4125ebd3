"""Deleting a conversation, or all of one's data, by the status page: nobody else's, and also while one is answered."""

import hashlib
import sqlite3
import threading
from contextlib import closing

import pytest
from status_harness import call, serving_page

from benchmarks.status_store import add_turn, turn_id, votes
from trl_openclaw.live import exports
from trl_openclaw.live.gateway.auth import Keys
from trl_openclaw.live.status import overview as overviews

HI = [{"role": "user", "content": "Why does bread go stale?"}]
KEYS = {name: f"key-of-{name}-0123456789" for name in ("ann", "bob", "new")}
ALL = {"all": True}


@pytest.fixture
def users(tmp_path, stub, store):
    """A gateway with three users: two have turns in conversations of one name, the third has none."""
    for user in ("ann", "bob"):
        verdict = votes(1, hint=f"hint-of-{user}")
        add_turn(store, user, HI, f"reply-to-{user}", session="s", user=user, verdict=verdict, next_state="Thanks")
        add_turn(store, f"{user} side", HI, f"title-for-{user}", session="t", user=user, kind="side")
        store.add_version(user, "v000001", "base", "nowhere")
        store.add_version_event(user, "v000001", "checked", {"checks": {}, "turns": 1})
    keys = Keys({hashlib.sha256(key.encode()).digest(): name for name, key in KEYS.items()})
    with serving_page(tmp_path, stub, store, keys=keys) as running:
        yield running


def delete(users, body, name):
    """The status and the body of the answer."""
    status, _, answer = call(users, "/status/delete", body, key=KEYS[name])
    return status, answer


def overview(users, name):
    return call(users, "/status/overview", key=KEYS[name])[2]


def stream(users, name, text, **more):
    """A streamed reply of which the first piece has come, and the client that it comes to."""
    client = users.client(KEYS[name])
    messages = [{"role": "user", "content": text}]
    pieces = client.chat.completions.create(model="stub", messages=messages, stream=True, **more)
    next(pieces)
    return pieces, client


def ended(pieces, client):
    """How a reply ends."""
    with client:
        return [piece.choices[0].finish_reason for piece in pieces][-1]


def bytes_of(folder):
    return b"\0".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_all_of_a_users_text_goes_and_nobody_elses(users, store, tmp_path):
    store.opt_out("ann")
    for name in ("ann", "bob"):
        store.export(name)
    assert overview(users, "ann")["satisfaction"]["day"] != []
    assert delete(users, ALL, "ann") == (200, {"turns": 2})
    data = bytes_of(tmp_path)
    assert [word for word in (b"reply-to-", b"title-for-", b"hint-of-") if word + b"ann" in data] == []
    assert [word for word in (b"reply-to-", b"title-for-", b"hint-of-") if word + b"bob" not in data] == []
    seen = overview(users, "ann")
    assert (seen["turns"], seen["satisfaction"]) == ({}, {"version": [], "day": []})
    assert seen["opted_out"] is True
    (version, _) = seen["versions"]
    assert (version["version"], version["events"][0]["detail"]["turns"]) == ("v000001", 1)
    assert len(store.turns("bob")) == 2


def test_a_session_of_this_name_is_ones_own(users, store):
    assert delete(users, {"session": "s"}, "ann")[0] == 200
    assert store.turns("ann", "s") == []
    assert len(store.turns("bob", "s")) == 1
    assert delete(users, {"session": "s"}, "new")[0] == 404


def test_once_more_is_no_mistake(users):
    assert delete(users, ALL, "new") == (200, {"turns": 0})
    for turns in (2, 0):
        assert delete(users, ALL, "ann") == (200, {"turns": turns})
    assert delete(users, {"session": "t"}, "bob") == (200, {"turns": 1})
    assert delete(users, {"session": "t"}, "bob") == (200, {"turns": 0})


@pytest.mark.parametrize("key", [None, "wrong", ""])
def test_nobody_deletes_without_a_key(users, store, key):
    assert call(users, "/status/delete", ALL, key=key)[0] == 401
    assert len(list(store.all_turns())) == 4


@pytest.mark.parametrize(
    "header", [{"Origin": "http://other.example"}, {"Sec_Fetch_Site": "cross-site"}, {"Content_Type": "text/plain"}]
)
def test_other_sites_delete_nothing(users, store, header):
    assert call(users, "/status/delete", ALL, key=KEYS["ann"], **header)[0] in (403, 415)
    assert len(list(store.all_turns())) == 4


@pytest.mark.parametrize(
    ("body", "status"),
    [
        *(({"all": value}, 400) for value in (False, None, 1, "true", ["ann"])),
        ({"all": True, "session": "s"}, 400),
        ({"all": True, "turn": turn_id("ann")}, 400),
        ({"session": "s", "turn": turn_id("ann")}, 400),
        ({"user": "ann"}, 400),
        ({"session": ""}, 404),
        ({"turn": ""}, 404),
    ],
)
def test_what_is_unclear_deletes_nothing(users, store, body, status):
    assert delete(users, body, "ann")[0] == status
    assert len(list(store.all_turns())) == 4


@pytest.mark.parametrize(("name", "body"), [("ann", ALL), ("new", ALL), ("ann", {"session": "s"})])
def test_replies_that_are_on_their_way_are_not_recorded(users, stub, store, tmp_path, name, body):
    before = {turn.turn_id for turn in store.all_turns("bob")}
    stub.pause = 0.2
    mine, others = (stream(users, who, f"asked-by-{who}{' and more' * 200}") for who in (name, "bob"))
    assert delete(users, body, name)[0] == 200
    stub.pause = 0
    assert [ended(*reply) for reply in (mine, others)] == ["stop", "stop"]
    assert b"asked-by-" + name.encode() not in bytes_of(tmp_path)
    (new,) = (turn for turn in store.all_turns("bob") if turn.turn_id not in before)
    assert new.messages[0]["content"].startswith("asked-by-bob")
    assert users.metric("turns_deleted_total") == 1
    ended(*stream(users, name, "asked afterwards"))
    assert store.turns(name)[0].messages[0]["content"] == "asked afterwards"


def test_others_are_answered_while_it_takes_its_time(users, store, tmp_path, monkeypatch):
    answers, real, began = [], type(store).delete, threading.Event()

    def told(self, *args, **kwargs):
        began.set()
        return real(self, *args, **kwargs)

    monkeypatch.setattr(type(store), "delete", told)
    deleting = threading.Thread(target=lambda: answers.append(delete(users, ALL, "ann")))
    with exports.exclusively(tmp_path):  # as a long export does
        deleting.start()
        assert began.wait(20)
        for _ in range(5):
            assert ended(*stream(users, "bob", "and me?")) == "stop"
        assert answers == []
    deleting.join(30)
    assert answers == [(200, {"turns": 2})]
    assert store.users() == ["bob"]


def test_traces_that_are_left_are_told_and_go_with_the_next_try(users, store, tmp_path, monkeypatch):
    monkeypatch.setattr(overviews, "REST", 1e6)  # only who changed something is counted anew
    assert overview(users, "ann")["turns"] != {}
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM turns").fetchone()
        status, answer = delete(users, ALL, "ann")
    assert status == 503
    assert "delete it again" in answer["error"]["message"]
    assert overview(users, "ann")["turns"] == {}
    assert delete(users, ALL, "ann") == (200, {"turns": 0})
    assert b"reply-to-ann" not in bytes_of(tmp_path)
