"""People's say over their data: what is deleted is nowhere any more, and exports hold what is there."""

import json
import os
import random
import subprocess
import sys
import threading

import pytest
from datasets import load_from_disk
from live_traffic import assistant, chat, ready_turn, record, turn_ids, user

from trl_openclaw import Verdict, Vote
from trl_openclaw.errors import StoreBusyError, StoreError, UnknownTurnError
from trl_openclaw.live import exports
from trl_openclaw.live.database import hashed, pack
from trl_openclaw.live.records import TokenScores
from trl_openclaw.live.store import Store


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "live" / "store.db")


def bytes_of(store):
    """Everything in the live folder."""
    return b"\0".join(path.read_bytes() for path in sorted(store.path.parent.rglob("*")) if path.is_file())


class Secret:
    """A conversation of two turns in which every text, wherever it may lie, has a word of its own."""

    PLACES = (
        *("system", "asked", "reasoning", "argument", "tool", "reply", "followed", "second", "schema", "sampling"),
        *("correction", "hint", "vote", "edited", "prefers", "token", "long"),
    )

    def __init__(self, store, owner, session_id=None):
        self.word = {place: f"{place}-{owner}-{session_id}-zyx" for place in self.PLACES}
        w = self.word
        function = {"name": "look", "arguments": json.dumps({"at": w["argument"]})}
        messages = [
            {"role": "system", "content": w["system"]},
            user(w["asked"]),
            assistant(None, tool_calls=[{"id": "c", "type": "function", "function": function}]),
            {"role": "tool", "content": w["tool"]},
        ]
        reply = assistant(w["reply"], reasoning_content=w["reasoning"])
        tools = [{"type": "function", "function": {"name": "look", "description": w["schema"]}}]
        # Ids are text, too, to whoever has the tokenizer.
        self.ids = tuple(hash((owner, session_id, i)) % 50_000 for i in range(64))
        self.owner = owner
        self.first, _ = chat(
            store,
            messages,
            reply,
            owner=owner,
            session_id=session_id,
            tools=tools,
            sampling={"stop": w["sampling"]},
            prompt_ids=self.ids,
        )
        follow = [*messages, reply, user(w["followed"] + w["long"] * 3000)]
        self.second, _ = chat(store, follow, w["second"], owner=owner, session_id=session_id, prompt_ids=self.ids * 2)
        store.add_verdict(self.first, Verdict.from_votes([Vote(-1, hint=w["hint"], raw=w["vote"])]))
        store.edit_hint(owner, self.first, [w["edited"]])
        store.add_feedback(owner, self.second, -1, w["correction"], f"key {session_id}")
        batch = store.claim(owner, 2, 0)
        scores = TokenScores([0.0], [0.0], [0.0], [[[w["prefers"], 0.5, 0.25]]], [w["token"]])
        store.add_token_scores(batch.batch_id, {turn.turn_id: scores for turn in batch.turns})

    def traces(self, store):
        """Where the folder still holds anything of it."""
        data = bytes_of(store)
        found = {place for place, word in self.word.items() if word.encode() in data}
        return found | ({"ids"} if pack("i", self.ids) in data else set())


ALL = {*Secret.PLACES, "ids"}


def both_exports(store, owner=None):
    return [store.export(owner, form=form)[0].parent for form in ("jsonl", "dataset")]


def test_deleting_a_user_leaves_nothing_of_them(store):
    ann, bob = Secret(store, "ann"), Secret(store, "bob")
    hers, everyones = both_exports(store, "ann"), both_exports(store)
    his = both_exports(store, "bob")
    gateway = Store(store.path)
    assert len(gateway.turns()) == 4  # has a connection open, as the gateway does
    assert ann.traces(store) == bob.traces(store) == ALL
    done = gateway.delete("ann")
    assert (done.turns, done.sessions) == (2, 1)
    assert sorted(done.exports) == sorted(map(str, [*hers, *everyones]))
    assert ann.traces(store) == set()
    assert bob.traces(store) == ALL
    assert all(path.is_dir() for path in his)
    assert store.users() == ["bob"]
    assert store.open_batches("ann")[0].turns == ()
    store.end_batch(store.open_batches("ann")[0].batch_id, "trained")
    rows = store._connection.execute("SELECT user, what, id, turns FROM deletions").fetchall()
    assert [tuple(row) for row in rows] == [("ann", "user", hashed("ann"), 2)]


@pytest.mark.parametrize("seed", [18, 46])
def test_rows_that_moved_leave_no_copies(store, seed):
    """With these seeds SQLite leaves copies in pages that other rows go on using."""
    draw = random.Random(seed)
    for place in range(100):
        owner = draw.choice(["ann", "bob"])

        def text(most, word="secret-zyx " if owner == "ann" else "plain "):
            return word * draw.randint(1, most)

        asked, reply = [user(text(draw.choice([1, 30, 900])))], assistant(text(20))
        turn = record(store, turn_id=f"turn-{place:032}", user=owner, messages=asked, reply=reply)
        if draw.random() < 0.7:
            store.add_next_state(turn.turn_id, [user(text(30))])
        if draw.random() < 0.7:
            store.add_verdict(turn.turn_id, Verdict(-1, "negative", (text(30),)))
        if draw.random() < 0.3:
            store.add_feedback(owner, turn.turn_id, -1, text(9), str(place))
    store.delete("ann")
    assert b"secret-zyx" not in bytes_of(store)
    assert b"plain" in bytes_of(store)


def test_deleting_a_session_leaves_the_others(store):
    one, two = Secret(store, "ann", "one"), Secret(store, "ann", "two")
    assert store.delete("ann", session_id="one").turns == 2
    assert (one.traces(store), two.traces(store)) == (set(), ALL)
    assert {turn.session_id for turn in store.turns()} == {"two"}


def test_a_session_of_several_users_needs_its_owner(store):
    for owner in ("ann", "bob"):
        record(store, user=owner, session_id="main")
    with pytest.raises(StoreError, match="say whose"):
        store.delete(session_id="main")
    assert store.delete("bob", session_id="main").turns == 1
    assert store.delete(session_id="main").turns == 1


def test_with_a_turn_goes_what_goes_on_from_it_and_what_it_told(store):
    opening = [user("asked-zyx")]
    first, _ = chat(store, opening, "kept-zyx")
    kept = [*opening, assistant("kept-zyx")]
    second, _ = chat(store, [*kept, user("complaint-zyx")], "sorry-zyx")
    third, _ = chat(store, [*kept, user("complaint-zyx"), assistant("sorry-zyx"), user("fine-zyx")], "good-zyx")
    branch, _ = chat(store, [*kept, user("other-zyx")], "branch-zyx")
    store.add_verdict(first, Verdict(-1, "negative", ("hint from complaint-zyx",)))
    store.add_feedback("default", first, 1, None, "thumb")
    assert store.delete("default", turn_id=second).turns == 2
    data = bytes_of(store)
    assert [word for word in (b"complaint-zyx", b"sorry-zyx", b"fine-zyx", b"good-zyx") if word in data] == []
    assert all(word in data for word in (b"asked-zyx", b"kept-zyx", b"other-zyx", b"branch-zyx"))
    assert {turn.turn_id for turn in store.turns()} == {first, branch}
    left = store.show(None, first)
    assert (left.next_state, left.verdict.score, left.verdict.hints) == (None, 1, ())
    with pytest.raises(UnknownTurnError):
        store.show(None, third)


def test_with_a_turn_goes_what_goes_on_after_a_reply_that_nobody_recorded(store):
    opening = [user("asked-zyx"), assistant("said-zyx")]
    first, _ = chat(store, opening[:1], "said-zyx")
    other = record(store, messages=[user("other-zyx")]).turn_id
    chat(store, [*opening, user("Why?"), assistant("Another model's."), user("Really?")], "Yes.")
    assert store.delete("default", turn_id=first).turns == 2
    assert [turn.turn_id for turn in store.turns()] == [other]
    assert [word for word in (b"asked-zyx", b"said-zyx") if word in bytes_of(store)] == []


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kept", ["said-zyx and so", "Edited."])
def test_with_a_turn_goes_what_goes_on_from_its_reply_in_other_words(store, depth, kept):
    opening = [user("Hi"), assistant("Hello.")] * depth
    if depth:
        chat(store, opening[:1], "Hello.")
    asked = [*opening, user("asked-zyx")]
    cut, _ = chat(store, asked, "said-zyx and so on", finish_reason="disconnect")
    again, _ = chat(store, asked, "again-zyx")
    stays, _ = chat(store, [*asked, assistant("again-zyx"), user("Go on.")], "Then.")
    reworded = [*asked, assistant(kept), user("Go on.")]
    chat(store, reworded, "Then this.")
    chat(store, [*reworded, assistant("Then this."), user("And?")], "And that.")
    assert store.delete("default", turn_id=cut).turns == 3
    assert b"said-zyx" not in bytes_of(store)
    assert {again, stays} <= {turn.turn_id for turn in store.turns()}
    assert len(store.turns()) == 2 + depth


@pytest.mark.parametrize("whole", [False, True], ids=["turn", "session"])
@pytest.mark.parametrize(
    "quote",
    [
        "USER: My name is zyx,\nand I am ill.",
        json.dumps([user("My name is zyx,\nand I am ill.")]),
        "user:  my name is  ZYX, and I am ill",
        "(...) a remedy for zyx is sleep, and tea in the evening, and in the morning fresh air.",
    ],
)
def test_with_a_turn_goes_side_traffic_that_quotes_it(store, whole, quote):
    other, _ = chat(store, [user("What else is there to be done today?")], "Ok.")
    remedy = "a remedy for zyx is sleep, and tea in the evening, and in the morning fresh air."
    first, _ = chat(store, [user("My name is zyx,\nand I am ill.")], f"As far as is known {remedy}")
    asked = "### Task:\nGenerate a title.\n<chat_history>\n{}\n</chat_history>"
    titles = [chat(store, [user(asked.format(text))], "A title")[0] for text in (quote, "USER: What else is there?")]
    his, _ = chat(store, [user(asked.format(quote))], "A title", owner="bob")
    assert {turn.state for turn in store.turns() if turn.turn_id in (*titles, his)} == {"side"}
    assert store.delete("default", **({"session_id": first} if whole else {"turn_id": first})).turns == 2
    assert {turn.turn_id for turn in store.turns()} == {other, titles[1], his}


def test_side_traffic_that_quotes_only_what_stays_stays(store):
    history = [user("A question about the tides of the sea"), assistant("They come and go.")]
    first, _ = chat(store, history[:1], "They come and go.")
    title, _ = chat(store, [user("A question about the tides of the sea. They come and go.")], "Tides", header="title")
    notice, beat = user("<system-reminder>Today is Monday.</system-reminder>"), user("Anything to do? If not, say why.")
    history += [notice, user("Why?")]
    second, _ = chat(store, history, "Because of the moon.")
    chat(store, [*history, assistant("Because of the moon."), beat], "HEARTBEAT_OK", header="ping")
    others, _ = chat(store, [notice, beat], "HEARTBEAT_OK", header="ping")
    assert store.delete("default", turn_id=second).turns == 2
    assert {turn.turn_id for turn in store.turns()} == {first, title, others}


def test_side_traffic_that_others_go_on_from_stays_with_them(store):
    secret, _ = chat(store, [user("A greeting that many begin with")], "Hello.")
    ping = [user("Hey"), assistant("Hi."), user("Read HEARTBEAT.md: A greeting that many begin with")]
    side = record(store, kind="side", side_reason="ping", messages=ping, reply=assistant("HEARTBEAT_OK")).turn_id
    after = record(store, messages=[*ping, assistant("HEARTBEAT_OK"), user("Fine.")], parent=side).turn_id
    assert store.delete("default", turn_id=secret).turns == 1
    assert {turn.turn_id for turn in store.turns()} == {side, after}


def test_deleting_an_export_of_a_turn_whose_next_state_goes(store):
    first, _ = chat(store, [user("a")], "b", owner="ann")
    second, _ = chat(store, [user("a"), assistant("b"), user("complaint-zyx")], "d", owner="ann")
    path, _ = store.export("ann", turn_id=first)
    assert b"complaint-zyx" in path.read_bytes()
    assert store.delete("ann", turn_id=second).exports == (str(path.parent),)
    assert b"complaint-zyx" not in bytes_of(store)


def test_what_is_not_there_cannot_be_deleted(store):
    turn = record(store, user="ann")
    for ids in ({"turn_id": "none"}, {"session_id": "none"}, {}):
        with pytest.raises(UnknownTurnError, match="There is no"):
            store.delete("nobody", **ids)
        if ids:
            with pytest.raises(UnknownTurnError, match="There is no"):
                store.delete("nobody", **ids, missing_ok=True)
    with pytest.raises(UnknownTurnError, match="of user 'bob'"):
        store.delete("bob", turn_id=turn.turn_id)
    with pytest.raises(StoreError, match="Say what to delete"):
        store.delete()
    assert store.delete("nobody", missing_ok=True).turns == 0
    assert store.delete("ann", turn_id=turn.turn_id).turns == 1
    for owner in ("ann", None):  # a second attempt cleans up after a first that was interrupted
        assert store.delete(owner, turn_id=turn.turn_id).turns == 0
    with pytest.raises(UnknownTurnError, match="of user 'bob'"):
        store.delete("bob", turn_id=turn.turn_id)


def test_a_reader_that_keeps_the_log_in_use_is_named_and_deleting_again_helps(tmp_path):
    store = Store(tmp_path / "live" / "store.db", busy_seconds=0.2)
    ann = Secret(store, "ann")
    reader = Store(store.path)
    with reader._read() as connection:
        connection.execute("SELECT count(*) FROM turns").fetchone()
        with pytest.raises(StoreBusyError, match=r"delete it again\. .* log cannot be emptied"):
            store.delete("ann")
        assert store.turns() == []
    assert ann.traces(store)
    assert store.delete("ann").turns == 0
    assert ann.traces(store) == set()


KILLED = """
import os, sys
from pathlib import Path
from trl_openclaw.live import exports
from trl_openclaw.live.store import Store

store = Store(sys.argv[1])

def turns():
    yield from store.all_turns()
    os.kill(os.getpid(), 9)

with exports.exclusively(store.path.parent):
    exports.write(store.path.parent, turns(), "jsonl")
"""


def test_an_export_that_was_killed_is_no_export_and_is_cleaned_up(store):
    secrets = [Secret(store, "ann"), *(Secret(store, "ann", str(i)) for i in range(5))]
    done = subprocess.run([sys.executable, "-c", KILLED, str(store.path)], check=False)
    assert done.returncode == -9
    folder = store.path.parent / exports.FOLDER
    assert [path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")] == []
    assert any(path.is_dir() for path in folder.iterdir())
    store.delete("ann")
    assert [secret.traces(store) for secret in secrets] == [set()] * 6


def test_an_export_under_way_is_waited_for_and_removed(store):
    ann = Secret(store, "ann")
    under_way, go_on = threading.Event(), threading.Event()

    def slow_turns():
        yield from store.all_turns()
        store.close()
        under_way.set()
        assert go_on.wait(60)

    def write():
        with exports.exclusively(store.path.parent):
            exports.write(store.path.parent, slow_turns(), "jsonl")

    writing = threading.Thread(target=write)
    writing.start()
    assert under_way.wait(60)
    done = []
    deleting = threading.Thread(target=lambda: done.append(store.delete("ann")))
    deleting.start()
    deleting.join(0.3)
    assert not done
    go_on.set()
    writing.join(60)
    deleting.join(60)
    assert len(done[0].exports) == 1
    assert ann.traces(store) == set()


def test_lines_hold_all_there_is_of_a_turn(store):
    ready_turn(store, hint="Be brief.", tools=[{"type": "function", "function": {"name": "f"}}])
    side = record(store, kind="side", side_reason="title")
    path, count = store.export()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert count == len(rows) == 2
    assert rows[1]["side_reason"] == "title"
    assert rows[1]["turn_id"] == side.turn_id
    assert rows[1]["next_state"] is None
    row = rows[0]
    assert row["prompt"] == [user("What keeps herbs fresh?")]
    assert row["completion"] == [assistant("Water.")]
    assert row["next_state"] == user("Shorter, please.")
    assert (row["judge_score"], row["outcome"], row["hints"]) == (-1, "negative", ["Be brief."])
    assert (row["prompt_ids"], row["completion_ids"], row["logprobs"]) == ([5, 6, 7], [8, 9], [-0.5, -0.25])
    assert (row["model_version"], row["state"]) == ("base", "ready")
    with pytest.raises(UnknownTurnError, match="no such turns"):
        store.export("nobody")
    assert len(list((store.path.parent / exports.FOLDER).glob("[0-9]*"))) == 1
    assert os.stat(store.path.parent / exports.FOLDER).st_mode & 0o077 == 0


def test_a_dataset_is_for_training(store, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]
    ready_turn(store, user="trained")
    batch = store.claim("trained", 1, 0)
    calling = record(store, reply=assistant(None, tool_calls=[call]), tools=tools)
    store.add_next_state(calling.turn_id, [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}])
    parts = [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    ready_turn(store, messages=[user(parts)])
    record(store)
    record(store, kind="side")
    record(store, turn_id=next(turn_ids(held_out=True)))
    for owner in ("out", "trained", "default"):
        store.opt_out(owner)
    store.opt_out("default", False)
    record(store, user="out")
    store.end_batch(batch.batch_id, "trained")
    path, count = store.export(form="dataset")
    data = load_from_disk(str(path))
    assert count == len(data) == 3
    assert data[0]["completion"] == [assistant(None, tool_calls=[call])]
    assert data[0]["next_state"] == {"role": "tool", "content": "[tool]\n1\n\n[tool]\n2"}
    assert data[0]["tools"] == tools
    assert data[1]["prompt"] == [user(parts)]
    assert data["prompt"][2] == [user("What keeps herbs fresh?")]
    assert data["next_state"][1:] == [user("Shorter, please."), None]
    assert data["judge_score"][:] == [None, -1, None]
    assert data["hints"][:] == [[], ["Be brief."], []]
    assert data["completion_ids"][0] == [8, 9]
    assert {path.name for path in path.parent.iterdir()} == {"dataset", "manifest.json"}
    assert not (tmp_path / "cache").exists()


def test_our_trainers_train_on_an_exported_dataset(store, tmp_path):
    from tiny import tiny_llama, tiny_tokenizer
    from trainer_harness import SETTINGS

    from trl_openclaw import CombineConfig, CombineTrainer, RuleJudge

    for i in range(2):
        turn = record(store, messages=[user(f"Question {i}")])
        store.add_next_state(turn.turn_id, [user(f"Complaint {i}")])
    path, _ = store.export(form="dataset")
    seen = []

    def rule(turn):
        seen.append((turn.prompt_text, turn.next_state.text))
        return -1, "Be brief."

    trainer = CombineTrainer(
        tiny_llama(),
        judge=RuleJudge(rule),
        args=CombineConfig(str(tmp_path / "run"), **SETTINGS),
        train_dataset=load_from_disk(str(path)),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    assert set(seen) == {(f"Question {i}", f"Complaint {i}") for i in range(2)}
