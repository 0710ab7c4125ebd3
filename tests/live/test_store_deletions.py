"""What goes with what is deleted: copies that retries and regenerations make, and what only the deleted told."""

import pytest
from live_traffic import assistant, chat, next_text, user

from trl_openclaw import Verdict
from trl_openclaw.errors import UnknownTurnError
from trl_openclaw.live.store import Store

SECRET = [user("asked-zyx")]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "live" / "store.db")


def left(store):
    return {turn.turn_id for turn in store.turns()}


def leaks(store):
    return b"zyx" in b"".join(path.read_bytes() for path in store.path.parent.rglob("*") if path.is_file())


@pytest.mark.parametrize("whole", [False, True], ids=["turn", "session"])
def test_a_first_message_that_was_sent_again_goes_with_its_conversation(store, whole):
    other, _ = chat(store, [user("other")], "Yes?")
    chat(store, SECRET, "lost-zyx")
    first, _ = chat(store, [{"role": "system", "content": "It is noon."}, *SECRET], "got-zyx")
    chat(store, [*SECRET, assistant("got-zyx"), user("Go on.")], "Well.")
    path, _ = store.export()
    done = store.delete("default", **({"session_id": first} if whole else {"turn_id": first}))
    assert (done.turns, done.sessions, done.exports) == (3, 2, (str(path.parent),))
    assert left(store) == {other}
    assert not leaks(store)


def test_what_begins_alike_and_goes_on_or_was_named_or_is_anothers_is_another_conversation(store):
    first, _ = chat(store, [user("Hi")], "Hello.")
    second, _ = chat(store, [user("Hi")], "Hello!")
    third, _ = chat(store, [user("Hi"), assistant("Hello!"), user("Why?")], "Because.")
    named, _ = chat(store, [user("Hi")], "Hello?", session_id="mine")
    his, _ = chat(store, [user("Hi")], "Hello.", owner="bob")
    assert store.delete("default", session_id=first).turns == 1
    assert left(store) == {second, third, named, his}
    assert store.delete("default", session_id="mine").turns == 1
    assert left(store) == {second, third, his}
    assert store.delete("default", session_id=second).turns == 2
    assert left(store) == {his}


def asked_twice(store):
    """A reply, and two replies to what followed it, of which the second goes on."""
    first, _ = chat(store, [user("Hi")], "Hello.")
    question = [user("Hi"), assistant("Hello."), user("complaint-zyx")]
    one, _ = chat(store, question, "one-zyx")
    question[-1] = user(" complaint-zyx  ")
    two, _ = chat(store, question, "two-zyx")
    after, _ = chat(store, [*question, assistant("two-zyx"), user("Ok.")], "Good.")
    store.add_verdict(first, Verdict(-1, "negative", ("hint from complaint-zyx",)))
    return first, one, two, after


def test_with_a_turn_goes_what_was_regenerated_for_it(store):
    first, _, two, _ = asked_twice(store)
    assert store.delete("default", turn_id=two).turns == 3
    assert left(store) == {first}
    assert not leaks(store)
    assert (store.show(None, first).next_state, store.show(None, first).verdict) == (None, None)


def test_a_regeneration_that_goes_on_stays_and_tells_what_followed_the_reply_before(store):
    first, one, two, after = asked_twice(store)
    before = store.show(None, first)
    assert before.next_state_told_by == one
    path, _ = store.export(turn_id=first)
    assert store.delete("default", turn_id=one).exports == (str(path.parent),)
    assert left(store) == {first, two, after}
    stays = store.show(None, first)
    assert (stays.next_state_told_by, next_text(stays)) == (two, [" complaint-zyx  "])
    assert stays.verdict == before.verdict
    assert store.delete("default", turn_id=two).turns == 2
    assert not leaks(store)


def test_what_a_request_told_that_never_got_its_reply_goes_with_the_one_that_did(store):
    first, _ = chat(store, [user("Hi")], "Hello.")
    history = [user("Hi"), assistant("Hello.")]
    store.add_next_state(first, [user("complaint-zyx")], told_by="chatcmpl-failed")
    branch, _ = chat(store, [*history, user("Something else.")], "Yes.")
    store.delete("default", turn_id=branch)
    assert next_text(store.show(None, first)) == ["complaint-zyx"]
    retry, _ = chat(store, [*history, user("complaint-zyx")], "sorry-zyx")
    store.delete("default", turn_id=retry)
    assert store.show(None, first).next_state is None
    assert not leaks(store)


def test_what_was_deleted_is_known_again_without_its_name(store):
    chat(store, [user("Hi")], "Hello.", session_id="about-zyx")
    with store._write() as connection:  # as they were written down before
        for what, name in (("session", "old-zyx"), ("turn", "chatcmpl-1")):
            connection.execute("INSERT INTO deletions VALUES (NULL, 'default', ?, ?, 1, 0.0)", (what, name))
        connection.execute("PRAGMA user_version = 3")
    store = Store(store.path)
    assert store.delete("default", session_id="about-zyx").turns == 1
    assert not leaks(store)
    for named in ({"session_id": "about-zyx"}, {"session_id": "old-zyx"}, {"turn_id": "chatcmpl-1"}):
        assert store.delete("default", **named).turns == 0
    with pytest.raises(UnknownTurnError):
        store.delete("default", session_id="chatcmpl-1")
    assert not leaks(store)
