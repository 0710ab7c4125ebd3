"""Runs scripts in real processes, which talk over gloo, and compares what they found."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "distributed"
SECONDS = 240
ON_CPU = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "ACCELERATE_TORCH_DEVICE": "cpu",
}
"""An environment in which no GPU is to be seen, and engines may run all the same (see `two_ranks.prepare_engine`)."""

ENGINES = {
    "single": "",
    "multi_gpu": "DistributedDataParallel",
    "zero1": "DeepSpeedEngine",
    "zero2": "DeepSpeedEngine",
    "zero3": "DeepSpeedEngine",
    "zero3_offload": "DeepSpeedEngine",
    "fsdp2": "FSDP",
    "multi_node": "DeepSpeedEngine",
}
"""A file of `accelerate_configs` without its ending, and what a trainer's model is wrapped in under it.

Two launchers start one process each under `multi_node`, as on two machines.
"""

EACH_ENGINE = [
    pytest.param(name, marks=[pytest.mark.slow] if name in ("zero1", "zero3_offload", "multi_node") else [])
    for name in ENGINES
]
"""For tests; slow are those that are much like others, or compile something first."""


def launch_script(name: str, folder: Path, *arguments: str) -> list[Any]:
    """What two processes found that ran a script of `distributed`, given a folder to write to and more."""
    status = run_script(SCRIPTS / name, [str(folder), *arguments], folder, 2, None)
    assert status == 0, (folder / "stderr0").read_text()[-3000:]
    return found_in(folder, 2)


def processes_of(config: str) -> int:
    """How many processes tests start under a config of `accelerate_configs`, on all machines together."""
    return 1 if config == "single" else 2


def run_under(config: str, name: str, folder: Path, *arguments: str) -> None:
    """Run a script of `distributed` under a config, with a folder to write to.

    Raises:
        subprocess.TimeoutExpired: If it takes too long, as a hang does. The processes are ended.
    """
    machines = 2 if config == "multi_node" else 1
    given = [str(folder), *arguments]
    run_script(SCRIPTS / name, given, folder, processes_of(config), config, machines, 2 * SECONDS)


def take_leave() -> None:
    """Called by a process at its end: else threads that talk to the others may abort an interpreter that ends."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def found_in(folder: Path, processes: int) -> list[Any]:
    """What each process has written."""
    found = [folder / f"rank{rank}.json" for rank in range(processes)]
    assert all(path.exists() for path in found), (folder / "stderr0").read_text()[-3000:]
    return [json.loads(path.read_text()) for path in found]


def run_script(
    script: Path,
    arguments: list[str],
    folder: Path,
    processes: int,
    engine: str | None,
    machines: int = 1,
    seconds: float = SECONDS,
) -> int:
    """The exit status of a script that was run in several processes; what they had to say is in `folder`.

    Args:
        script: The script.
        arguments: What it is given.
        folder: Where its standard error goes.
        processes: How many, on all machines together.
        engine: A file of `accelerate_configs` without its ending; by default each process has the whole model.
        machines: How many launchers share the processes, as on so many machines.
        seconds: How long it may take.

    Raises:
        subprocess.TimeoutExpired: If it takes longer, as a hang does. The processes are ended.
    """
    command, env = _command(processes, engine)
    # What DeepSpeed compiles stays with these tests: where a run is ended at that, the next one would wait for it.
    env.setdefault("TORCH_EXTENSIONS_DIR", str(folder.parent / "torch_extensions"))
    places = _places(machines) if machines > 1 else [["--main_process_port", "0"] if processes > 1 else []]
    started = [
        subprocess.Popen(
            [*command, *place, str(script), *arguments],
            cwd=ROOT,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"stderr{machine}").open("w"),
        )
        for machine, place in enumerate(places)
    ]
    try:
        for process in started:
            process.wait(seconds)
    finally:
        for process in started:
            process.terminate()
            process.wait()
    return max(abs(process.returncode) for process in started)


def _command(processes: int, engine: str | None) -> tuple[list[str], dict[str, str]]:
    """The launcher's command, and its environment, in which no GPU is to be seen."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
    env = {**os.environ, **ON_CPU}
    if engine is not None:
        return [*command, "--config_file", str(ROOT / "accelerate_configs" / f"{engine}.yaml")], env
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    if processes > 1:  # accelerate's name for "start them with torchrun"; the CPU is asked for by the environment
        command += ["--multi_gpu"]
    return command, {**env, "ACCELERATE_USE_CPU": "true"}


def _places(machines: int) -> list[list[str]]:
    """What each machine's launcher has to be told; all of them are this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    return [[*first, "--machine_rank", str(rank)] for rank in range(machines)]


def whole_batch(ranks: list[dict]) -> dict:
    """What all ranks found, as one: the mean of their losses, and the weights that they agree on."""
    assert [rank["error"] for rank in ranks] == [None] * len(ranks)
    first, *others = ranks
    assert all(rank["weights_by_name"] == first["weights_by_name"] for rank in others)
    losses = [sum(step) / len(ranks) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
    return {**first, "losses": losses}


def assert_like_one(name: str, ranks: list[dict], alone: list[dict]) -> None:
    """Steps on the same global batch gave the losses and weights of one process, whoever holds them."""
    found, expected = whole_batch(ranks), whole_batch(alone)
    assert any(expected["losses"])
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-4), name
    assert found["weights_by_name"].keys() == expected["weights_by_name"].keys()
    for weight, sums in expected["weights_by_name"].items():
        assert found["weights_by_name"][weight] == pytest.approx(sums, abs=1e-4), (name, weight)


def assert_shared_on_one_rank(shared: list[dict], whole: list[dict]) -> None:
    """Rank 0 ran less than without sharing, both as many passes, and losses and weights are those without."""
    assert [rank["error"] for rank in shared] == [None, None]
    assert shared[0]["student_tokens"] < 0.5 * whole[0]["student_tokens"]
    assert shared[0]["student_passes"] == shared[1]["student_passes"] == 2 * whole[0]["student_passes"]
    assert shared[0]["teacher_tokens"] < 0.6 * whole[0]["teacher_tokens"]
    for found, expected in zip(shared, whole, strict=True):
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        for name, sums in expected["weights_by_name"].items():
            assert found["weights_by_name"][name] == pytest.approx(sums, abs=1e-4), name


def assert_turns_of_two_ranks(first: dict, second: dict) -> None:
    """Both ranks trained to the end, on three turns a row and on one, and their logs tell of the turns of both."""
    assert first["error"] is second["error"] is None
    assert first["step_advantages"] == [[[-1.0, 1.0, -1.0]] * 4] * 2
    assert second["step_advantages"] == [[-1.0] * 4] * 2
    assert first["active_tokens"] == [4 * 9] * 2
    assert second["active_tokens"] == [4 * 3] * 2
    for log in (*first["log"], *second["log"]):
        assert [log[f"steps/{step}/turns"] for step in range(3)] == [1.0, 0.5, 0.5]
        assert [log[f"steps/{step}/hint_accepted"] for step in range(3)] == [1.0, 0.0, 1.0]
        assert [log[f"steps/{step}/reward"] for step in range(3)] == [-1.0, 1.0, -1.0]
        assert log["turns/mean"] == 2.0
