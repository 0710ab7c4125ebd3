"""Conversations whose last exchange anybody may have had, of clients that add to the live message alone."""

import pytest

from benchmarks.live_sessions import record
from trl_openclaw.live.sessions import match
from trl_openclaw.live.store import Store

LONG = "The river Lahn comes from the Rothaar hills, passes Marburg and Limburg, and joins the Rhine at Lahnstein."


def user(text):
    return {"role": "user", "content": text}


def reply(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store.db")


@pytest.mark.parametrize("others", [0, 1, 2])
def test_the_conversation_goes_on_from_its_long_reply_whoever_else_said_the_few_words(store, others):
    for place in range(others):
        first = [user(f"conversation {place}"), reply(f"answer {place}")]
        record(store, f"other{place}", [*first, user("Thanks!")], reply("You are welcome!"))
    record(store, "long", [user("[looked up] Where does the Lahn go?")], reply(LONG))
    asked = [user("Where does the Lahn go?"), reply(LONG)]
    record(store, "short", [*asked, user("[looked up] Thanks!")], reply("You are welcome!"))
    told = [*asked, user("Thanks!"), reply("You are welcome!"), user("[looked up] And the Eder?")]
    found = match(store, "default", told)
    assert (found.parent, found.session_id) == ("long", store.show("default", "long").session_id)
    assert found.answered is None  # nothing that was said later is feedback on it
    assert not found.alternate
    assert found.unmatched
    assert all(store.show("default", f"other{place}").next_state is None for place in range(others))


def test_a_long_reply_without_a_next_state_gets_what_follows_it_and_not_what_was_said_last(store):
    record(store, "other", [user("Hello"), reply("Hello!"), user("Thanks!")], reply("You are welcome!"))
    record(store, "long", [user("[looked up] Where does the Lahn go?")], reply(LONG))
    told = [
        user("Where does the Lahn go?"),
        reply(LONG),
        user("Thanks!"),
        reply("You are welcome!"),
        user("And the Eder?"),
    ]
    found = match(store, "default", told)
    assert (found.parent, found.answered) == ("long", "long")
    assert found.next_state == (user("Thanks!"),)
