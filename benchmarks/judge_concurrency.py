"""How long a batch of turns waits for its judge when every answer takes one second.

    python benchmarks/judge_concurrency.py
    python benchmarks/judge_concurrency.py --trajectory --turns 8 --votes 1 --delay 0.5

A real HTTP server on loopback answers each request after `--delay` seconds. All votes of all turns are asked at once,
so the batch should take about one delay, not turns x votes of them. With `--trajectory` the turns are those of one
completion, an agent's that calls a tool in every turn but the last.

The last line is JSON: `{"judge_seconds": s, "sequential_seconds": q, "max_in_flight": n}`.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the stub server is the tests' own

from stub_chat_server import Reply, StubChatServer

from trl_openclaw import Feedback, HindsightReward, LLMJudge, NextState, Turn, collect_feedback


async def judged_turns(judge: LLMJudge, count: int) -> list[Feedback]:
    """The feedback of turns that have nothing to do with each other."""
    turns = [Turn("hi", f"reply {i}", NextState("Shorter, please.")) for i in range(count)]
    return await collect_feedback(turns, [{}] * count, next_state=None, judge=judge)


async def judged_trajectory(judge: LLMJudge, count: int) -> list[Feedback]:
    """The feedback of the turns of one completion, as the reward function splits and collects it."""
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    completion = []
    for i in range(count - 1):
        completion.append({"role": "assistant", "content": f"step {i}", "tool_calls": [call]})
        completion.append({"role": "tool", "name": "look", "content": f"seen {i}"})
    completion.append({"role": "assistant", "content": "done"})
    reward = HindsightReward(judge, score_only=False)
    await reward([[{"role": "user", "content": "hi"}]], [completion], next_state=["Shorter, please."])
    return reward.last


async def timed(judge: LLMJudge, collect: Callable, count: int) -> tuple[list[Feedback], float]:
    """The feedback, and how long it took. The client was loaded and connected before, as when training starts."""
    await judge.check()
    started = time.perf_counter()
    found = await collect(judge, count)
    return found, time.perf_counter() - started


def main() -> None:
    """Ask and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--votes", type=int, default=3)
    parser.add_argument("--delay", type=float, default=1.0, help="seconds that the server takes for one answer")
    parser.add_argument("--trajectory", action="store_true", help="judge the turns of one completion")
    args = parser.parse_args()

    def answer(messages: list) -> Reply:
        marker = re.search(r"VERDICT-(\w+)", str(messages))[1]
        text = f"VERDICT-{marker}: -1\nHINT-{marker}: Be brief. END-{marker}"
        return Reply(text=text, delay=args.delay)

    with StubChatServer(answer) as server:
        judge = LLMJudge(server.models[0], server.base_url, num_votes=args.votes)
        found, seconds = asyncio.run(timed(judge, judged_trajectory if args.trajectory else judged_turns, args.turns))
    assert len(found) == args.turns
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
