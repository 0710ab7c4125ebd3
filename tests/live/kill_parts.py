"""Parts of `test_killed_parts.py` that are processes of their own.

python tests/live/kill_parts.py engine --port 8000     a stub engine with the ids and the template of the tiny model
python tests/live/kill_parts.py learners FOLDER        learners on the tiny model that never end, one after another
"""

import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from live import stub_engine

from trl_openclaw import Turn

NEVER = 10_000


def judge(turn: Turn) -> tuple[int, str]:
    """The gateway's judge: every reply was too long."""
    return -1, "Be brief."


def engine(port: str) -> None:
    """Serve until killed."""
    from tokenizers import pre_tokenizers

    ids = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    space = ids["Ġ"], ids["Ċ"]
    start, end = 258, 256

    def ids_of(text: str) -> list[int]:
        return [space[0] if char == " " else space[1] if char == "\n" else ids[char] for char in text]

    def prompt_of(messages: list[dict], tools: list[dict] | None = None) -> list[int]:
        found = []
        for message in messages:
            found += [start, *ids_of(f"{message['role']}\n{message['content']}"), end, *ids_of("\n")]
        return [*found, start, *ids_of("assistant\n")]

    stub_engine.ids_of, stub_engine.prompt_of = ids_of, prompt_of
    stub = stub_engine.StubEngine("tiny", pause=0.01, pieces=6)
    stub.port = int(port)
    with stub:
        sys.stdin.read()


def learners(folder: str) -> None:
    """For each line that comes in, a learner: its process's id goes out when it begins, and its status when it ends.

    Each is forked from this process, which has imported what takes long and done nothing else.
    """
    from learner_harness import make_learner

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = {"max_engine_gap": None, "max_version_lag": NEVER, "learning_rate": 1e-4, "token_preferences": False}
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                make_learner(Path(folder), **settings).train()
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        print(pid, file=out, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=out, flush=True)


if __name__ == "__main__":
    {"engine": engine, "learners": learners}[sys.argv[1]](sys.argv[2])
