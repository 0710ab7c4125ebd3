"""What it costs to score every turn of a trajectory under a hint of its own, beside one pass over the trajectory.

    python benchmarks/turn_scoring.py

SmolLM2-135M in float32 on CPU (or one GPU). A prompt of 200 tokens, then 8 turns of 60 tokens with a tool's answer of
60 between each two, and 5 tokens of the template in front of every turn. The teacher scores each turn under the
trajectory so far and a hint of 20 tokens right in front of the turn: 8 rows, of which each goes on from the trajectory
where the one before it left. Three ways take turns:

- shared: the 8 rows at once, where what they have in common is run once;
- in full: each of the 8 rows by itself;
- one pass: the trajectory as one row without hints, whose tokens after the prompt are all scored.

The last line is JSON: `{"turns8_over_full_pass": r, "max_abs_diff": d}`, the ratio of the median times of "shared" and
"one pass", and the largest difference, in nats, of a log-prob between "shared" and "in full". It exits with status 1
where that difference is 1e-3 or more.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from accelerate import Accelerator
from torch import nn
from transformers.utils import logging

from benchmarks.common import fetch_model, now
from benchmarks.multi_hint import load
from trl_openclaw.prefix_plan import make_plan
from trl_openclaw.scoring import TeacherRow, TokenScorer
from trl_openclaw.shared_prefix import PrefixSharing

OPENING = 5
"""Tokens of the template in front of a turn, after the hint."""

TOLERANCE = 1e-3


def make_rows(args: argparse.Namespace, vocabulary: int) -> tuple[list[TeacherRow], TeacherRow]:
    """The turns, each under its hint, and the whole trajectory. Any tokens will do."""
    torch.manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(vocabulary, (length,)).tolist()

    trajectory, opening = ids(args.prompt), ids(OPENING)
    rows = []
    for turn in range(args.turns):
        if turn:
            trajectory += ids(args.tool)
        completion = ids(args.tokens)
        rows.append(TeacherRow([*trajectory, *ids(args.hint), *opening], completion))
        trajectory += opening + completion
    return rows, TeacherRow(trajectory[: args.prompt], trajectory[args.prompt :])


def tokens_run(model: nn.Module, run: Callable[[], torch.Tensor]) -> int:
    """How many tokens the model is run on, padding included."""
    seen: list[int] = []
    handle = model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    run()
    handle.remove()
    return sum(seen)


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of two answers, which must have the same places; NaN where one has no number and the other has."""
    if not torch.equal(a.isnan(), b.isnan()):
        return float("nan")
    return (a - b).nan_to_num().abs().max().item()


def main() -> None:
    """Let the three ways take turns and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or Hub name; by default SmolLM2-135M-Instruct, fetched once")
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=60, help="tokens of each turn")
    parser.add_argument("--tool", type=int, default=60, help="tokens of a tool's answer")
    parser.add_argument("--hint", type=int, default=20, help="tokens of each hint")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    logging.disable_progress_bar()
    accelerator = Accelerator()
    model = load(args.model or fetch_model(), accelerator.device)
    rows, whole = make_rows(args, model.config.vocab_size)
    sharing = PrefixSharing(accelerator)
    shared, plain = TokenScorer(accelerator, 0, sharing=sharing), TokenScorer(accelerator, 0)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "shared": lambda: shared.score(model, rows).per_token_logps,
        "in full": lambda: torch.cat([plain.score(model, [row]).per_token_logps for row in rows]),
        "one pass": lambda: plain.score(model, [whole]).per_token_logps,
    }
    ways["shared"]()  # tries out whether the model can share
    tokens = {name: tokens_run(model, run) for name, run in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found = {}
    for _ in range(args.rounds):
        for name, run in ways.items():
            started = now()
            found[name] = run()
            seconds[name].append(now() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    texts = [[*row.prompt_ids, *row.completion_ids] for row in rows]
    passes = len(make_plan(texts, None, sharing.pass_cost).passes)
    print(f"{args.turns} turns of a trajectory of {whole.length:,} tokens, scored in {passes} passes")
    for name, values in seconds.items():
        times = f"{medians[name]:6.2f} s ({min(values):.2f} to {max(values):.2f})"
        ratios = f"{medians[name] / medians['one pass']:.2f} of one pass, {tokens[name] / whole.length:.2f} in tokens"
        print(f"{name:>8}: {times}  {ratios}")
    least = make_plan(texts, None, 0).cost / whole.length
    print(f"Running every distinct beginning once, without padding, would be {least:.2f} in tokens.")
    difference = largest_difference(found["shared"], found["in full"])
    ratio = medians["shared"] / medians["one pass"]
    print(json.dumps({"turns8_over_full_pass": round(ratio, 3), "max_abs_diff": difference}))
    if not difference < TOLERANCE:
        sys.exit(f"The log-probs of both ways differ by {difference:.1e} nats, which is more than rounding.")


if __name__ == "__main__":
    main()
