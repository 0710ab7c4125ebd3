"""Run by `test_sharded.py` in two processes: prompts shared, and not, under PyTorch's `fully_shard` (FSDP2)."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed
from accelerate import Accelerator
from launch_ranks import take_leave
from model_zoo import tokens_counted
from tiny import tiny_llama
from torch import nn
from torch.distributed.fsdp import fully_shard
from trl.trainer.utils import add_fused_lm_head
from turn_rows import turns_of

from trl_openclaw._trl import completion_positions_only
from trl_openclaw.scoring import TokenScorer
from trl_openclaw.shared_prefix import PrefixSharing

PROMPT, COMPLETION, ROWS = 40, 6, 4


def rows_of(rank: int) -> torch.Tensor:
    """Four equal prompts on rank 0 and four different ones on the other, with completions of their own."""
    ids = torch.randint(0, 256, (ROWS, PROMPT + COMPLETION), generator=torch.Generator().manual_seed(rank))
    if rank == 0:
        ids[:, :PROMPT] = ids[0, :PROMPT]
    return ids


def sharded_llama() -> nn.Module:
    model = tiny_llama()
    add_fused_lm_head(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def scores_of_turns(accelerator: Accelerator, sharing: PrefixSharing | None) -> tuple[torch.Tensor, int, int]:
    """Log-probs of a trajectory's turns on rank 0, of one turn on the other; tokens and passes that were run here."""
    rows = turns_of(1) if accelerator.process_index == 0 else turns_of(2)[:1]
    model, scorer, passes = sharded_llama(), TokenScorer(accelerator, 257, sharing=sharing), []
    scorer.score(model, rows)  # tries the model out
    model.model.layers[0].register_forward_hook(lambda *args: passes.append(1))
    with tokens_counted(model) as tokens:
        logps = scorer.score(model, rows).per_token_logps
    return logps, tokens[False], len(passes)


def gradients_of_two_steps(ids: torch.Tensor, sharing: PrefixSharing | None) -> tuple[dict[str, torch.Tensor], int]:
    """The second step's gradients, put together from all ranks, and the tokens that it ran here."""
    model = sharded_llama().train()
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    for _ in range(2):
        model.zero_grad()
        kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        with tokens_counted(model) as tokens, completion_positions_only(model, kwargs, COMPLETION, None, sharing):
            logps = model(**kwargs, fused_lm_head=True).log_probs[:, -COMPLETION:]
        (logps * torch.arange(logps.numel()).view(logps.shape)).mean().backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}, tokens[True]


def main(folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    ids = rows_of(accelerator.process_index)
    whole, every = gradients_of_two_steps(ids, None)
    shared, once = gradients_of_two_steps(ids, PrefixSharing(accelerator, pass_cost=0))
    differences = {name: ((shared[name] - whole[name]).norm() / whole[name].norm()).item() for name in whole}
    (logps, run, _), (shared_logps, shared_run, passes) = (
        scores_of_turns(accelerator, sharing) for sharing in (None, PrefixSharing(accelerator, pass_cost=0))
    )
    result = {
        "differences": differences,
        "tokens": every,
        "shared_tokens": once,
        "score_difference": (logps - shared_logps).nan_to_num().abs().max().item(),
        "scored": [int(found.isfinite().sum()) for found in (logps, shared_logps)],
        "scored_tokens": run,
        "shared_scored_tokens": shared_run,
        "score_passes": passes,
    }
    Path(folder, f"rank{accelerator.process_index}.json").write_text(json.dumps(result))
    take_leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
