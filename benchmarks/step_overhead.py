"""What distillation costs: steps of our trainers against stock `GRPOTrainer` steps on the same work, in one run.

    python benchmarks/step_overhead.py

SmolLM2-135M in float32 on CPU (or one GPU), completions of 64 tokens. At one short prompt with 8 completions: stock
GRPO; `OPDTrainer` with one hint for each completion; `CombineTrainer` with three hints for each, of which the one that
agrees best with the student is taken (M = 3, `hint_selection="sequence"`), and four tokens compared at each position
(k = 4); and TRL's experimental SDPO. At one prompt of 1,024 tokens: Combine and stock GRPO with 4 completions, OPD and
stock GRPO with 8, in micro-batches of 4: stock GRPO needs more than 16 GiB for 8 rows at once. The trainers of a shape
take turns, so that whatever else the machine does meets all of them.

Where nothing is shared, the arithmetic floor of OPD is about 1.2: a step is one generation, one forward and one
backward (about twice the forward), and the teacher adds one forward.

SDPO is set up to do the same work: each completion's teacher reads the feedback that is the hint of OPD, in SDPO's own
template; its weights are frozen as those of our teacher; the loss is on the sampled tokens alone. What it does
differently: it runs the teacher inside the loss of each micro-batch, holds the logits `(B, T, V)` of both models
instead of working on hidden states in tiles, takes the plain gradient of the gap instead of GRPO's clipped surrogate,
and computes neither the entropy nor the share of clipped tokens for the log.

The last line is JSON: the ratios of the median step times, such as `{"opd_over_grpo": r, ...}`.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from transformers.utils import logging

from benchmarks.common import Shape, StepTimer, fetch_model, run_steps
from trl_openclaw.trainer.step_profile import PARTS, seconds_key

COMPARISONS = {
    "opd_over_grpo": ("short", "opd", "grpo"),
    "combine_m3_over_grpo": ("short", "combine", "grpo"),
    "combine_m3_long_over_grpo": ("long", "combine", "grpo"),
    "opd_long_g8_over_grpo": ("long_g8", "opd", "grpo"),
    "opd_over_sdpo": ("short", "opd", "sdpo"),
}
"""A ratio's shape, numerator and denominator."""


def measure(shape: Shape, kinds: list[str], model: str, rounds: int, steps: int) -> dict[str, StepTimer]:
    """Let the trainers take turns, round by round, and print what each took."""
    timers = {kind: StepTimer() for kind in kinds}
    for _ in range(rounds):
        for kind, timer in timers.items():
            run_steps(kind, model, shape, steps, timer)
    print(f"{shape}, median of {rounds * steps} steps each", flush=True)
    for kind, timer in timers.items():
        low, high = min(timer.seconds), max(timer.seconds)
        print(f"{kind:>10} step: {median(timer):6.2f} s ({low:.2f} to {high:.2f})", flush=True)
    if "opd" in timers:
        print_split(timers["opd"])
    return timers


def median(timer: StepTimer) -> float:
    """Seconds of the median step."""
    return statistics.median(timer.seconds)


def print_split(timer: StepTimer) -> None:
    """Where the steps' time went, by the trainer's own metrics."""
    total = statistics.median(log[seconds_key("total")] for log in timer.logs)
    for part in PARTS:
        seconds = statistics.median(log[seconds_key(part)] for log in timer.logs)
        print(f"{part:>15}: {seconds:6.2f} s  {seconds / total:6.1%} of the OPD step")


def main() -> None:
    """Measure what the chosen ratios need, shape by shape, and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=list(COMPARISONS), help="ratios to measure")
    parser.add_argument("--model", help="a folder or Hub name; by default SmolLM2-135M-Instruct, fetched once")
    parser.add_argument("--completions", type=int, default=8, help="for Combine at long prompts, half as many")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the long prompt")
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch at long prompts, at most; 0 for all")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each trainer at short prompts")
    parser.add_argument("--steps", type=int, default=3, help="measured steps in a turn at short prompts")
    parser.add_argument("--long-rounds", type=int, default=2)
    parser.add_argument("--long-steps", type=int, default=2)
    args = parser.parse_args()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    logging.disable_progress_bar()
    model = args.model or fetch_model()
    long = {"prompt": args.prompt, "tokens": args.tokens, "rows": args.rows}
    shapes = {
        "short": (Shape(0, args.completions, args.tokens), args.rounds, args.steps),
        "long": (Shape(completions=args.completions // 2, **long), args.long_rounds, args.long_steps),
        "long_g8": (Shape(completions=args.completions, **long), args.long_rounds, args.long_steps),
    }
    ratios = {}
    for name, (shape, rounds, steps) in shapes.items():
        wanted = {ratio: pair for ratio, (where, *pair) in COMPARISONS.items() if where == name and ratio in args.only}
        kinds = list(dict.fromkeys(kind for pair in wanted.values() for kind in reversed(pair)))
        if kinds:
            timers = measure(shape, kinds, model, rounds, steps)
            ratios |= {ratio: round(median(timers[a]) / median(timers[b]), 3) for ratio, (a, b) in wanted.items()}
    print(json.dumps({ratio: ratios[ratio] for ratio in COMPARISONS if ratio in ratios}))


if __name__ == "__main__":
    main()
