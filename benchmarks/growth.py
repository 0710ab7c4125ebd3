"""How step time and peak memory grow with the length of the prompt, the completions G and the hints M, ours and stock.

    python benchmarks/growth.py --folder docs/images

SmolLM2-135M in float32 on CPU (or one GPU), completions of 64 tokens, all rows of a step in one micro-batch. One of
the three is varied: the prompt from 256 to 4,096 tokens, G from 1 to 16, M from 1 to 5; the others stay at 1,024
tokens, G = 4 and M = 3. Ours is Combine with M hints for each completion and four tokens compared at each position.
Stock `GRPOTrainer` has no teacher, so it does the same whatever M is. Each point has a process of its own, one step
that warms up and one that is measured. A point that needs more than `--memory` GiB or `--minutes` is left out and
named, and so are the larger ones after it.

The floor of the time is the arithmetic of a step that runs every token it must run once: the prompt once for all
completions, each hint once, each completion once for each hint, and what is trained three times (forward, and a
backward of twice the work), at the speed of a plain forward pass over the prompt, measured here. The floor of stock
GRPO is the same without anything shared. Sampling is counted like such a pass, though it goes token by token and takes
longer. The floor of the memory is the weights, their gradients and Adam's two averages, and the frozen teacher's
weights.

Prints the tables in Markdown and writes `growth.png` into the folder. The last line is JSON: a list of points.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.common import Shape, StepTimer, fetch_model, in_fresh_process, now, run_steps
from trl_openclaw.trainer.step_profile import GIB, peak_memory

BASE = Shape(prompt=1024, completions=4, tokens=64, hints=3)
QUICK = Shape(prompt=40, completions=2, tokens=4, hints=2)
AXES = {"prompt": (256, 1024, 4096), "completions": (1, 4, 16), "hints": (1, 3, 5)}
QUICK_AXES = {"prompt": (20, 40), "completions": (1, 2), "hints": (1, 2)}
LABELS = {"prompt": "tokens of the prompt", "completions": "completions G", "hints": "hints M"}
KINDS = {"ours": "combine", "stock": "grpo"}
NO_MEMORY = ("can't allocate memory", "out of memory", "MemoryError", "bad_alloc", "exit status -9")
"""What a process says, or how it ends, when it got no memory."""

HINT_TOKENS = 15
"""About what one of `common.HINTS` has, for the floor."""


@dataclass(frozen=True)
class Point:
    """A measured step: seconds and GiB, or why it was left out."""

    who: str
    shape: Shape
    seconds: float | None = None
    peak_gib: float | None = None
    left_out: str = ""


def measure(kind: str, model: str, shape: dict[str, int], memory: float) -> dict[str, float]:
    """One step in this process, which may have so many GiB of its own."""
    if not torch.accelerator.is_available():
        resource.setrlimit(resource.RLIMIT_DATA, (int(memory * GIB), resource.RLIM_INFINITY))
    timer = StepTimer()
    run_steps(kind, model, Shape(**shape), 1, timer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {"seconds": timer.seconds[0], "peak_gib": peak_memory(device) / GIB}


def try_point(who: str, shape: Shape, args: argparse.Namespace) -> Point:
    """Measure a point in a process of its own."""
    if who == "stock" and shape.completions == 1:
        return Point(who, shape, left_out="refused: stock GRPO needs two completions to compare")
    point = {"kind": KINDS[who], "model": args.model, "shape": asdict(shape), "memory": args.memory}
    try:
        return Point(who, shape, **in_fresh_process(os.fspath(__file__), point, timeout=60 * args.minutes))
    except subprocess.TimeoutExpired:
        return Point(who, shape, left_out=f"more than {args.minutes:g} minutes")
    except RuntimeError as error:
        if not any(sign in str(error) for sign in NO_MEMORY):
            raise
        return Point(who, shape, left_out=f"more than {args.memory:g} GiB")


def run_axis(
    axis: str, values: tuple[int, ...], base: Shape, args: argparse.Namespace, known: dict[tuple[str, Shape], Point]
) -> list[Point]:
    """Both trainers along one axis, until a point does not fit. What is in `known` is not measured again."""
    points: list[Point] = []
    for who in KINDS:
        stopped = ""
        for value in values:
            shape = replace(base, **{axis: value})
            if who == "stock":
                shape = replace(shape, hints=base.hints)  # which it does not have
            if stopped:
                point = Point(who, shape, left_out=stopped)
            elif (who, shape) in known:
                point = known[who, shape]
            else:
                point = known[who, shape] = try_point(who, shape, args)
            points.append(point)
            if point.left_out.startswith("more"):
                stopped = point.left_out
            print(f"{who} at {axis} {value}: {cell(point.seconds)} s, {cell(point.peak_gib)} GiB", flush=True)
    return points


def tokens_run(who: str, shape: Shape) -> int:
    """Tokens that a step must run through the model, those that are trained three times over."""
    p, g, t, m = shape.prompt, shape.completions, shape.tokens, shape.hints
    if who == "stock":
        return 4 * g * (p + t)
    return 4 * (p + g * t) + p + m * (HINT_TOKENS + g * t)


def forward_seconds(model: str, tokens: int) -> tuple[float, int]:
    """Seconds that one token takes in a plain forward pass over so many, and the model's number of weights."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    ids = torch.randint(loaded.config.vocab_size, (1, tokens), device=device)
    taken = []
    with torch.no_grad():
        for _ in range(4):
            started = now()
            loaded.base_model(ids, use_cache=False)
            taken.append(now() - started)
    return statistics.median(taken[1:]) / tokens, sum(p.numel() for p in loaded.parameters())


def floors(point: Point, per_token: float, weights: int) -> tuple[float, float]:
    """Seconds and GiB that a step takes at least."""
    copies = 5 if point.who == "ours" else 4
    return per_token * tokens_run(point.who, point.shape), copies * 4 * weights / GIB


def cell(value: float | None) -> str:
    """A figure for the table, or a dash where there is none."""
    return "–" if value is None else f"{value:.1f}"


def print_table(axis: str, values: tuple[int, ...], points: list[Point], rate: tuple[float, int]) -> None:
    """Markdown: a line for each value, ours beside stock and the floors, and what was left out below it."""
    print(f"\n| {LABELS[axis]} | ours, s (floor) | stock, s (floor) | ratio (floor) | ours, GiB | stock, GiB |")
    print("|---|---|---|---|---|---|")
    for i, value in enumerate(values):
        ours, stock = points[i], points[len(values) + i]
        low, high = floors(ours, *rate)[0], floors(stock, *rate)[0]
        ratio = f"{ours.seconds / stock.seconds:.2f}" if ours.seconds and stock.seconds else "–"
        cells = [f"{cell(p.seconds)} ({floor:.1f})" for p, floor in ((ours, low), (stock, high))]
        cells += [f"{ratio} ({low / high:.2f})", cell(ours.peak_gib), cell(stock.peak_gib)]
        print(f"| {value:,} | {' | '.join(cells)} |")
    missing = [f"{p.who} at {getattr(p.shape, axis):,} ({p.left_out})" for p in points if p.left_out]
    if missing:
        print(f"\nLeft out: {'; '.join(missing)}.")


def draw(axes: dict[str, tuple[int, ...]], found: dict[str, list[Point]], rate: tuple[float, int], path: Path) -> None:
    """Time above memory, a column for each axis, the floors dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(2, len(axes), figsize=(4 * len(axes), 6.5), sharex="col", squeeze=False)
    for column, (axis, values) in enumerate(axes.items()):
        for who, colour in zip(KINDS, ("tab:blue", "tab:gray"), strict=True):
            points = [p for p in found[axis] if p.who == who]
            for row, field in enumerate(("seconds", "peak_gib")):
                heights = [getattr(p, field) or float("nan") for p in points]
                lowest = [floors(p, *rate)[row] for p in points]
                panels[row, column].plot(values, heights, "o-", color=colour, label=who)
                panels[row, column].plot(values, lowest, "--", color=colour, linewidth=1, label=f"{who}, floor")
        panels[1, column].set_xlabel(LABELS[axis])
        if axis != "hints":
            panels[1, column].set_xscale("log", base=2)
        panels[1, column].set_xticks(values, [f"{value:,}" for value in values])
    panels[0, 0].set_ylabel("seconds of a step")
    panels[1, 0].set_ylabel("peak memory, GiB")
    for panel in panels.flat:
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0, 0].legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def as_json(axis: str, point: Point) -> dict[str, Any]:
    """A point for the last line."""
    shape = {name: getattr(point.shape, name) for name in ("prompt", "completions", "tokens", "hints")}
    measured = {"seconds": point.seconds, "peak_gib": point.peak_gib, "left_out": point.left_out}
    return {"axis": axis, "who": point.who, **shape, **measured}


def main() -> None:
    """Measure all points, print the tables and write the picture; with `--point`, measure one in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--model", help="a folder or Hub name; by default SmolLM2-135M-Instruct, fetched once")
    parser.add_argument("--only", nargs="+", choices=AXES, default=list(AXES), help="what to vary")
    parser.add_argument("--folder", type=Path, default=Path("runs/growth"), help="where the picture goes")
    parser.add_argument("--memory", type=float, default=18, help="GiB that a process may allocate (on a CPU)")
    parser.add_argument("--minutes", type=float, default=10, help="minutes that a point may take")
    parser.add_argument("--quick", action="store_true", help="a few small points, to see that it works")
    args = parser.parse_args()
    logging.disable_progress_bar()
    if args.point is not None:
        print(json.dumps(measure(**args.point)))
        return
    args.model = args.model or fetch_model()
    base, all_axes = (QUICK, QUICK_AXES) if args.quick else (BASE, AXES)
    axes = {axis: values for axis, values in all_axes.items() if axis in args.only}
    rate = forward_seconds(args.model, base.prompt)
    known: dict[tuple[str, Shape], Point] = {}
    found = {axis: run_axis(axis, values, base, args, known) for axis, values in axes.items()}
    print(f"\n{base}, {base.hints} hints; a plain forward pass takes {1000 * rate[0]:.2f} ms a token")
    for axis, values in axes.items():
        print_table(axis, values, found[axis], rate)
    draw(axes, found, rate, args.folder / "growth.png")
    print(json.dumps([as_json(axis, point) for axis, points in found.items() for point in points]))


if __name__ == "__main__":
    main()
