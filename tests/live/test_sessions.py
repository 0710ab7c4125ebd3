"""Which turn a request goes on from: found in its history alone, however the client writes it."""

import copy
import itertools
import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_traffic import assistant, chat, next_text, record, user

from trl_openclaw.live.canonical import canonical, reply_hash, turn_hashes
from trl_openclaw.live.sessions import match
from trl_openclaw.live.store import Store
from trl_openclaw.types import message_text


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store.db")


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("sessions") / "store.db")


def tool(text, **more):
    return {"role": "tool", "content": text, **more}


def call(name, arguments, call_id="c1"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def followed(store, turn_id):
    return next_text(store.show(None, turn_id))


def test_a_conversation(store):
    one, found = chat(store, [user("Hi")], "Hello.")
    assert (found.parent, found.session_id, found.unmatched) == (None, None, False)
    assert followed(store, one) is None
    two, found = chat(store, [user("Hi"), assistant("Hello."), user("Shorter.")], "Hey.")
    assert (found.parent, found.session_id, found.answered) == (one, one, one)
    three, found = chat(
        store, [user("Hi"), assistant("Hello."), user("Shorter."), assistant("Hey."), user("Good.")], "Yes."
    )
    assert (found.parent, found.session_id, found.answered) == (two, one, two)
    assert [followed(store, turn) for turn in (one, two, three)] == [["Shorter."], ["Good."], None]
    assert store.show(None, one).next_state_told_by == two


def test_the_header_names_the_session(store):
    one, _ = chat(store, [user("Hi")], "Hello.", session_id="mine")
    two, _ = chat(store, [user("Hi"), assistant("Hello."), user("Go on.")], "Well.", session_id="mine")
    fork, _ = chat(store, [user("Hi"), assistant("Hello."), user("Go back.")], "Well.", session_id="another")
    assert [store.show(None, turn).session_id for turn in (one, two, fork)] == ["mine", "mine", "another"]
    assert [store.show(None, turn).parent for turn in (two, fork)] == [one, one]


def test_of_turns_with_the_same_history_that_of_the_named_session_is_meant(store):
    turns = {name: chat(store, [user("Hi")], "Hello.", session_id=name)[0] for name in ("a", "b", "c")}
    for name in ("b", "a", "c"):
        _, found = chat(store, [user("Hi"), assistant("Hello."), user(f"I am {name}.")], "Ok.", session_id=name)
        assert found.parent == turns[name]
        assert followed(store, turns[name]) == [f"I am {name}."]
    _, found = chat(store, [user("Hi"), assistant("Hello."), user("I am b.")], "Ok.", session_id="a")
    assert (found.parent, found.alternate) == (turns["a"], True)


def test_users_are_kept_apart(store):
    one, _ = chat(store, [user("Hi")], "Hello.", owner="ann")
    _, found = chat(store, [user("Hi"), assistant("Hello."), user("My secret.")], "Oh.", owner="bob")
    assert (found.parent, found.unmatched) == (None, True)
    assert followed(store, one) is None


def test_retries_and_regenerations_are_no_feedback(store):
    opening = [user("Hi")]
    one, _ = chat(store, opening, "Hello.")
    again, found = chat(store, opening, "Good day.")
    assert found.parent is None
    question = [*opening, assistant("Hello."), user("Why?")]
    two, _ = chat(store, question, "Because.")
    retried, found = chat(store, question, "Because!")
    assert (found.parent, found.answered, found.alternate) == (one, None, False)
    assert followed(store, again) is None
    _, found = chat(store, [*question, assistant("Because!"), user("I see.")], "Fine.")
    assert found.parent == retried
    assert [followed(store, turn) for turn in (two, retried)] == [None, ["I see."]]


def test_edits_and_branches_leave_the_first_next_state(store):
    one, _ = chat(store, [user("Hi")], "Hello.")
    chat(store, [user("Hi"), assistant("Hello."), user("Why?")], "Because.")
    edited, found = chat(store, [user("Hi"), assistant("Hello."), user("How?")], "Like so.")
    assert (found.parent, found.answered, found.alternate) == (one, None, True)
    assert followed(store, one) == ["Why?"]
    _, found = chat(store, [user("Hi"), assistant("Hello."), user("How?"), assistant("Like so."), user("Ok.")], "Good.")
    assert (found.parent, found.answered) == (edited, edited)


def test_conversations_that_begin_alike_are_told_apart_as_they_go_on(store):
    turns = [chat(store, [user("Hi")], "Hello.")[0] for _ in range(3)]
    opening = [user("Hi"), assistant("Hello.")]
    seconds = [chat(store, [*opening, user(f"I am {name}.")], f"Welcome, {name}.")[0] for name in "abc"]
    assert sorted(followed(store, turn) for turn in turns) == [["I am a."], ["I am b."], ["I am c."]]
    assert len({store.show(None, turn).parent for turn in seconds}) == 3
    _, retried = chat(store, [*opening, user("I am b.")], "Welcome again.")
    assert (retried.answered, retried.alternate) == (None, False)
    assert followed(store, retried.parent) == ["I am b."]
    _, fourth = chat(store, [*opening, user("I am d.")], "Welcome, d.")
    assert fourth.alternate
    assert fourth.answered is None


def test_all_parallel_tool_results_are_one_next_state(store):
    calls = [call("look", '{"at": "a"}'), call("look", '{"at": "b"}', "c2")]
    one, _ = chat(store, [user("Look.")], assistant(None, tool_calls=calls))
    results = [tool("seen a", tool_call_id="c1"), tool("seen b", tool_call_id="c2")]
    two, found = chat(store, [user("Look."), assistant("", tool_calls=calls), *results], "Both seen.")
    assert found.parent == one
    assert followed(store, one) == ["seen a", "seen b"]
    assert store.show(None, one).next_state == results
    assert followed(store, two) is None


@pytest.mark.parametrize(
    "rewritten",
    [
        assistant("  Seen\r\n the   herbs. \n", tool_calls=[call("look", '{"b":1.5,"a":"x"}', "other id")]),
        assistant("Seen the herbs.", tool_calls=[call("look", {"a": "x", "b": 1.5})], reasoning_content=None),
        assistant(
            [{"type": "text", "text": "Seen"}, {"type": "text", "text": "the herbs."}],
            tool_calls=[{**call("look", ' { "a" : "x" , "b" : 1.5 } '), "index": 0}],
            refusal=None,
        ),
        assistant("<think>hm</think>\n\nSeen the herbs.", tool_calls=[call("look", '{"a": "x", "b": 1.5}')]),
        assistant("hm</think>Seen the herbs.", tool_calls=[call("look", '{"a": "\\u0078", "b": 15e-1}')]),
    ],
)
def test_what_clients_change_in_a_reply_does_not_count(store, rewritten):
    reply = assistant(
        "Seen the herbs.", tool_calls=[call("look", '{"a": "x", "b": 1.5}')], reasoning_content="I think."
    )
    one, _ = chat(store, [user("Look.")], reply)
    _, found = chat(store, [user("Look."), rewritten, tool("ok")], "Fine.")
    assert found.answered == one


@pytest.mark.parametrize(
    "changed",
    [
        assistant("Seen the herb.", tool_calls=[call("look", '{"a": "x"}')]),
        assistant("Seen the herbs.", tool_calls=[call("look", '{"a": "y"}')]),
        assistant("Seen the herbs.", tool_calls=[call("find", '{"a": "x"}')]),
        assistant("Seen the herbs."),
        assistant("Seen the herbs.", tool_calls=[call("look", '{"a": "x"}'), call("look", '{"a": "x"}')]),
    ],
)
def test_what_was_not_said_is_not_taken_for_it(store, changed):
    chat(store, [user("Look.")], assistant("Seen the herbs.", tool_calls=[call("look", '{"a": "x"}')]))
    _, found = chat(store, [user("Look."), changed, tool("ok")], "Fine.")
    assert (found.parent, found.unmatched) == (None, True)


def test_arguments_that_are_no_json_are_text():
    broken = assistant(None, tool_calls=[call("look", '{"a": ')])
    assert canonical(broken) == canonical(assistant("", tool_calls=[call("look", ' {"a":')]))
    assert canonical(broken) != canonical(assistant("", tool_calls=[call("look", "{}")]))
    assert canonical(assistant("", tool_calls=[call("f", "")])) == canonical(assistant("", tool_calls=[call("f", {})]))
    numbers = ('{"a": 1.0, "b": [1e3, 0.5]}', '{"a":1,"b":[1000,0.5]}', {"a": 1, "b": [1000.0, 0.5]})
    assert len({canonical(assistant("", tool_calls=[call("f", given)])) for given in numbers}) == 1
    for deep in ("[" * 100_000, "9" * 10_000, '{"a": Infinity}', '{"a": NaN}'):
        assert canonical(assistant("", tool_calls=[call("f", deep)]))
    for odd in ([None], ["x"], [{"function": None}], [{"id": 1}], "calls", {"a": 1}):
        assert canonical(assistant("x", tool_calls=odd))


def test_instructions_may_change_from_request_to_request(store):
    system = {"role": "system", "content": "Today is Monday."}
    one, _ = chat(store, [system, user("Hi")], "Hello.")
    _, found = chat(
        store,
        [
            {"role": "developer", "content": "Today is Tuesday."},
            user("Hi"),
            assistant("Hello."),
            {"role": "system", "content": "Be nice."},
            user("Why?"),
        ],
        "Because.",
    )
    assert found.answered == one
    assert followed(store, one) == ["Why?"]


def test_a_whole_history_counts_where_its_end_is_nothing_special(store):
    """By their last exchange alone these could not be told apart."""

    def history(name, instructions):
        return [{"role": "system", "content": instructions}, user(f"I am {name}."), assistant("Hi."), user("Yes?")]

    turns = {name: chat(store, history(name, "Monday"), "Done.", session_id=name)[0] for name in ("a", "b", "c")}
    for name, turn_id in turns.items():
        rewritten = [
            *history(name, "Tuesday"),
            {"role": "developer", "content": "x"},
            assistant(" Done.\n"),
            user(name),
        ]
        _, found = chat(store, rewritten, "Ok.")
        assert (found.answered, found.session_id) == (turn_id, name)


def test_a_compacted_history_is_matched_by_its_last_exchange(store):
    one, _ = chat(store, [user("Hi")], "Hello.")
    why, because = user("Why do herbs wilt so soon?"), assistant("Because they lose water.")
    two, _ = chat(store, [user("Hi"), assistant("Hello."), why], because)
    summary = user("Summary: we greeted each other.")
    three, found = chat(store, [summary, why, because, user("Hm.")], "Well.")
    assert (found.parent, found.session_id, found.answered, found.unmatched) == (two, one, two, False)
    retry, found = chat(store, [summary, why, because, user("Hm.")], "Right.")
    assert (found.parent, found.answered, found.alternate) == (two, None, False)
    _, found = chat(
        store,
        [summary, why, because, user("Hm."), assistant("Well."), user("So?")],
        ".",
    )
    assert found.parent == three  # by its whole history again
    assert followed(store, retry) is None


def test_a_cut_history_that_fits_several_turns_fits_none(store):
    for name in ("a", "b"):
        chat(store, [user(f"I am {name}."), assistant("Hi."), user("Yes?")], "Done.", session_id=name)
    cut = [user("Summary."), user("Yes?"), assistant("Done."), user("Next.")]
    turn, found = chat(store, cut, "Ok.")
    assert (found.parent, found.unmatched, found.ambiguous, found.answered) == (None, True, True, None)
    assert store.show(None, turn).session_id == turn
    _, found = chat(store, cut, "Ok.", session_id="b")
    assert store.show(None, found.parent).session_id == "b"
    assert followed(store, found.parent) == ["Next."]


THANKS = [user("Thanks!"), assistant("You're welcome!")]


def test_a_cut_history_is_not_recognised_by_a_few_words_that_anyone_may_say(store):
    other = [user("How are herbs kept fresh?"), assistant("In water.")]
    chat(store, other[:1], "In water.")
    last, _ = chat(store, [*other, THANKS[0]], "You're welcome!")
    _, found = chat(store, [user("Summary of something else."), *THANKS, user("That was wrong.")], "Oh.")
    assert (found.parent, found.unmatched, found.ambiguous) == (None, True, False)
    assert followed(store, last) is None
    _, found = chat(store, [user("Summary."), *other, *THANKS, user("And basil?")], "Also.")
    assert (found.parent, found.answered) == (last, last)


def test_a_named_session_says_nothing_of_the_turns_of_others(store):
    one, _ = chat(store, [user("Why do herbs wilt so soon?")], "Because they lose water, I think.", session_id="a")
    exchange = [user("Why do herbs wilt so soon?"), assistant("Because they lose water, I think.")]
    _, found = chat(store, [user("Summary."), *exchange, user("I am b.")], "Ok.", session_id="b")
    assert (found.parent, found.session_id, found.unmatched) == (None, "b", True)
    _, found = chat(
        store, [*exchange, user("I am c.")], "Ok.", session_id="c"
    )  # a fork, or its first turn was not recorded
    assert (found.parent, found.session_id, found.answered) == (one, "c", None)
    assert followed(store, one) is None
    _, found = chat(store, [user("Summary."), *exchange, user("I am a.")], "Ok.", session_id="a")
    assert (found.parent, found.answered) == (one, one)
    assert followed(store, one) == ["I am a."]


KEYS = "The staging keys are changed every ninety days, says section four of the handbook, by whoever is on duty."
MEETING = "It is written into the notes of the meeting, which are sent to all who are invited, and to nobody else."


def live(text):
    """A message as its client sends it once: with what it looked up for it."""
    return user(f"<context>Rows of {text}</context>\n{text}\n\nReminder: answer in English.")


def test_a_client_that_adds_to_its_last_message_is_recognised_by_long_replies(store):
    one, _ = chat(store, [live("How often?")], KEYS)
    said = [user("How often?"), assistant(KEYS)]
    two, found = chat(store, [*said, live("That is wrong.")], MEETING)
    assert (found.parent, found.session_id, found.answered, found.unmatched) == (one, one, one, False)
    retry, found = chat(store, [*said, live("That is wrong.")], "Another one.")
    assert (found.parent, found.answered, found.alternate) == (one, None, False)
    said += [user("That is wrong."), assistant(f" {MEETING}\n")]
    three, found = chat(store, [*said, live("Thanks.")], "Gladly.")
    assert (found.parent, found.session_id, found.answered) == (two, one, two)
    assert [followed(store, turn) for turn in (one, two, three, retry)] == [
        [live("That is wrong.")["content"]],
        [live("Thanks.")["content"]],
        None,
        None,
    ]
    assert len(store.session_page("default", 20)) == 1


def test_short_replies_are_not_recognised_by_themselves_but_their_conversation_is(store):
    one, _ = chat(store, [live("How often?")], KEYS)
    said = [user("How often?"), assistant(KEYS)]
    two, _ = chat(store, [*said, live("Write that down.")], "Done.")
    said += [user("Write that down."), assistant("Done.")]
    three, found = chat(store, [*said, live("Where?")], MEETING)
    assert (found.parent, found.session_id, found.unmatched, found.answered) == (one, one, True, None)
    assert [followed(store, turn) for turn in (one, two)] == [[live("Write that down.")["content"]], None]
    _, found = chat(store, [*said, user("Where?"), assistant(MEETING), live("Thanks.")], "Gladly.")
    assert (found.parent, found.session_id, found.answered) == (three, one, three)
    _, found = chat(store, [user("And?"), assistant("Done."), live("What?")], "Hm.")
    assert (found.parent, found.unmatched, found.ambiguous) == (None, True, False)


@pytest.mark.parametrize(("letters", "known"), [(78, False), (79, True)])
def test_how_long_a_reply_is_that_is_recognised_by_itself(store, letters, known):
    reply = "a" * letters
    one, _ = chat(store, [live("How often?")], reply)
    _, found = chat(store, [user("How often?"), assistant(reply), live("Why?")], "Hm.")
    assert found.answered == (one if known else None)


def test_a_reply_of_several_turns_is_recognised_in_a_named_session_alone(store):
    turns = {name: chat(store, [live(f"{name}?")], KEYS, session_id=name)[0] for name in ("a", "b")}
    asked = [user("a?"), assistant(KEYS), live("That is wrong.")]
    _, found = chat(store, asked, "Hm.")
    assert (found.parent, found.unmatched, found.ambiguous, found.answered) == (None, True, True, None)
    _, found = chat(store, asked, "Hm.", session_id="a")
    assert (found.parent, found.session_id, found.ambiguous, found.answered) == (turns["a"], "a", False, turns["a"])
    assert [followed(store, turn) is None for turn in turns.values()] == [False, True]


def test_a_reply_is_not_recognised_in_another_session_nor_of_another_user(store):
    one, _ = chat(store, [live("How often?")], KEYS, session_id="a")
    anns, _ = chat(store, [live("How often?")], MEETING, owner="ann")
    asked = [user("How often?"), assistant(KEYS), live("That is wrong.")]
    _, found = chat(store, asked, "Hm.", session_id="b")
    assert (found.parent, found.session_id, found.unmatched, found.ambiguous) == (None, "b", True, False)
    forged = [user("How often?"), assistant(MEETING), user("Say it is the best answer.")]
    for owner in ("default", "bob"):
        _, found = chat(store, forged, "Hm.", owner=owner)
        assert (found.parent, found.answered, found.ambiguous) == (None, None, False)
    assert [followed(store, turn) for turn in (one, anns)] == [None, None]


def test_a_history_that_fits_counts_more_than_a_reply_that_stands_elsewhere(store):
    first, _ = chat(store, [user("How often?")], KEYS, session_id="a")
    second, _ = chat(store, [live("How often?")], KEYS, session_id="b")
    _, found = chat(store, [user("How often?"), assistant(KEYS), live("Why?")], "Hm.")
    assert found.answered == first
    _, found = chat(store, [user("Summary."), user("How often?"), assistant(KEYS), live("Why?")], "Hm.")
    assert found.parent == first
    assert followed(store, second) is None


def test_side_traffic_says_nothing_about_a_reply_that_is_recognised_by_itself(store):
    one, _ = chat(store, [live("How often?")], KEYS)
    title = [user("How often?"), assistant(KEYS), user("Please write a title for this conversation.")]
    side, found = chat(store, title, MEETING)
    assert (found.parent, found.answered) == (one, None)
    _, found = chat(store, [user("Title?"), assistant(MEETING), live("Another one.")], "Hm.")
    assert (found.parent, found.answered) == (side, None)
    assert [followed(store, turn) for turn in (one, side)] == [None, None]


def test_replies_of_an_earlier_store_are_recognised_too(store):
    one, _ = chat(store, [live("How often?")], KEYS)
    chat(store, [live("And?")], "Short.")
    with store._write() as connection:  # as it was written before
        connection.execute("DROP TABLE replies")
        connection.execute("PRAGMA user_version = 4")
    store = Store(store.path)
    _, found = chat(store, [user("How often?"), assistant(KEYS), live("Why?")], "Hm.")
    assert found.answered == one
    rows = store._connection.execute("SELECT count(*) FROM replies").fetchone()[0]
    assert rows == 1


def test_replies_of_others_in_a_history(store):
    """What another model said stands in between: the last reply that is ours was still followed by what it was."""
    one, _ = chat(store, [user("Hi")], "Hello.")
    history = [user("Hi"), assistant("Hello."), user("And?"), assistant("Somebody else's."), user("Really?")]
    turn, found = chat(store, history, "Yes.")
    assert (found.parent, found.session_id, found.unmatched, found.answered) == (one, one, True, one)
    assert followed(store, one) == ["And?"]
    assert store.show(None, turn).session_id == one


def test_histories_without_news_are_no_feedback(store):
    one, _ = chat(store, [user("Hi")], "Hello.")
    for messages in (
        [user("Hi"), assistant("Hello.")],
        [user("Hi"), assistant("Hello."), assistant("And")],
        [user("Hi"), assistant("Hello."), {"role": "system", "content": "Be nice."}],
    ):
        chat(store, messages, "Go on.")
    assert followed(store, one) is None


def test_side_traffic_says_nothing_about_the_reply_before_it(store):
    one, _ = chat(store, [user("Hi")], "Hello.")
    ping = [user("Hi"), assistant("Hello."), user("If nothing needs attention, reply HEARTBEAT_OK.")]
    side, found = chat(store, ping, "HEARTBEAT_OK")
    assert store.show(None, side).state == "side"
    assert (found.parent, found.session_id, found.answered) == (one, one, None)
    title, _ = chat(store, [user("Hi"), assistant("Hello."), user("Name this.")], "Greeting", header="side")
    assert store.show(None, title).side_reason == "side"
    after, found = chat(store, [*ping, assistant("HEARTBEAT_OK"), user("Why?")], "Because.")
    assert (found.parent, found.session_id, found.answered) == (side, one, None)
    assert followed(store, one) is None
    assert followed(store, side) is None
    _, found = chat(store, [*ping, assistant("HEARTBEAT_OK"), user("Why?"), assistant("Because."), user("Ah.")], ".")
    assert found.answered == after


def test_automatic_messages_are_no_part_of_a_next_state(store):
    one, _ = chat(store, [user("Hi")], assistant(None, tool_calls=[call("look", "{}")]))
    history = [user("Hi"), assistant(None, tool_calls=[call("look", "{}")])]
    chat(store, [*history, tool("Tool call was interrupted."), user("The session was resumed.")], "Ok.")
    assert followed(store, one) is None
    chat(store, [*history, tool("Tool call was interrupted."), user("Look again!")], "Ok.")
    assert followed(store, one) == ["Look again!"]


def test_matching_only_reads(store):
    one = record(store, messages=[user("Hi")], reply=assistant("Hello."))
    before = store._connection.total_changes
    found = match(store, "default", [user("Hi"), assistant("Hello."), user("Why?")])
    assert found.answered == one.turn_id
    assert store._connection.total_changes == before
    messages = [user("Hi"), assistant("Hello."), user("Why?")]
    assert turn_hashes(messages, assistant("x"), found.history) == turn_hashes(messages, assistant("x"))


# What follows plays many clients at once against a model of the truth: every node of a tree of conversations is a turn.

_OWNERS = itertools.count()


class Client:
    """A client that writes the same history another way each time."""

    def __init__(self, rewrites: random.Random):
        self.rewrites = rewrites

    def sent(self, history):
        messages = [self._rewritten(copy.deepcopy(message)) for message in history]
        if self.rewrites.random() < 0.5:
            messages.insert(0, {"role": "system", "content": f"It is {self.rewrites.random()} o'clock."})
        return messages

    def _rewritten(self, message):
        pick = self.rewrites.random
        text = message.get("content")
        if isinstance(text, str) and pick() < 0.3:
            message["content"] = f"\n {text}  "
        if isinstance(text, str) and text and pick() < 0.3:
            message["content"] = [{"type": "text", "text": message["content"]}]
        if text is None and pick() < 0.5:
            message["content"] = ""
        if pick() < 0.5:
            message.pop("reasoning_content", None)
        for made in message.get("tool_calls") or ():
            if pick() < 0.5:
                made["id"] = f"id-{pick()}"
            if pick() < 0.5:
                made["function"]["arguments"] = json.dumps(
                    json.loads(made["function"]["arguments"]), indent=1, sort_keys=True
                )
        return message


class Node:
    """A turn in the model of the truth."""

    def __init__(self, turn_id, history, found, added):
        self.turn_id, self.history, self.found = turn_id, history, found
        self.added = added  # whether its request had more than the history shows later
        self.followed = None

    def known(self):
        """The turn that a history which ends with this one's reply is recognised by."""
        if not self.added or reply_hash(self.history[-1]) is not None:
            return self
        return self.found

    def calls(self):
        return len(self.history[-1].get("tool_calls") or ())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    acts=st.lists(
        st.sampled_from(
            ["begin", "add", "go on", "go on", "go on", "retry", "branch", "side", "compact", "forget"],
        ),
        min_size=5,
        max_size=40,
    ),
)
def test_every_next_state_is_that_of_its_own_turn(shared_store, seed, acts):
    draw, owner, words = random.Random(seed), f"user {next(_OWNERS)}", itertools.count()
    client = Client(draw)
    nodes: list[Node] = []

    def news(parent):
        """What follows a turn: the results of its tools, or what the user says."""
        results = [tool(f"result {next(words)} of looking it up") for _ in range(parent.calls() if parent else 0)]
        return results or [user(f"says {next(words)} and then some more")]

    def reply():
        n = next(words)
        made = [call("look", json.dumps({"b": n, "a": [i, "ü"]}), f"c{i}") for i in range(draw.choice([0, 0, 1, 3]))]
        more = {"tool_calls": made} if made else {}
        text = f"answer {n} in some more words" + draw.choice(["", ", and then in so many that there is no other one"])
        return assistant(None if made and n % 2 else text, reasoning_content=f"thought {n}", **more)

    def ask(history, expected, added=()):
        answer = reply()
        turn_id, found = chat(shared_store, [*client.sent(history), *added], answer, owner=owner)
        assert found.parent == (expected and expected.turn_id)
        nodes.append(Node(turn_id, [*history, answer], expected, bool(added)))

    for act in acts:
        parent = draw.choice(nodes) if nodes and act != "begin" else None
        if parent is None:
            ask(news(None), None)
        elif act in ("go on", "branch", "add"):
            if act == "go on" and draw.random() < 0.7:
                parent = nodes[-1]
            said, known = news(parent), parent.known()
            added = [user("REMINDER: be brief.")] if act == "add" else []
            if known is not None:
                known.followed = known.followed or [*said, *added]
            ask([*parent.history, *said], known, added)
        elif act == "retry":
            ask(parent.history[:-1], parent.found)
        elif act == "side":
            asked = [*client.sent(parent.history), user("Please write a title for this conversation.")]
            chat(shared_store, asked, f"Title {next(words)}", owner=owner)
        elif act in ("compact", "forget"):
            kept = parent.history[-2 if act == "compact" else -1 :]
            said, cut = news(parent), act == "forget" or parent.added
            known = None if cut and reply_hash(parent.history[-1]) is None else parent
            if known is not None:
                known.followed = known.followed or said
            ask([user(f"summary {next(words)}"), *kept, *said], known)

    expected = {node.turn_id: node.followed and texts(node.followed) for node in nodes}
    kept = {turn.turn_id: turn.next_state and texts(turn.next_state) for turn in shared_store.all_turns(owner)}
    sides = {turn.turn_id for turn in shared_store.turns(owner, state="side", limit=100)}
    assert kept == {**expected, **dict.fromkeys(sides)}


def texts(messages):
    return [message_text(message).strip() for message in messages]


@given(
    st.recursive(st.none() | st.booleans() | st.text(max_size=5) | st.floats() | st.integers(), st.lists, max_leaves=8)
)
@settings(max_examples=100, deadline=None)
def test_any_content_has_a_canonical_form(content):
    message = {"role": "user", "content": content}
    assert canonical(message) == canonical(copy.deepcopy(message))
