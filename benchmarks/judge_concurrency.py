"""How long a batch of turns waits for its judge when every answer takes one second.

    python benchmarks/judge_concurrency.py

A real HTTP server on loopback answers each request after `--delay` seconds. All votes of all turns are asked at once,
so the batch should take about one delay, not turns x votes of them.

The last line is JSON: `{"judge_seconds": s, "sequential_seconds": q, "max_in_flight": n}`.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the stub server is the tests' own

from stub_chat_server import Reply, StubChatServer

from trl_openclaw import LLMJudge, NextState, Turn, collect_feedback


def main() -> None:
    """Ask and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--votes", type=int, default=3)
    parser.add_argument("--delay", type=float, default=1.0, help="seconds that the server takes for one answer")
    args = parser.parse_args()

    def answer(messages: list) -> Reply:
        marker = re.search(r"VERDICT-(\w+)", str(messages))[1]
        text = f"VERDICT-{marker}: -1\nHINT-{marker}: Be brief. END-{marker}"
        return Reply(text=text, delay=args.delay)

    turns = [Turn("hi", f"reply {i}", NextState("Shorter, please.")) for i in range(args.turns)]
    with StubChatServer(answer) as server:
        judge = LLMJudge(server.models[0], server.base_url, num_votes=args.votes)
        started = time.perf_counter()
        found = asyncio.run(collect_feedback(turns, [{}] * args.turns, next_state=None, judge=judge))
        seconds = time.perf_counter() - started
    assert all(feedback.score == -1 and feedback.hints == ("Be brief.",) for feedback in found)
    sequential = args.turns * args.votes * args.delay
    work = f"{args.turns} turns x {args.votes} votes at {args.delay:g} s each"
    print(f"{work}: {seconds:.2f} s, one by one {sequential:g} s")
    print(
        json.dumps(
            {
                "judge_seconds": round(seconds, 2),
                "sequential_seconds": sequential,
                "max_in_flight": server.max_in_flight,
            }
        )
    )


if __name__ == "__main__":
    main()
