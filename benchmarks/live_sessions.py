"""What it costs to record live traffic: many conversations at once, whose clients send no ids.

    python benchmarks/live_sessions.py
    python benchmarks/live_sessions.py --turns 1000 --sessions 100

Conversations take turns in random order; each request carries its conversation's whole history, as clients send it. For
each, the history is matched, the next state of the turn before is written down, and the new turn is recorded with
its token ids and log-probs, all in a real store. Afterwards every turn must have exactly the next state that its own
conversation went on with.

The last line is JSON: `{"turns": n, "attached": a, "missing": m, "wrong": w, "median_ms": t, "p99_ms": p,
"first_tenth_ms": f, "last_tenth_ms": l, "heap_growth_kib": k, "resident_growth_kib": r}`. Milliseconds are those of one
turn. Memory is compared between the first tenth and the end: Python's heap in a second, traced run, and what the
process holds, which includes SQLite's, in the first.
"""

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
import tracemalloc
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from trl_openclaw.live.canonical import turn_hashes
from trl_openclaw.live.records import NewTurn
from trl_openclaw.live.sessions import attach, match
from trl_openclaw.live.side_traffic import side_reason
from trl_openclaw.live.store import STORE_FILE, Store

_TOKENS = 200  # of a prompt, and of a reply


def record(store: Store, turn_id: str, messages: list[dict[str, Any]], reply: dict[str, Any]) -> None:
    """All that is done for one turn."""
    side = side_reason(messages)
    found = match(store, "default", messages, side=side is not None)
    attach(store, found, turn_id)
    turn = NewTurn(
        turn_id=turn_id,
        user="default",
        session_id=found.session_id or turn_id,
        parent=found.parent,
        kind="main" if side is None else "side",
        side_reason=side,
        messages=messages,
        tools=None,
        reply=reply,
        finish_reason="stop",
        prompt_ids=tuple(range(_TOKENS)),
        completion_ids=tuple(range(_TOKENS)),
        logprobs=(-0.5,) * _TOKENS,
        sampling={"temperature": 1.0},
        model="model",
        model_version="base",
    )
    store.record_turn(turn, turn_hashes(messages, reply, found.history))


def user_message(session: int, place: int) -> dict[str, Any]:
    """What is said before a session's reply number `place`. Openings are shared by ten sessions each."""
    text = f"Session {session} says {place}. " + "word " * 30 if place else f"Opening {session // 10}"
    return {"role": "user", "content": text}


def reply_to(session: int, place: int) -> dict[str, Any]:
    """A session's reply number `place`. The first ones are shared, too."""
    text = f"Answer {session}/{place}. " + "so " * 60 if place else f"Answer to opening {session // 10}"
    return {"role": "assistant", "content": text}


def request(session: int, place: int) -> list[dict[str, Any]]:
    """The messages that reply number `place` answers."""
    before = [said(session, i) for i in range(place) for said in (user_message, reply_to)]
    return [*before, user_message(session, place)]


def run(folder: Path, turns: int, sessions: int, after_turn: Callable[[int], None]) -> tuple[Store, array]:
    """Record the traffic.

    Args:
        folder: Where the store goes.
        turns: All turns; each session has as many as any other, or one more.
        sessions: Conversations.
        after_turn: Called with the number of turns so far.

    Returns:
        The store, and the seconds of each turn.
    """
    store = Store(folder / STORE_FILE)
    order = [i % sessions for i in range(turns)]
    random.Random(0).shuffle(order)
    places = [0] * sessions
    seconds = array("d", bytes(8 * turns))
    for count, session in enumerate(order):
        place = places[session]
        messages, reply = request(session, place), reply_to(session, place)
        started = time.perf_counter()
        record(store, turn_name(session, place), messages, reply)
        seconds[count] = time.perf_counter() - started
        places[session] += 1
        after_turn(count + 1)
    return store, seconds


def turn_name(session: int, place: int) -> str:
    """The id of a session's turn."""
    return f"chatcmpl-{session:016x}{place:016x}"


def check(store: Store, turns: int, sessions: int) -> tuple[int, int, int]:
    """How many next states are attached, missing and wrong.

    First turns of sessions with the same opening are the same to anyone without ids: each must have been followed by
    one of these sessions, no two by the same.
    """
    attached = missing = wrong = 0
    lengths = [len(range(session, turns, sessions)) for session in range(sessions)]
    followed: set[str] = set()
    for turn in store.all_turns():
        session, place = int(turn.turn_id[9:25], 16), int(turn.turn_id[25:], 16)
        said = None if turn.next_state is None else turn.next_state[-1]["content"]
        if said is None:
            missing += place + 1 < lengths[session] and place > 0
            continue
        attached += 1
        if place:
            wrong += not said.startswith(f"Session {session} says {place + 1}.")
        else:
            speaker = int(said.split()[1])
            wrong += speaker // 10 != session // 10 or said in followed
            followed.add(said)
    openings = sum(length > 1 for length in lengths)
    return attached, missing + openings - len(followed), wrong


def main() -> None:
    """Record, check and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=10_000)
    parser.add_argument("--sessions", type=int, default=1_000)
    args = parser.parse_args()
    tenth = args.turns // 10
    resident: dict[int, int] = {}
    heap: dict[int, int] = {}

    def measure(into: dict[int, int], read: Callable[[], int], count: int) -> None:
        if count in (tenth, args.turns):
            gc.collect()
            into[count] = read()

    with tempfile.TemporaryDirectory() as folder:
        memory = partial(measure, resident, lambda: psutil.Process().memory_info().rss)
        store, seconds = run(Path(folder), args.turns, args.sessions, memory)
        attached, missing, wrong = check(store, args.turns, args.sessions)
        store.close()
    with tempfile.TemporaryDirectory() as folder:
        tracemalloc.start()
        memory = partial(measure, heap, lambda: tracemalloc.get_traced_memory()[0])
        run(Path(folder), args.turns, args.sessions, memory)[0].close()
        tracemalloc.stop()
    result = {
        "turns": args.turns,
        "attached": attached,
        "missing": missing,
        "wrong": wrong,
        "median_ms": round(1000 * statistics.median(seconds), 3),
        "p99_ms": round(1000 * statistics.quantiles(seconds, n=100)[98], 3),
        "first_tenth_ms": round(1000 * statistics.median(seconds[:tenth]), 3),
        "last_tenth_ms": round(1000 * statistics.median(seconds[-tenth:]), 3),
        "heap_growth_kib": round((heap[args.turns] - heap[tenth]) / 1024),
        "resident_growth_kib": round((resident[args.turns] - resident[tenth]) / 1024),
    }
    print(f"{args.turns:,} turns of {args.sessions:,} sessions: {result['median_ms']} ms each (median)")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
