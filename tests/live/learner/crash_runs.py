"""Run by `test_crash.py`: learners that are killed at a point, or after a while, and started again until they are done.

Each learner is a process of its own, forked from this one, which has imported what takes long and done nothing else.
"""

import importlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from learner_crash_points import POINTS, REJECTED
from learner_harness import USER, make_learner, open_store, record
from safetensors.torch import load_file

from trl_openclaw.live.learner.checkpoints import last_checkpoint, read_progress
from trl_openclaw.live.learner.checks import CheckResult

TURNS, UPDATES = 12, 2


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(target: str, when: str, count: int) -> None:
    """Have this process killed before or after the `count`-th call of something."""
    path, name = target.rsplit(".", 1)
    owner: Any
    try:
        owner = importlib.import_module(path)
    except ModuleNotFoundError:
        module, cls = path.rsplit(".", 1)
        owner = getattr(importlib.import_module(module), cls)
    original, calls = getattr(owner, name), []

    def armed(*args, **kwargs):
        calls.append(None)
        if when == "before" and len(calls) == count:
            kill()
        found = original(*args, **kwargs)
        if when == "after" and len(calls) == count:
            kill()
        return found

    setattr(owner, name, armed)


def kill_after(seconds: float) -> None:
    threading.Thread(target=lambda: (time.sleep(seconds), kill()), daemon=True).start()


def learn(folder: Path, rejects: int | None, teacher: str) -> None:
    """Learn to the end, as one process; the checks of one version fail, if wanted."""
    ema = {"teacher_ema_rate": 0.3} if teacher == "ema" else {}
    learner = make_learner(folder, max_updates=UPDATES, token_preferences=False, teacher=teacher, **ema)
    checks = learner.updates.checks

    class Scripted:
        measures, prepare = checks.measures, checks.prepare

        def __call__(self, version, before):
            bad = rejects is not None and version == f"v{rejects:06d}"
            return {"held_out": CheckResult("failed" if bad else "passed", "so it is", {})}

    learner.updates.checks = Scripted()
    learner.train()


def forked(do: Callable[[], None], log: Path) -> int:
    """The status of a process that does something; 0 if it came to its end."""
    pid = os.fork()
    if pid == 0:
        try:
            with log.open("a") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            do()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def prepare(folder: Path) -> None:
    folder.mkdir(parents=True)
    record(open_store(folder), range(TURNS))


def found_in(folder: Path) -> dict[str, Any]:
    """What store and files say when all is over."""
    store = open_store(folder)
    turns = list(store.all_turns(USER))
    checkpoint = last_checkpoint(folder / "checkpoints" / "default")
    progress = read_progress(checkpoint, USER)
    published = store.published_version(USER)
    paths = {version.version: version.path for version in store.versions(USER)}
    weights = load_file(checkpoint / "adapter_model.safetensors")
    adapter = load_file(Path(paths[published]) / "adapter_model.safetensors")
    return {
        "states": [turn.state for turn in turns],
        "uses": [turn.use.batch_id if turn.use is not None else None for turn in turns],
        "scored": [store.token_scores(turn.turn_id) is not None for turn in turns],
        "batches": dict(progress.batches),
        "version": progress.version,
        "published": published,
        "open": len(store.open_batches(USER)),
        "events": {v.version: [event.event for event in v.events] for v in store.versions(USER)},
        "weights": {name: tensor.double().abs().sum().item() for name, tensor in weights.items()},
        "adapter": {name: tensor.double().abs().sum().item() for name, tensor in adapter.items()},
    }


def scenario(folder: Path, before: Callable[[], None], rejects: int | None = None, teacher: str = "frozen") -> dict:
    """Kill a learner once, then let others go on until one comes to the end."""
    log = folder.with_suffix(".log")
    assert forked(lambda: prepare(folder), log) == 0, log.read_text()[-2000:]
    statuses = [forked(lambda: (before(), learn(folder, rejects, teacher)), log)]
    while statuses[-1] == -signal.SIGKILL and len(statuses) < 4:
        statuses.append(forked(lambda: learn(folder, rejects, teacher), log))
    result = folder.with_suffix(".json")
    assert statuses[-1] == 0, log.read_text()[-3000:]
    assert forked(lambda: result.write_text(json.dumps(found_in(folder))), log) == 0, log.read_text()[-2000:]
    return {**json.loads(result.read_text()), "statuses": statuses}


def main(folder: str, kind: str, *names: str) -> None:
    """Run scenarios of one kind. The name of one that nobody kills is `never`, and it comes first."""
    root = Path(folder)
    points = REJECTED if kind == "rejected" else POINTS
    settings = {"rejected": {"rejects": 2}, "average": {"teacher": "ema"}}.get(kind, {})
    found, seconds = {}, 0.0
    for name in names:
        where, before = root / name.replace(" ", "_"), lambda: None
        if name in points:
            before = partial(arm, *points[name])
        elif name != "never":
            before = partial(kill_after, random.Random(name).uniform(0.0, seconds))
        began = time.monotonic()
        found[name] = scenario(where, before, **settings)
        seconds = seconds or time.monotonic() - began
    (root / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
