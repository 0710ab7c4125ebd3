"""A process that writes may be killed at any moment: what it was told is written is there, whole, and once."""

import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

from trl_openclaw.live.store import Store

POINTS = 50

WRITER = """
import json, sys
sys.path.insert(0, sys.argv[2])
from live_traffic import chat, user
from trl_openclaw import Verdict
from trl_openclaw.live.records import TokenScores
from trl_openclaw.live.store import Store

store = Store(sys.argv[1])
name, history = sys.argv[3], []

def say(*done):
    print(json.dumps(done), flush=True)

for i in range(100_000):
    history.append(user(f"{name} says {i}. " + "word " * 200))
    turn_id, found = chat(store, history, f"Answer {i} to {name}.", owner=name)
    history.append({"role": "assistant", "content": f"Answer {i} to {name}."})
    say("turn", turn_id, found.answered)
    if found.answered:
        store.add_verdict(found.answered, Verdict(-1, "negative", ("Be brief.",)))
        say("verdict", found.answered)
        batch = store.claim(name, 1, 0)
        if batch is not None:
            say("batch", batch.batch_id, [turn.turn_id for turn in batch.turns])
            scores = TokenScores([0.0], [0.0], [0.0])
            store.add_token_scores(batch.batch_id, {turn.turn_id: scores for turn in batch.turns})
            store.end_batch(batch.batch_id, "trained" if i % 3 else "released")
            say("end", batch.batch_id)
    history[:] = history[-8:]
"""


def killed_writer(path: Path, name: str, delay: float) -> list[list]:
    """What a writer said it had done before it was killed, `delay` seconds after its first word."""
    command = [sys.executable, "-c", WRITER, str(path), str(Path(__file__).parents[1]), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        said = [writer.stdout.readline()]
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        said += writer.stdout.readlines()
    assert writer.returncode == -signal.SIGKILL
    return [json.loads(line) for line in said if line.endswith("\n")]


def test_no_turn_is_lost_and_none_is_trained_twice(tmp_path):
    path = tmp_path / "store.db"
    delays = random.Random(7)
    kinds: dict[str, int] = {}
    for point in range(POINTS):
        name = f"writer {point}"
        done = killed_writer(path, name, delays.uniform(0, 0.2))
        with sqlite3.connect(path) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        connection.close()
        store = Store(path)
        kept = {turn.turn_id: turn for turn in store.all_turns(name)}
        for kind, *what in done:
            kinds[kind] = kinds.get(kind, 0) + 1
            if kind == "turn":
                turn_id, answered = what
                assert kept[turn_id].reply["content"].endswith(f"to {name}.")
                assert answered is None or kept[answered].next_state_told_by == turn_id
            elif kind == "verdict":
                assert kept[what[0]].verdict.hints == ("Be brief.",)
            elif kind == "end":
                assert what[0] not in {batch.batch_id for batch in store.open_batches(name)}
        turns_said = sum(kind == "turn" for kind, *_ in done)
        assert turns_said <= len(kept) <= turns_said + 1  # the last may be written and not said to be
        uses = store._connection.execute(
            "SELECT u.turn, t.turn_id, u.batch_id, coalesce(e.outcome, 'open') AS outcome FROM uses u "
            "JOIN turns t ON t.number = u.turn LEFT JOIN batch_ends e USING (batch_id) WHERE t.user = ?",
            (name,),
        ).fetchall()
        claimed = {(turn, what[0]) for kind, *what in done if kind == "batch" for turn in what[1]}
        assert claimed <= {(use["turn_id"], use["batch_id"]) for use in uses}
        trained = [use["turn"] for use in uses if use["outcome"] != "released"]
        assert len(trained) == len(set(trained))
        store.close()
    assert all(kinds.get(kind, 0) > POINTS / 5 for kind in ("turn", "verdict", "batch", "end")), kinds
