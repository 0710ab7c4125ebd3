"""A learner that is killed (SIGKILL) anywhere and started again trains no turn twice, loses none, ends up the same."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from learner_crash_points import FEW, POINTS, REJECTED

SCRIPT = Path(__file__).with_name("crash_runs.py")
BATCH, TURNS, UPDATES = 4, 12, 2
MANY = tuple(name for name in POINTS if name not in FEW)
RANDOM = tuple(f"random {i}" for i in range(12))

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs scenarios of `crash_runs.py`, and remembers what came of them."""

    @cache
    def run(kind: str, *names: str) -> dict[str, dict]:
        folder = tmp_path_factory.mktemp("crash")
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(folder), kind, *names],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=1400,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads((folder / "found.json").read_text())

    return run


def check(found: dict, rejected: int = 0) -> None:
    """Nothing is claimed, trained twice, lost or half published."""
    states = Counter(found["states"])
    assert states == {
        "trained": BATCH * (UPDATES - rejected),
        **({"rejected": BATCH * rejected} if rejected else {}),
        "ready": TURNS - BATCH * UPDATES,
    }
    assert found["open"] == 0
    trained = [use for use, state in zip(found["uses"], found["states"], strict=True) if state == "trained"]
    # Exactly the turns of the batches that the weights are made of, each once.
    assert Counter(trained) == dict.fromkeys(found["batches"], BATCH)
    assert len(found["batches"]) == UPDATES - rejected
    assert all(scored for scored, state in zip(found["scored"], found["states"], strict=True) if state == "trained")
    assert found["published"] == found["version"] == list(found["batches"].values())[-1]
    assert found["adapter"] == pytest.approx(found["weights"], abs=1e-9)
    for version, events in found["events"].items():
        assert events.count("published") + events.count("rejected") == 1, version
    assert [v for v, events in found["events"].items() if "published" in events] == list(found["batches"].values())


def check_like_unkilled(found: dict, whole: dict) -> None:
    assert found["statuses"] == [-signal.SIGKILL, 0]
    assert whole["statuses"] == [0]
    assert found["weights"] == pytest.approx(whole["weights"], rel=1e-5, abs=1e-6)
    assert found["states"] == whole["states"]


@pytest.mark.parametrize("point", FEW)
def test_killed_and_started_again(runs, point):
    found = runs("points", "never", *FEW)
    check(found["never"])
    check(found[point])
    check_like_unkilled(found[point], found["never"])


@pytest.mark.slow
@pytest.mark.parametrize("point", MANY)
def test_killed_elsewhere_and_started_again(runs, point):
    found = runs("points", "never", *MANY)
    check(found[point])
    check_like_unkilled(found[point], found["never"])


@pytest.mark.slow
@pytest.mark.parametrize("point", REJECTED)
def test_killed_while_a_version_is_rejected(runs, point):
    found = runs("rejected", "never", *REJECTED)
    check(found["never"], rejected=1)
    if point == "about to be rejected":  # the batch is free again, and what is trained then is another version
        check(found[point])
        return
    # The batch stays rejected, and the learner makes its second update on the turns after it.
    states = Counter(found[point]["states"])
    assert states == {"trained": 8, "rejected": 4}
    assert found[point]["statuses"] == [-signal.SIGKILL, 0]
    assert found[point]["open"] == 0
    assert found[point]["events"]["v000002"][-1] == "rejected"
    assert found[point]["published"] == found[point]["version"] == "v000003"


@pytest.mark.slow
@pytest.mark.parametrize("point", ["gradients there", "checkpoint half written", "checkpoint marked"])
def test_the_moving_average_goes_on_too(runs, point):
    found = runs("average", "never", "gradients there", "checkpoint half written", "checkpoint marked")
    check(found[point])
    check_like_unkilled(found[point], found["never"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RANDOM)
def test_killed_at_any_time(runs, name):
    found = runs("random", "never", *RANDOM)
    check(found[name])
    assert found[name]["weights"] == pytest.approx(found["never"]["weights"], rel=1e-5, abs=1e-6)
