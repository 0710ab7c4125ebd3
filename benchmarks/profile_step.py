"""Where time and memory of one step go: our trainer, the same without shared prefixes, and stock GRPO on equal work.

    python benchmarks/profile_step.py

SmolLM2-135M in float32 on CPU (or one GPU): 4 completions of 64 tokens of one prompt of 1,024 tokens, three hints for
each, four tokens compared at each position. The figures are those of the training logs (`step_seconds/<part>`, see
`trl_openclaw/trainer/step_profile.py`), the median over the measured steps. Stock GRPO has no judge and no teacher. The
memory is the peak during each part, of the whole process with Python's own share and the weights: resident on a CPU
(Linux only), allocated on a GPU. Each trainer has a process of its own. `--trainer opd` has one hint for each
completion.

The last line is JSON: for `ours`, `in full` and `stock`, the `seconds` and `peak_gib` of each part.
"""

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from transformers.utils import logging

from benchmarks.common import PeakMeter, Shape, StepTimer, fetch_model, in_fresh_process, run_steps
from trl_openclaw.trainer.step_profile import PARTS, memory_key, seconds_key


def measure(kind: str, model: str, shape: dict[str, int], steps: int) -> dict[str, dict[str, float]]:
    """Seconds and peak memory of each part of a step, in this process."""
    timer = StepTimer()
    run_steps(kind, model, Shape(**shape), steps, timer, meter=PeakMeter)
    seconds = {part: statistics.median(log[seconds_key(part)] for log in timer.logs) for part in (*PARTS, "total")}
    found = [key for part in PARTS if (key := memory_key(part)) in timer.logs[0]]
    memory = {key.split("/")[-1]: statistics.median(log[key] for log in timer.logs) for key in found}
    return {"seconds": seconds, "peak_gib": memory | {"total": max(memory.values())}}


def print_table(results: dict[str, dict[str, dict[str, float]]]) -> None:
    """Markdown, one line for each part; a part that a trainer does not have is left empty."""
    print(f"| part | {' | '.join(f'{name}: s | share | peak GiB' for name in results)} |")
    print(f"|---|{'---|' * 3 * len(results)}")
    for part in (*PARTS, "total"):
        cells = []
        for result in results.values():
            seconds, total = result["seconds"][part], result["seconds"]["total"]
            peak = result["peak_gib"].get(part)  # next states and judge run within the time of the rewards
            cells += [f"{seconds:.2f}", f"{seconds / total:.1%}"] if seconds else ["", ""]
            cells += [f"{peak:.2f}" if peak else ""]
        print(f"| {part.replace('_', ' ')} | {' | '.join(cells)} |")


def main() -> None:
    """Profile both and print the table; with `--point`, profile one in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--model", help="a folder or Hub name; by default SmolLM2-135M-Instruct, fetched once")
    parser.add_argument("--trainer", choices=("opd", "combine"), default="combine")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--completions", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=0, help="rows of a micro-batch; 0 for all")
    parser.add_argument("--steps", type=int, default=2, help="measured steps, after one that warms up")
    args = parser.parse_args()
    logging.disable_progress_bar()
    if args.point is not None:
        print(json.dumps(measure(**args.point)))
        return
    shape = Shape(args.prompt, args.completions, args.tokens, args.rows)
    point = {"model": args.model or fetch_model(), "shape": asdict(shape), "steps": args.steps}
    kinds = {"ours": args.trainer, "in full": f"{args.trainer}_in_full", "stock": "profiled_grpo"}
    results = {name: in_fresh_process(os.fspath(__file__), {**point, "kind": kind}) for name, kind in kinds.items()}
    print(f"{shape}; ours is `{args.trainer}`, in full with `prefix_sharing=False`\n")
    print_table(results)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
