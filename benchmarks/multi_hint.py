"""What sharing prefixes saves a teacher: several completions of one long prompt, each scored under several hints.

    python benchmarks/multi_hint.py

SmolLM2-135M in float32 on CPU (or one GPU). The prompt has 1,024 tokens, each of 3 hints 48, each of 4 completions 64.
A hint stands at the end of the prompt, in front of the template's last tokens. Every completion is scored under every
hint: 12 rows, in which the prompt comes 12 times and each hint 4 times. With sharing, the prompt is run once and each
hint once. Without it every row is run in full: all that fit into the token budget in one pass, or row by row; the
faster of the two is what sharing is compared with. All take turns.

The last line is JSON: `{"speedup": s, "max_abs_diff": d}`, the ratio of the median times, and the largest difference
between any two log-probs of one token, in nats.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from benchmarks.common import fetch_model, now
from trl_openclaw._trl import add_fused_lm_head, use_small_tiles
from trl_openclaw.scoring import TeacherRow, TokenScorer
from trl_openclaw.shared_prefix import PrefixSharing

SUFFIX = 5
"""Tokens of the template after the hint."""


def make_rows(args: argparse.Namespace, vocabulary: int) -> list[TeacherRow]:
    """Every completion under every hint. Any tokens will do."""
    torch.manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(vocabulary, (length,)).tolist()

    prompt, suffix = ids(args.prompt - SUFFIX), ids(SUFFIX)
    hints = [ids(args.hint) for _ in range(args.hints)]
    completions = [ids(args.tokens) for _ in range(args.completions)]
    return [TeacherRow([*prompt, *hint, *suffix], completion) for completion in completions for hint in hints]


def load(path: str, device: torch.device) -> PreTrainedModel:
    """The teacher, ready to score."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    add_fused_lm_head(model, temperature=1.0)
    if device.type == "cpu":
        use_small_tiles()  # as the trainers do
    return model


def main() -> None:
    """Let the ways of scoring take turns and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or Hub name; by default SmolLM2-135M-Instruct, fetched once")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--hint", type=int, default=48, help="tokens of each hint")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each completion")
    parser.add_argument("--completions", type=int, default=4)
    parser.add_argument("--hints", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    logging.disable_progress_bar()
    accelerator = Accelerator()
    model = load(args.model or fetch_model(), accelerator.device)
    rows = make_rows(args, model.config.vocab_size)
    length = args.prompt + args.hint + args.tokens
    scorers = {
        "shared": TokenScorer(accelerator, 0, sharing=PrefixSharing(accelerator)),
        "in full": TokenScorer(accelerator, 0),
        "row by row": TokenScorer(accelerator, 0, length),
    }
    seconds: dict[str, list[float]] = {name: [] for name in scorers}
    found = {}
    scorers["shared"].score(model, rows)  # tries out whether the model can share
    for _ in range(args.rounds):
        for name, scorer in scorers.items():
            started = now()
            found[name] = scorer.score(model, rows).per_token_logps
            seconds[name].append(now() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"{len(rows)} rows of {length} tokens: {args.completions} completions under {args.hints} hints")
    for name, values in seconds.items():
        difference = (found[name] - found["row by row"]).abs().max().item()
        spread = f"({min(values):.2f} to {max(values):.2f})"
        print(f"{name:>10}: {medians[name]:6.2f} s {spread}  off by {difference:.1e} at most")
    speedup = min(medians["in full"], medians["row by row"]) / medians["shared"]
    differences = [(found["shared"] - found[name]).abs().max().item() for name in ("in full", "row by row")]
    print(json.dumps({"speedup": round(speedup, 2), "max_abs_diff": max(differences)}))


if __name__ == "__main__":
    main()
