"""What goes with what is deleted: copies that retries and regenerations make, and what only the deleted told."""

import pytest
from live_traffic import assistant, chat, next_text, record, user

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


LONG = "The key of the staging store is zyx, says the handbook, and it is changed every ninety days by who is on duty."
OTHER = "The tides come and go because of the moon, which pulls at the sea and at all else, and a little of the sun."


@pytest.mark.parametrize("whole", [False, True], ids=["turn", "session"])
def test_with_a_turn_goes_what_holds_its_reply_after_another_message(store, whole):
    """As clients make it that add to the last message what they looked up, and where the store knew no better."""
    first = record(store, messages=[user("<context>rows</context> What is the key?")], reply=assistant(LONG)).turn_id
    held = [user("What is the key?"), assistant(f" {LONG}\n"), user("Is it?")]
    second = record(store, messages=held, reply=assistant(OTHER)).turn_id
    record(store, messages=[user("Is it?"), assistant(OTHER), user("Why?")], reply=assistant("So."))
    record(store, messages=[user("Why?")], reply=assistant("So."), parent=second)
    others = {
        record(store, messages=messages, reply=assistant("Ok."), **more).turn_id
        for messages, more in [
            ([user("What is the key?")], {}),
            ([user("Is it?"), assistant(LONG.replace("zyx", "xyz")), user("Yes.")], {}),
            ([user("Is it?"), user(OTHER)], {}),
            ([user("So."), assistant("So."), user("No.")], {}),
        ]
    }
    his = record(store, messages=held, user="bob").turn_id
    assert store.delete("default", **({"session_id": first} if whole else {"turn_id": first})).turns == 4
    assert left(store) == {*others, his}
    store.delete("bob")
    assert not leaks(store)


def test_a_conversation_that_was_told_apart_by_its_long_replies_goes_as_one(store):
    history, ids = [], []
    for place in range(3):
        asked, reply = user(f"What about {place}-zyx?"), f"Of {place} it is known that it is zyx, {LONG}"
        turn_id, _ = chat(store, [*history, user(f"<context>rows</context> {asked['content']}")], reply)
        ids.append(turn_id)
        history += [asked, assistant(reply)]
    assert store.delete("default", session_id=ids[0]).turns == 3
    assert not leaks(store)


def test_what_was_said_before_or_again_is_not_deleted_with_what_says_the_same(store):
    earlier = record(store, messages=[user("Hi"), assistant(LONG), user("Ok.")], reply=assistant("Fine.")).turn_id
    first, _ = chat(store, [user("What is the key?")], LONG, session_id="a")
    again, _ = chat(store, [user("And what is the key?")], LONG, session_id="b")
    history = [user("And what is the key?"), assistant(LONG), user("Thanks.")]
    on, _ = chat(store, history, "Gladly.", session_id="b")
    after, _ = chat(store, [*history, assistant("Gladly."), user("Ok.")], "Bye.", session_id="b")
    assert store.delete("default", turn_id=first).turns == 1
    assert left(store) == {earlier, again, on, after}


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
