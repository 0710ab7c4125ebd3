"""Run by `test_two_processes.py`: a learner of one or two processes, which is asked to end when it waits."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from launch_ranks import take_leave
from learner_harness import USER, make_learner, open_store

from trl_openclaw.errors import LearnerError
from trl_openclaw.live.learner.checks import CheckResult
from trl_openclaw.live.learner.snapshot import trained_tensors

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
CHECKS = {
    "check_held_out": 10.0,
    "check_replays": 10.0,
    "check_probes": 10.0,
    "check_length": [0.01, 100.0],
}


def end_when_published(folder: Path, version: str) -> None:
    """Ask this process to end once a version is published. Only the last one is asked."""

    def watch() -> None:
        store = open_store(folder)
        while store.published_version(USER) != version:
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)

    if RANK == WORLD - 1:
        threading.Thread(target=watch, daemon=True).start()


def main(folder: str, teacher: str) -> None:
    live = Path(folder, "live")
    ema = {"teacher_ema_rate": 0.3} if teacher == "ema" else {}
    wrong = make_learner(live, engine_model="another", per_device_train_batch_size=1)
    try:
        wrong.train()
        error = None
    except LearnerError as found:
        error = str(found)
    learner = make_learner(live, per_device_train_batch_size=1, teacher=teacher, **ema, **CHECKS)
    checks, told = learner.updates.checks, []

    class Failing:
        """The real checks, and one of the second version's fails."""

        measures, prepare = checks.measures, checks.prepare

        def __call__(self, version, before):
            results = checks(version, before)
            told.append({name: [one.outcome, one.numbers] for name, one in results.items()})
            return {**results, "forced": CheckResult("failed", "forced")} if version == "v000002" else results

    learner.updates.checks = Failing()
    end_when_published(live, "v000003")
    learner.train()
    weights = {name: tensor.double().abs().sum().item() for name, tensor in trained_tensors(learner).items()}
    logs = [log for log in learner.state.log_history if "loss" in log]
    kept = ("loss", "live/lag_mean", "live/ratio_mean", "live/log_ratio_abs")
    found = {
        "error": error,
        "weights": weights,
        "version": learner.progress.version,
        "checks": told,
        "has_store": learner.desk is not None,
        "logs": [{name: log[name] for name in kept} for log in logs],
    }
    Path(folder, f"rank{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
    take_leave()
