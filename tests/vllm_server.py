"""Fixtures with a real vLLM server of SmolLM2-135M in float32, in the environment that `make vllm-env` makes."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".vllm-env" / "bin" / "python"
STARTS_WITHIN = 240
"""Seconds. On two cores it takes about 40."""


class VllmServer:
    """A vLLM server on a free port of the loopback, which can be killed and started again there.

    Args:
        model: The folder of the model, which is served as `smollm2`.
        log: Where the server writes what it says.
        options: More of vLLM's options.
        env: More of its environment.
    """

    name = "smollm2"
    window = 2048
    max_logprobs = 5

    def __init__(self, model: Path, log: Path, *options: str, env: dict[str, str] | None = None):
        self.model, self.log, self.options, self.env = model, log, options, env or {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process: subprocess.Popen | None = None

    @property
    def base_url(self) -> str:
        """Address of the API."""
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """Start it; see `wait`."""
        # fmt: off
        command = [
            str(PYTHON), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self.model), "--served-model-name", self.name,
            "--host", "127.0.0.1", "--port", str(self.port),
            "--dtype", "float32", "--enforce-eager",
            "--max-model-len", str(self.window), "--max-logprobs", str(self.max_logprobs),
        ]
        # fmt: on
        quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*command, *self.options],
                cwd=self.log.parent,
                env={**env, **quiet, **self.env},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it answers, or fail with the end of its log."""
        until = time.monotonic() + STARTS_WITHIN
        while time.monotonic() < until and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.5)
        pytest.fail(f"vLLM did not start within {STARTS_WITHIN} s:\n{self.log.read_text()[-4000:]}")

    def is_up(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """End it and its workers at once."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # its own group, which it leads
            self.process.wait()

    def stop(self) -> None:
        """Let it end itself, or kill it."""
        if self.process is not None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            self.kill()


@pytest.fixture(scope="session")
def adapter(smollm2, tmp_path_factory) -> Path:
    """The folder of a LoRA adapter for SmolLM2 that changes what it says."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(folder)
    return folder


@contextmanager
def _serving(model: Path, folder: Path, *options: str, env: dict[str, str] | None = None) -> Iterator[VllmServer]:
    """A server that is ended in the end; its log is in the folder."""
    if not PYTHON.exists():
        pytest.skip("there is no vLLM: `make vllm-env` makes an environment for it, `make test-vllm` runs these tests")
    server = VllmServer(model, folder / "server.log", *options, env=env)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def _session_server(smollm2, tmp_path_factory) -> Iterator[VllmServer]:
    with _serving(smollm2, tmp_path_factory.mktemp("vllm"), "--max-num-seqs", "8") as server:
        yield server


@pytest.fixture
def vllm_server(_session_server) -> VllmServer:
    """A vLLM server that is up, the same one for all tests unless one of them has killed it."""
    if not _session_server.is_up():
        _session_server.start()
        _session_server.wait()
    return _session_server


@pytest.fixture
def adapter_server(smollm2, adapter, tmp_path) -> Iterator[VllmServer]:
    """One with an adapter called `kind`. It takes one row at a time: with adapters, vLLM 0.31 on a CPU ends on two."""
    options = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"kind={adapter}", "--max-num-seqs", "1")
    with _serving(smollm2, tmp_path, *options) as server:
        server.start()
        server.wait()
        yield server


@pytest.fixture
def processed_server(smollm2, tmp_path) -> Iterator[VllmServer]:
    """One that reports log-probs at the temperature of sampling."""
    with _serving(smollm2, tmp_path, "--logprobs-mode", "processed_logprobs", "--max-num-seqs", "2") as server:
        server.start()
        server.wait()
        yield server


@pytest.fixture
def swapping_server(smollm2, tmp_path) -> Iterator[VllmServer]:
    """One that loads and unloads adapters while it runs, as the live gateway needs it; one row at a time, likewise."""
    options = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--max-num-seqs", "1")
    with _serving(smollm2, tmp_path, *options, env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}) as server:
        server.start()
        server.wait()
        yield server
