"""The demo's two processes: the gateway with its engine and judge, and the learner."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_STARTUP_SECONDS = 300
_STOP_SECONDS = 60


class ServiceError(RuntimeError):
    """A process of the demo could not be started or ended by itself; the message ends with its last words."""


class Service:
    """A process with its own log file, which is asked to end, and made to when it does not.

    Args:
        name: What it is called in messages and by its log file.
        command: The command.
        folder: Where the log goes.
        cores: Threads for its computations.
    """

    def __init__(self, name: str, command: list[str], folder: Path, cores: int = 1):
        self.name, self.log = name, folder / f"{name}.log"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(cores), "PYTHONUNBUFFERED": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def check(self) -> None:
        """Raises `ServiceError` when it ended with an error."""
        if self.process.poll():
            words = self.log.read_text(errors="replace")[-2000:]
            raise ServiceError(f"The {self.name} ended with code {self.process.returncode}:\n{words}")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match of a pattern in what it says.

        Raises:
            ServiceError: When it ends, or five minutes pass, before that.
        """
        deadline = time.monotonic() + _STARTUP_SECONDS
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.log.read_text(errors="replace")):
                return found
            self.check()
            if not self.running:
                break
            time.sleep(0.2)
        raise ServiceError(f"The {self.name} did not say {pattern!r}; see {self.log}.")

    def stop(self) -> None:
        """Ask it to end, and wait: a learner ends after the update at hand, and at once when asked a second time."""
        for asked in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if not self.running:
                return
            self.process.send_signal(asked)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_SECONDS)


class Narrator:
    """Prints what a service says of the matter at hand, line by line, while it runs."""

    def __init__(self, service: Service, pattern: str):
        self._service, self._pattern = service, re.compile(pattern)
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        with self._service.log.open(errors="replace") as log:
            while self._service.running:
                for line in log:
                    if self._pattern.search(line):
                        print(f"    {line.strip()}", flush=True)
                time.sleep(0.5)


@contextlib.contextmanager
def gateway(model: Path, name: str, folder: Path, *, max_tokens: int, temperature: float) -> Iterator[str]:
    """A gateway with the model in its process; gives its address."""
    command = [
        *(sys.executable, "-m", "trl_openclaw.cli", "serve", "--model", str(model), "--served-model-name", name),
        *("--port", "0", "--live-dir", str(folder), "--judge", "recipes.live_demo.reactions.read_reaction"),
        *("--max-tokens", str(max_tokens), "--temperature", str(temperature)),
    ]
    service = Service("gateway", command, folder)
    try:
        yield service.wait_for(r"OPENAI_BASE_URL=(\S+)")[1]
        service.check()
    finally:
        service.stop()


@contextlib.contextmanager
def learner(model: Path, name: str, folder: Path, updates: int) -> Iterator[Service]:
    """A learner with the config that ships, in a hurry: large steps, and checks that look at less."""
    command = [
        *(sys.executable, "-m", "trl_openclaw.cli", "live", "--accelerate_config", "single", "--config", "live"),
        *("--live_dir", str(folder), "--model_name_or_path", str(model), "--engine_model", name),
        *("--max_updates", str(updates), "--learning_rate", "4e-4"),
        *("--check_replay_turns", "8", "--check_reply_tokens", "32"),
    ]
    service = Service("learner", command, folder)
    try:
        yield service
    finally:
        service.stop()
