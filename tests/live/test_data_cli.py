"""`trl-openclaw data`: readable tables, one clear line for what does not exist, and JSON for programs."""

import json
import os
import subprocess
import sys

import pytest
from live_traffic import assistant, chat, ready_turn, record, user

from trl_openclaw import cli
from trl_openclaw.live.store import Store


@pytest.fixture
def live_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path / "live"


@pytest.fixture
def store(live_dir):
    return Store(live_dir / "store.db", clock=lambda: 86_400.0)


@pytest.fixture
def data(live_dir, capsys):
    """Runs the command; gives its exit code and what it printed."""

    def run(*args):
        code = cli.main(["data", args[0], "--live_dir", str(live_dir), *args[1:]])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def failed(result):
    """The one line of an error."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("trl-openclaw data: error: ")
    assert err.count("\n") == 1
    return err


def test_turns_are_listed(store, data):
    first = ready_turn(
        store, user="ann", session_id="herbs", reply=assistant("Put them\n  in \x1b[31mwater " + "!" * 200)
    )
    record(store, user="bob", reply=assistant(None, tool_calls=[{"function": {"name": "look", "arguments": "{}"}}]))
    code, out, _ = data("list")
    heads, bobs, anns, total = out.splitlines()
    assert code == 0
    assert heads.split() == ["turn", "user", "session", "recorded", "state", "score", "hints", "reply"]
    assert anns.split()[:2] == [first.turn_id[:17], "ann"]
    assert "  ready  -1     1      Put them in �[31mwater !!!" in anns
    assert anns.endswith("!…")
    assert len(anns) == 120
    assert bobs.endswith("[calls look({})]")
    assert [line.index("  open ") for line in (bobs,)] == [anns.index("  ready")]
    assert total == "2 turns: 1 open, 1 ready"
    assert data("list", "--user", "ann")[1].splitlines()[2:] == ["1 turn: 1 ready"]
    assert data("list", "--session", "her")[1].count("herbs") == 1
    assert data("list", "--state", "trained")[1].count("chatcmpl-") == 0
    assert data("list", "--limit", "1")[1].count("[calls") == 1
    (row,) = json.loads(data("list", "--user", "ann", "--json")[1])
    assert (row["turn_id"], row["judge_score"], row["hints"], row["state"]) == (
        first.turn_id,
        -1,
        ["Be brief."],
        "ready",
    )


def test_one_turn_is_shown(store, data):
    one, _ = chat(store, [{"role": "system", "content": "Be nice."}, user("Hi\x07")], "Hello.", owner="ann")
    two, _ = chat(store, [user("Hi\x07"), assistant("Hello."), user("Shorter,\nplease.")], "Hey.", owner="ann")
    ready = ready_turn(store)
    batch = store.claim("default", 1, 0)
    code, out, _ = data("show", "--turn", two[:20])
    assert code == 0
    assert f"turn      {two}, number 2, of user ann" in out
    assert f"session   {one}, after {one}" in out
    assert "tokens    3 of the prompt, 2 of the reply" in out
    assert "\nreply\n  Hey.\n" in out
    out = data("show", "--turn", one)[1]
    assert "\nsystem\n  Be nice.\n\nuser\n  Hi�\n\nreply\n  Hello.\n\nthen, user\n  Shorter,\n  please.\n" in out
    out = data("show", "--turn", ready.turn_id)[1]
    assert "\nverdict   negative, by judge (votes: -1)\n\nhint, by judge\n  Be brief.\n" in out
    assert f"\nbatch     {batch.batch_id}, open" in out
    shown = json.loads(data("show", "--turn", one, "--json")[1])
    assert shown["next_state"] == [user("Shorter,\nplease.")]


def test_the_turn_to_show_is_named_with_or_without_its_option(store, data, capsys):
    turn = ready_turn(store, user="ann").turn_id
    shown = data("show", "--turn", turn)
    assert shown[0] == 0
    assert data("show", turn) == data("show", turn[:20]) == data("show", "--user", "ann", turn) == shown
    assert json.loads(data("show", turn, "--json")[1])["turn_id"] == turn
    assert "There is no turn 'none'." in failed(data("show", "none"))
    for twice in ((turn, "--turn", turn), ("--turn", turn, turn)):
        with pytest.raises(SystemExit, match="2"):
            data("show", *twice)
        assert "not allowed with" in capsys.readouterr().err


def test_turns_are_written_and_taken_in_again(store, data, tmp_path, capsys):
    turns = [ready_turn(store, user="ann").turn_id for _ in range(3)]
    code, out, _ = data("export", "--user", "ann")
    path = out.split(" in ")[1].strip()
    assert (code, out.startswith("3 turns in ")) == (0, True)
    assert cli.main(["data", "import", "--live_dir", str(tmp_path / "other"), path]) == 0
    assert [turn.turn_id for turn in Store(tmp_path / "other" / "store.db").all_turns()] == turns
    capsys.readouterr()
    assert data("import", path)[:2] == (0, "0 turns taken in, 3 known already, 0 next states found\n")
    found = json.loads(data("export", "--turn", turns[0], "--format", "dataset", "--json")[1])
    assert found["turns"] == 1
    assert found["path"].endswith("000002/dataset")


def test_a_log_is_taken_in_as_far_as_it_can_be_read(live_dir, data, tmp_path):
    pair = {"request": {"messages": [user("Hi")]}, "response": {"choices": [{"message": assistant("Hello.")}]}}
    log = tmp_path / "log.jsonl"
    log.write_bytes(json.dumps(pair).encode() + b"\n{\xff\n")
    code, out, err = data("import", str(log), "--user", "ann")
    assert code == 1
    assert out == "1 turn taken in, 0 known already, 0 next states found, 1 line could not be read\n"
    assert err.startswith("trl-openclaw data: line 2: ")
    assert Store(live_dir / "store.db").users() == ["ann"]
    code, _, err = data("import", str(tmp_path / "none.jsonl"))
    assert (code, err.count("\n")) == (1, 1)


def test_a_log_can_come_from_a_pipe(live_dir):
    pair = {"request": {"messages": [user("Hi")]}, "response": {"choices": [{"message": assistant("Hello.")}]}}
    done = subprocess.run(
        [sys.executable, "-m", "trl_openclaw.cli", "data", "import", "--live-dir", str(live_dir), "--json", "-"],
        input=json.dumps(pair),
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["turns"] == 1


def test_turns_are_deleted(store, data):
    turns = [ready_turn(store, user="ann", session_id=f"s{i}") for i in range(3)]
    path, _ = store.export("ann")
    code, out, _ = data("delete", "--user", "ann", "--session", "s1")
    assert (code, out) == (0, f"1 turn of 1 session deleted, and exports with their text: {path.parent}\n")
    assert data("delete", "--turn", turns[0].turn_id)[:2] == (0, "1 turn of 1 session deleted\n")
    ready_turn(store, user="ann", session_id="s3")
    assert data("delete", "--user", "ann")[1] == "2 turns of 2 sessions deleted\n"
    ready_turn(store, user="ann")
    assert json.loads(data("delete", "--user", "ann", "--json")[1]) == {"turns": 1, "sessions": 1, "exports": []}
    assert data("delete", "--user", "ann")[:2] == (0, "0 turns of 0 sessions deleted\n")
    assert store.users() == []
    assert "say what to delete" in failed(data("delete"))
    assert "at once" in failed(data("delete", "--session", "a", "--turn", "b"))


def test_hints_are_edited(store, data):
    turn = ready_turn(store)
    code, out, _ = data("edit-hint", "--turn", turn.turn_id, "Use one sentence.", "No lists.")
    assert (code, out) == (0, f"{turn.turn_id} has 2 hints now\n")
    assert store.show(None, turn.turn_id).verdict.hints == ("Use one sentence.", "No lists.")
    assert data("edit-hint", "--turn", turn.turn_id, "Be brief.")[1] == f"{turn.turn_id} has 1 hint now\n"
    assert data("edit-hint", "--turn", turn.turn_id)[1] == f"{turn.turn_id} has no hints now\n"
    assert store.show(None, turn.turn_id).verdict.hints == ()


def test_users_opt_out_and_in(store, data):
    turn = ready_turn(store, user="ann")
    assert data("opt-out", "--user", "ann")[:2] == (0, "turns of ann are neither judged nor trained from now on\n")
    assert store.show(None, turn.turn_id).state == "opted_out"
    assert json.loads(data("opt-out", "--user", "ann", "--off", "--json")[1]) == {"user": "ann", "opted_out": False}
    assert not store.opted_out("ann")
    assert "say whose" in failed(data("opt-out"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("list", "--user", "nobody"), "There is no user 'nobody'."),
        (("list", "--session", "none"), "There is no session 'none'."),
        (("show",), "Say which turn: --turn ID."),
        (("show", "none"), "There is no turn 'none'."),
        (("show", "--turn", "none"), "There is no turn 'none'."),
        (("show", "--turn", "chatcmpl-"), "Several turns begin with 'chatcmpl-'"),
        (("show", "--turn", "chatcmpl-a", "--user", "bob"), "There is no turn 'chatcmpl-a' of user 'bob'."),
        (("export", "--turn", "none"), "There are no such turns to export."),
        (("export", "--user", "nobody"), "There are no such turns to export."),
        (("delete", "--user", "nobody"), "There is no user 'nobody'."),
        (("delete", "--turn", "none"), "There is no turn 'none'."),
        (("delete", "--session", "none", "--user", "ann"), "There is no session 'none' of user 'ann'."),
        (("edit-hint", "--turn", "none", "Be brief."), "There is no turn 'none'."),
    ],
)
def test_what_does_not_exist_is_one_line(store, data, args, message):
    for turn_id in ("chatcmpl-a1", "chatcmpl-b"):
        record(store, turn_id=turn_id, user="ann")
    assert message in failed(data(*args))
    assert len(store.turns()) == 2


def test_without_a_store_nothing_is_made(live_dir, data):
    for args in (("list",), ("delete", "--user", "ann"), ("opt-out", "--user", "ann")):
        assert f"There is no store at {live_dir / 'store.db'}" in failed(data(*args))
    assert not live_dir.exists()


def test_a_store_that_is_none_is_one_line(live_dir, data):
    live_dir.mkdir()
    (live_dir / "store.db").write_text("hello " * 1000)
    code, out, err = data("list")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "not a database" in err


def test_mistakes_in_the_command_line_show_how_it_goes(capsys):
    for args in ([], ["lisst"], ["list", "--turn", "x"], ["list", "--state", "done"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["data", *args])
        assert "usage: trl-openclaw data" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        cli.main(["data", "--help"])
    out = capsys.readouterr().out
    assert all(
        f"\n    {name}" in out for name in ("list", "show", "export", "import", "delete", "edit-hint", "opt-out")
    )
