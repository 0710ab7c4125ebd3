"""What distillation losses need in memory: from the last hidden states to the loss and back, against TRL's SDPO.

    python benchmarks/loss_memory.py

A two-layer Llama with random weights and the width of SmolLM2-135M (hidden size 576, vocabulary 49,152, tied
embeddings) in float32 on CPU (or one GPU), 4 completions of 1,024 tokens, top 20. The teacher is the same model, which
sees another prompt before the same completion. The losses of `trl.experimental.sdpo` get the logits that its trainer
makes; ours get the hidden states, and their time and memory include finding the best tokens of both models, the
teacher's log-probs and the fused log-prob of the sampled token.

Each loss has a process of its own. What is measured is the peak above what was there before: on CPU the resident set
(Linux only), on a GPU the allocated memory. Where both sides compute the same number, it is compared first.

The last line is JSON: `{"topk_over_sdpo": a, "full_over_sdpo": b}`, the memory of our hungriest top-k loss over that of
SDPO's, and the same for the reverse KL over the whole vocabulary.
"""

import argparse
import json
import math
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

from trl_openclaw._trl import use_small_tiles
from trl_openclaw.hint_selection import support
from trl_openclaw.lm_head import LMHead, TokenStates, full_divergence
from trl_openclaw.losses import topk_reverse_kl, topk_surrogate

TEMPERATURE = 1.0
TILE, OUTPUTS = 32768, ("entropy",)
"""Tokens of the vocabulary in a tile of TRL's fused head, and what `GRPOTrainer` wants of it beside log-probs."""

PROMPT = 16
"""Tokens before the completion; the teacher's are others than the student's."""


class Batch(NamedTuple):
    """Last hidden states `(B, T, H)` of both models at the positions that predict the tokens `(B, T)`."""

    student: torch.Tensor
    teacher: torch.Tensor
    token_ids: torch.Tensor
    weight: torch.Tensor

    def first(self, tokens: int) -> "Batch":
        """The first tokens of every completion."""
        student = self.student.detach()[:, :tokens].requires_grad_()
        return Batch(student, self.teacher[:, :tokens], self.token_ids[:, :tokens], self.weight)


def make_batch(args: argparse.Namespace) -> Batch:
    """Run a small random model over both prompts, each followed by the same completions."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        initializer_range=0.1,  # far from uniform predictions, so that the losses are not all alike
        tie_word_embeddings=True,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(config).to(device)
    ids, prompt, hinted = (
        torch.randint(args.vocabulary, (args.rows, width), device=device) for width in (args.tokens, PROMPT, PROMPT)
    )
    with torch.no_grad():
        student, teacher = (
            model.model(torch.cat([before, ids], dim=1), use_cache=False).last_hidden_state[:, PROMPT - 1 : -1].clone()
            for before in (prompt, hinted)
        )
    return Batch(student.requires_grad_(), teacher, ids, model.lm_head.weight)


def sdpo_logits(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `(B, T, V)` of both models, as `SDPOTrainer` makes them."""
    student = torch.nn.functional.linear(batch.student, batch.weight) / TEMPERATURE
    with torch.no_grad():
        return student, torch.nn.functional.linear(batch.teacher, batch.weight) / TEMPERATURE


def sdpo_topk(batch: Batch, k: int) -> torch.Tensor:
    """SDPO's reverse KL on the student's top k and one bucket for the rest."""
    from trl.experimental.sdpo.loss_utils import compute_topk_self_distillation_loss

    settings = {"distillation_topk": k, "distillation_alpha": 1.0, "distillation_add_tail": True}
    return compute_topk_self_distillation_loss(*sdpo_logits(batch), **settings)


def sdpo_full(batch: Batch, k: int) -> torch.Tensor:
    """SDPO's reverse KL over the whole vocabulary."""
    from trl.experimental.sdpo.loss_utils import compute_full_logit_self_distillation_loss

    return compute_full_logit_self_distillation_loss(*sdpo_logits(batch), distillation_alpha=1.0)


def states(hidden: torch.Tensor, weight: torch.Tensor, token_ids: torch.Tensor) -> TokenStates:
    """What a forward pass with TRL's fused head leaves of its B T positions."""
    hidden, token_ids = hidden.flatten(0, 1), token_ids.flatten()
    logps = ChunkedLogProbFunction.apply(hidden, weight, None, token_ids, TEMPERATURE, TILE, None, 1.0, OUTPUTS)[0]
    return TokenStates(hidden, token_ids, logps, LMHead(weight, temperature=TEMPERATURE))


def both_states(batch: Batch) -> tuple[TokenStates, TokenStates]:
    """The states of student and teacher."""
    student = states(batch.student, batch.weight, batch.token_ids)
    return student, states(batch.teacher, batch.weight.detach(), batch.token_ids)


def on_support(batch: Batch, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs `(B T, k)` of student and teacher at the student's best tokens, and the mask of those that count."""
    student, teacher = both_states(batch)
    best = student.head.topk(student.hidden, k), teacher.head.topk(teacher.hidden, k)
    ids, mask = support(*best, "student")
    return student.log_probs_at(ids), teacher.log_probs_at(ids), mask


def our_topk_surrogate(batch: Batch, k: int) -> torch.Tensor:
    """`opd_loss="topk_surrogate"` of a policy that has not moved yet."""
    current, target, mask = on_support(batch, k)
    return topk_surrogate(current, current.detach(), target, mask, 1.0, 0.2, 0.28)


def our_topk_reverse_kl(batch: Batch, k: int) -> torch.Tensor:
    """`opd_loss="topk_reverse_kl"`."""
    return topk_reverse_kl(*on_support(batch, k))


def our_full_divergence(batch: Batch, k: int) -> torch.Tensor:
    """`opd_loss="full_divergence"`, as reverse KL."""
    student, teacher = both_states(batch)
    return full_divergence(student, teacher.hidden, teacher.head, beta=1.0)


LOSSES: dict[str, Callable[[Batch, int], torch.Tensor]] = {
    "sdpo_topk": sdpo_topk,
    "topk_surrogate": our_topk_surrogate,
    "topk_reverse_kl": our_topk_reverse_kl,
    "sdpo_full": sdpo_full,
    "full_divergence": our_full_divergence,
}
SAME_NUMBER = {"topk_reverse_kl": "sdpo_topk", "full_divergence": "sdpo_full"}


class PeakMemory:
    """Bytes at the peak since it was made, above those in use then."""

    def __init__(self, device: str):
        self.device = device
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident set starts anew
            self.before = resident("VmRSS")

    def bytes(self) -> int:
        """The peak so far."""
        return (torch.cuda.max_memory_allocated() if self.device == "cuda" else resident("VmHWM")) - self.before


def resident(field: str) -> int:
    """A size of this process in bytes, as Linux tells it."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def measure(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Loss, size of its gradient, peak memory and time of one loss in this process."""
    batch = make_batch(args)
    device = batch.student.device.type
    if device == "cpu":
        use_small_tiles()  # as the trainers do
    LOSSES[name](batch.first(2), args.top).mean().backward()  # loads what is loaded once
    batch.weight.grad = None
    memory, started = PeakMemory(device), time.perf_counter()
    loss = LOSSES[name](batch, args.top).mean()
    loss.backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    peak = memory.bytes()
    gradient = torch.stack([batch.student.grad.norm(), batch.weight.grad.norm()]).norm()
    return {"loss": loss.item(), "gradient": gradient.item(), "bytes": peak, "seconds": seconds}


def in_own_process(function: Callable, *values: object) -> dict[str, float]:
    """Call a function in a process that ends with it, so that no loss finds what another left behind."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *values).result()


def check_agreement(results: dict[str, dict[str, float]]) -> None:
    """Stop where two implementations of one number differ."""
    for ours, theirs in SAME_NUMBER.items():
        for field in ("loss", "gradient"):
            one, other = results[ours][field], results[theirs][field]
            if not math.isclose(one, other, rel_tol=1e-4):
                sys.exit(f"{ours} and {theirs} should have one {field}, got {one} and {other}")


def main() -> None:
    """Measure each loss in its own process and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--top", type=int, default=20, help="size of the support")
    parser.add_argument("--hidden", type=int, default=576, help="a multiple of 18")
    parser.add_argument("--vocabulary", type=int, default=49152)
    args = parser.parse_args()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    results = {name: in_own_process(measure, name, args) for name in LOSSES}
    check_agreement(results)
    print(f"{args.rows} completions of {args.tokens} tokens, hidden size {args.hidden}, vocabulary {args.vocabulary}")
    for name, result in results.items():
        print(f"{name:>15}: {result['bytes'] / 2**20:7.0f} MiB {result['seconds']:6.1f} s  loss {result['loss']:.5f}")
    used = {name: result["bytes"] for name, result in results.items()}
    topk = max(used["topk_surrogate"], used["topk_reverse_kl"]) / used["sdpo_topk"]
    full = used["full_divergence"] / used["sdpo_full"]
    print(json.dumps({"topk_over_sdpo": round(topk, 3), "full_over_sdpo": round(full, 3)}))


if __name__ == "__main__":
    main()
