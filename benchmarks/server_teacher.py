"""What a teacher on a server costs beyond the server's own time.

    python benchmarks/server_teacher.py
    python benchmarks/server_teacher.py --rows 64 --prompt 900 --completion 100 --topk 4

A stub of vLLM answers each request `--token-ms` milliseconds for each of its tokens after it came, in a process of its
own, with as many numbers as vLLM writes. `ServerTeacher` scores the rows with `--concurrency` requests in flight. The
server's own time is what the same requests take, as many in flight, when their bodies are ready and the answers are
thrown away. Both are measured `--rounds` times in turn, and compared round by round.

The last line is JSON: `{"added_over_server": r}`, the median of the rounds, where 0.1 is a tenth more.
"""

import argparse
import http.client
import json
import multiprocessing
import statistics
import sys
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the stub server is the tests' own

from trl_openclaw import ServerTeacher
from trl_openclaw.scoring import TeacherRow
from trl_openclaw.teachers.prompt_logprobs import groups_of
from trl_openclaw.teachers.server import REQUEST_TOKENS


def serve(token_seconds: float, port: multiprocessing.Queue) -> None:
    """Run the server, until its process is ended."""
    from stub_teacher_server import StubTeacherServer

    class Prepared(StubTeacherServer):
        """Works out what it says of a prompt once, so that this takes no time of a core that the client shares."""

        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.known = {}

        def entries(self, ids, request):
            key = (*ids, request["prompt_logprobs"])
            if key not in self.known:
                self.known[key] = super().entries(ids, request)
            return self.known[key]

    with Prepared(window=1 << 20, token_seconds=token_seconds) as server:
        port.put(server.base_url)
        time.sleep(3600)


def own_seconds(base_url: str, rows: list[TeacherRow], topk: int, concurrency: int) -> float:
    """Seconds that the server takes for the requests of these rows."""
    bodies = []
    for group in groups_of([row.length for row in rows], REQUEST_TOKENS):
        prompts = [[*rows[i].prompt_ids, *rows[i].completion_ids] for i in group]
        request = {"model": "stub-model", "prompt": prompts, "prompt_logprobs": topk, "max_tokens": 1}
        bodies.append(json.dumps(request).encode())
    address = urllib.parse.urlsplit(base_url)

    def ask(body: bytes) -> None:
        connection = http.client.HTTPConnection(address.hostname, address.port)
        connection.request("POST", f"{address.path}/completions", body, {"Content-Type": "application/json"})
        connection.getresponse().read()
        connection.close()

    with ThreadPoolExecutor(concurrency) as threads:
        started = time.perf_counter()
        list(threads.map(ask, bodies))
        return time.perf_counter() - started


def main() -> None:
    """Score and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=900, help="tokens of each prompt")
    parser.add_argument("--completion", type=int, default=100, help="tokens of each completion")
    parser.add_argument("--topk", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--token-ms", type=float, default=0.4, help="milliseconds that the server takes for a token")
    parser.add_argument("--rounds", type=int, default=5, help="how often both are measured, in turn")
    args = parser.parse_args()

    rows = [TeacherRow([i % 251 + 1] * args.prompt, [7] * args.completion) for i in range(args.rows)]
    tokens = sum(row.length for row in rows)
    context = multiprocessing.get_context("spawn")
    port = context.Queue()
    server = context.Process(target=serve, args=(args.token_ms / 1000, port), daemon=True)
    server.start()
    try:
        base_url = port.get(timeout=120)
        teacher = ServerTeacher("stub-model", base_url, max_concurrency=args.concurrency)
        teacher.check()  # loads the client and connects, as when training starts
        own_seconds(base_url, rows, args.topk, args.concurrency)
        added = []
        for _ in range(args.rounds):
            alone = own_seconds(base_url, rows, args.topk, args.concurrency)
            started = time.perf_counter()
            scores = teacher.score(rows, topk=args.topk)
            seconds = time.perf_counter() - started
            added.append(seconds / alone - 1)
            print(f"{tokens:,} tokens: {seconds:.2f} s, of the server alone {alone:.2f} s", flush=True)
    finally:
        server.terminate()
        server.join()
    assert scores.mask.all()
    print(json.dumps({"added_over_server": round(statistics.median(added), 3)}))


if __name__ == "__main__":
    main()
