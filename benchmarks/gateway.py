"""What the gateway adds to a request, over asking the engine itself.

    python benchmarks/gateway.py

Three processes on at most two cores: a stub engine that speaks vLLM's protocol and takes a fixed time, the gateway with
its store, keys and judging, and 32 clients. Each client leads conversations, and sends one request a second to the
gateway and, half a second later, the same to the engine, so that both are measured in the same seconds. All replies
are streamed.

The last line is JSON, in milliseconds: `{"added_p50_ms": a, "added_p99_ms": b, "added_first_token_ms": c}`: the
differences of the medians and of the 99th percentiles of whole replies, and of the medians of first tokens.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

ROOT = Path(__file__).parents[1]
MODEL, KEY = "stub", "a-key-of-the-benchmark"
WARM_UP = 3.0
"""Seconds at the beginning that are not counted."""
TURNS = 6
"""Turns of a conversation before a client begins another."""


def judge(turn) -> int:
    """The gateway's judge: a rule, so that verdicts are stored and no server is asked."""
    return 1


@dataclass
class Times:
    """Seconds of one way of asking."""

    whole: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


@dataclass
class Client:
    """One client: its conversation goes on with what the gateway replied."""

    session: aiohttp.ClientSession
    gateway: str
    engine: str
    name: str
    turn: int = 0
    messages: list[dict] = field(default_factory=list)

    async def lead(self, start: float, seconds: int, found: dict[str, Times]) -> None:
        """One request a second each way, from `start` on."""
        for second in range(seconds):
            if self.turn % TURNS == 0:
                self.messages = []
            self.messages.append({"role": "user", "content": f"{self.name} asks for the {self.turn}th time"})
            counts = second >= WARM_UP
            await sleep_until(start + second)
            said = await self.ask(self.gateway, found["gateway"] if counts else Times())
            await sleep_until(start + second + 0.5)
            await self.ask(self.engine, found["engine"] if counts else Times())
            self.messages.append({"role": "assistant", "content": said})
            self.turn += 1

    async def ask(self, url: str, times: Times) -> str:
        """One streamed reply, and how long it took."""
        # The engine is asked for what the gateway asks it for.
        body = {"model": MODEL, "messages": self.messages, "stream": True}
        if url == self.engine:
            body |= {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
        said, first = "", 0.0
        started = time.perf_counter()
        async with self.session.post(f"{url}/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                text = json.loads(line[6:])["choices"][0]["delta"].get("content")
                if text:
                    first = first or time.perf_counter()
                    said += text
        times.whole.append(time.perf_counter() - started)
        times.first.append(first - started)
        return said


async def sleep_until(when: float) -> None:
    """Until the loop's clock shows that, which may be now."""
    await asyncio.sleep(max(when - asyncio.get_running_loop().time(), 0))


async def measure(gateway: str, engine: str, clients: int, seconds: int) -> dict[str, Times]:
    """Let all clients ask for so many seconds."""
    found = {"gateway": Times(), "engine": Times()}
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:
        start = asyncio.get_running_loop().time() + 0.2
        crowd = [Client(session, gateway, engine, f"client {place}") for place in range(clients)]
        leads = (
            client.lead(start + place / clients, seconds + int(WARM_UP), found) for place, client in enumerate(crowd)
        )
        await asyncio.gather(*leads)
    return found


@contextmanager
def running(*command: str, ready: str) -> Iterator[str]:
    """A process and what it said, up to the line that begins so; ended by its own id in the end."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith(ready):
                break
        else:
            raise RuntimeError(f"{command[0]} ended: {said}")
        yield said
    finally:
        process.terminate()
        process.wait(30)


def percentile(values: list[float], share: float) -> float:
    """The value that so large a share does not exceed."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=int, default=30, help="how long each client asks, after warming up")
    parser.add_argument("--delay", type=float, default=0.1, help="seconds until the engine's first piece")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds between two pieces")
    parser.add_argument("--pieces", type=int, default=16, help="pieces of a reply")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # and all that is started here

    stub = ["tests/live/stub_engine.py", "--delay", str(args.delay), "--pause", str(args.pause)]
    with tempfile.TemporaryDirectory() as folder, running(*stub, "--pieces", str(args.pieces), ready="http") as said:
        engine = said.strip()
        keys = Path(folder) / "keys"
        keys.write_text(f"someone: {KEY}\n")
        keys.chmod(0o600)
        # fmt: off
        serve = [
            "-m", "trl_openclaw.cli", "serve", "--engine", "vllm", "--model", MODEL, "--engine-url", engine,
            "--port", "0", "--live-dir", folder, "--keys", str(keys), "--judge", "benchmarks.gateway.judge",
        ]
        # fmt: on
        with running(*serve, ready="Ready.") as said:
            gateway = said.split(" at ")[1].split()[0] + "/v1"
            found = asyncio.run(measure(gateway, engine, args.clients, args.seconds))
    for name, times in found.items():
        whole, first = times.whole, times.first
        print(
            f"{name:<8} {len(whole)} replies: median {1000 * statistics.median(whole):.1f} ms, 99% within "
            f"{1000 * percentile(whole, 0.99):.1f} ms, first token {1000 * statistics.median(first):.1f} ms"
        )
    ours, its = found["gateway"], found["engine"]
    print(
        json.dumps(
            {
                "added_p50_ms": round(1000 * (statistics.median(ours.whole) - statistics.median(its.whole)), 2),
                "added_p99_ms": round(1000 * (percentile(ours.whole, 0.99) - percentile(its.whole, 0.99)), 2),
                "added_first_token_ms": round(1000 * (statistics.median(ours.first) - statistics.median(its.first)), 2),
            }
        )
    )


if __name__ == "__main__":
    main()
