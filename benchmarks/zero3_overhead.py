"""What distillation costs where weights are spread: steps of `OPDTrainer` against stock GRPO's under DeepSpeed ZeRO-3.

    python benchmarks/zero3_overhead.py

Two processes (`--processes`) under `accelerate launch` with `accelerate_configs/zero3.yaml`, over gloo without GPUs.
The work is that of `step_overhead.py` at a short prompt, with as many completions in each process, and the
trainers take turns in the same run. Every forward gathers the weights, and the teacher adds forwards.

The last line is JSON: the ratio of the median step times, `{"opd_over_grpo_zero3": r}`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

KINDS = ("grpo", "opd")
RANK = "OPENCLAW_ZERO3_OVERHEAD"
"""Set in the processes that are measured."""


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each trainer's steps; run in each of the processes."""
    import deepspeed
    import torch
    from transformers.utils import logging

    from benchmarks.common import Shape, StepTimer, run_steps

    logging.disable_progress_bar()
    settings = {}
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled, for a minute
        settings = {"ddp_backend": "gloo"}
    timers = {kind: StepTimer() for kind in KINDS}
    for _ in range(args.rounds):
        for kind, timer in timers.items():
            run_steps(kind, args.model, Shape(0, args.completions, args.tokens), args.steps, timer, settings=settings)
    return {kind: timer.seconds for kind, timer in timers.items()}


def launch(argv: list[str], args: argparse.Namespace) -> None:
    """Start the processes; the first of them prints."""
    config = ROOT / "accelerate_configs" / "zero3.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--num_processes", str(args.processes), "--main_process_port", "0", __file__, *argv]
    raise SystemExit(subprocess.run([*command, "--model", args.model], env={**os.environ, RANK: "1"}).returncode)


def main() -> None:
    """Measure, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or Hub name; by default SmolLM2-135M-Instruct, fetched once")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--completions", type=int, default=4, help="of each process")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each trainer")
    parser.add_argument("--steps", type=int, default=3, help="measured steps in a turn")
    args = parser.parse_args()
    if RANK not in os.environ:
        from benchmarks.common import fetch_model

        args.model = args.model or fetch_model()
        launch(sys.argv[1:], args)
    seconds = measure(args)
    if os.environ["RANK"] == "0":
        medians = {kind: statistics.median(values) for kind, values in seconds.items()}
        for kind, median in medians.items():
            print(f"{kind:>10} step: {median:6.2f} s ({min(seconds[kind]):.2f} to {max(seconds[kind]):.2f})")
        print(json.dumps({"opd_over_grpo_zero3": round(medians["opd"] / medians["grpo"], 3)}), flush=True)


if __name__ == "__main__":
    main()
