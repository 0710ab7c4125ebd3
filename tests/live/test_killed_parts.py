"""Gateway, engine and learner are processes of their own, and any of them may be killed while people talk."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import openai
import pytest
from learner_harness import USER, open_store
from live.gateway_harness import wait_for

from trl_openclaw.live.learner.checkpoints import last_checkpoint, read_progress

PARTS = Path(__file__).with_name("kill_parts.py")
POINTS = 50
CLIENTS = 3
TURNS = 4
"""Turns of a conversation before a client begins another."""


class System:
    """The three processes on one folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.ports = {name: free_port() for name in ("engine", "gateway")}
        self.running: dict[str, subprocess.Popen] = {}
        python = sys.executable
        self.commands = {
            "engine": [python, PARTS, "engine", self.ports["engine"]],
            "gateway": [
                *(python, "-m", "trl_openclaw.cli", "serve", "--engine", "vllm", "--model", "tiny"),
                *("--engine-url", f"http://127.0.0.1:{self.ports['engine']}/v1", "--port", self.ports["gateway"]),
                *("--live-dir", folder, "--judge", "live.kill_parts.judge"),
            ],
            "learners": [python, PARTS, "learners", folder],
        }
        self.learner = 0

    def start(self, name: str) -> None:
        if name == "learner":
            nursery = self.running["learners"]
            nursery.stdin.write(b"\n")
            nursery.stdin.flush()
            self.learner = int(nursery.stdout.readline())
            return
        tests = str(PARTS.parents[1])
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
        with (self.folder / f"{name}.log").open("a") as log:
            pipe, command = subprocess.PIPE, list(map(str, self.commands[name]))
            out = pipe if name == "learners" else log
            self.running[name] = subprocess.Popen(command, env=env, stdin=pipe, stdout=out, stderr=log)

    def kill(self, name: str) -> int:
        """Kill one; how it ended, which tells whether it had ended by itself."""
        if name == "learner":
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.learner, signal.SIGKILL)
            return int(self.running["learners"].stdout.readline())
        process = self.running.pop(name)
        process.kill()
        process.stdin.close()
        return process.wait()

    def words(self, name: str) -> str:
        log = self.folder / ("learners.log" if name == "learner" else f"{name}.log")
        return log.read_text(errors="replace")[-3000:]

    def __enter__(self) -> "System":
        for name in (*self.commands, "learner"):
            self.start(name)
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill("learner")
        for name in list(self.running):
            self.kill(name)


class Client(threading.Thread):
    """Leads conversations, again and again, whatever happens; notes the ids of replies that came to their end."""

    def __init__(self, number: int, port: int):
        super().__init__(daemon=True)
        self.number, self.port = number, port
        self.whole: dict[str, str] = {}
        self.failed = 0
        self.ended = threading.Event()

    def run(self) -> None:
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="any", max_retries=0, timeout=20
        ) as client:
            said = 0
            while not self.ended.is_set():
                messages: list[dict] = []
                for _ in range(TURNS):
                    said += 1
                    messages.append({"role": "user", "content": f"client {self.number} says {said}"})
                    try:
                        turn_id, text = self.ask(client, messages)
                    except openai.OpenAIError:
                        self.failed += 1
                        time.sleep(0.1)
                        break
                    self.whole[turn_id] = text
                    messages.append({"role": "assistant", "content": text})

    def ask(self, client: openai.OpenAI, messages: list[dict]) -> tuple[str, str]:
        text, turn_id, finished = "", "", False
        for chunk in client.chat.completions.create(model="tiny", messages=messages, stream=True):
            turn_id = chunk.id
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finished |= choice.finish_reason is not None
        if not finished:
            raise openai.OpenAIError("the reply was cut off")
        return turn_id, text


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def uses_of(store) -> list[tuple[str, str, str]]:
    """Turn, batch, and how the batch ended."""
    found = store._connection.execute(
        "SELECT t.turn_id, u.batch_id, coalesce(e.outcome, 'open') AS outcome FROM uses u "
        "JOIN turns t ON t.number = u.turn LEFT JOIN batch_ends e USING (batch_id)"
    ).fetchall()
    return [tuple(row) for row in found]


@pytest.mark.timeout(900)
def test_no_reply_is_lost_and_none_is_trained_twice(tmp_path):
    choice = random.Random(7)
    killed: Counter[str] = Counter()
    with System(tmp_path) as system:
        clients = [Client(number, system.ports["gateway"]) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        store = wait_for(lambda: (tmp_path / "store.db").exists() and open_store(tmp_path), seconds=120)
        wait_for(lambda: store.published_version(USER) != "base", seconds=240, what="an update")
        for _ in range(POINTS):
            time.sleep(choice.uniform(0.0, 3.0))
            name = choice.choice(["gateway", "engine", "learner"])
            assert system.kill(name) == -signal.SIGKILL, system.words(name)  # it had not ended by itself
            killed[name] += 1
            system.start(name)
        before = store.published_version(USER)
        wait_for(lambda: store.published_version(USER) != before, seconds=240, what="another update")
        answered = sum(len(client.whole) for client in clients)
        wait_for(lambda: sum(len(c.whole) for c in clients) >= answered + CLIENTS, seconds=60, what="a reply to each")
        for client in clients:
            client.ended.set()
        for client in clients:
            client.join(60)
    store.close()

    store = open_store(tmp_path)
    kept = {turn.turn_id: turn for turn in store.all_turns(USER)}
    whole = {turn_id: text for client in clients for turn_id, text in client.whole.items()}
    assert [turn_id for turn_id in whole if turn_id not in kept] == []
    assert all(kept[turn_id].reply["content"] == text for turn_id, text in whole.items())
    uses = uses_of(store)
    counts = Counter(turn_id for turn_id, _, outcome in uses if outcome != "released")
    assert counts
    assert max(counts.values()) == 1
    trained = {batch for _, batch, outcome in uses if outcome == "trained"}
    in_weights = set(read_progress(last_checkpoint(tmp_path / "checkpoints" / "default"), USER).batches)
    # The learner's own death may have come between its checkpoint and the store's word of it; the next one makes up.
    open_ones = {batch for _, batch, outcome in uses if outcome == "open"}
    assert trained <= in_weights <= trained | open_ones
    print(
        f"{sum(killed.values())} kills ({dict(killed)}), {len(whole)} whole replies, "
        f"{sum(client.failed for client in clients)} cut off, {len(counts)} turns trained in {len(in_weights)} updates."
    )
    assert min(killed.values()) >= POINTS / 6
    assert len(in_weights) >= 2
