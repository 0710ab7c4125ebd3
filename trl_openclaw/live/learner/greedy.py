"""What a version says when it may choose freely: length, repetition and entropy of greedy replies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...shared_prefix import evaluating
from .measure import mean

if TYPE_CHECKING:
    from .trainer import LiveTrainer

GROUP = 4
"""Tokens in a group that may be repeated."""


@dataclass(frozen=True)
class Replies:
    """Means over some greedy replies.

    Args:
        length: Tokens, the one that ends a reply included.
        entropy: Of each token's distribution, in nats.
        repetition: The share of groups of tokens that stood in the reply before, 0 to 1.
    """

    length: float
    entropy: float
    repetition: float


@torch.no_grad()
def greedy_replies(trainer: "LiveTrainer", prompts: Sequence[Sequence[int]], tokens: int) -> Replies:
    """Have the model as it is now answer, for one process alone.

    Args:
        trainer: Holds the model.
        prompts: Ids, up to where the reply begins.
        tokens: Room for a reply.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    lengths, entropies, repetitions = [], [], []
    with evaluating(model), trainer.accelerator.autocast():
        for prompt in prompts:
            ids = torch.tensor([list(prompt)], device=trainer.accelerator.device)
            found = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                eos_token_id=trainer.eos_token_ids,
                pad_token_id=trainer.pad_token_id,
                output_logits=True,
                return_dict_in_generate=True,
            )
            reply = found.sequences[0, ids.size(1) :].tolist()
            logps = torch.cat(found.logits).float().log_softmax(dim=-1)
            lengths.append(len(reply))
            entropies.append(-(logps.exp() * logps).nansum(dim=-1).mean().item())
            repetitions.append(repetition(reply))
    return Replies(mean(lengths), mean(entropies), mean(repetitions))


def repetition(ids: Sequence[int]) -> float:
    """The share of groups of `GROUP` tokens that stood before."""
    groups = [tuple(ids[i : i + GROUP]) for i in range(len(ids) - GROUP + 1)]
    return 1 - len(set(groups)) / len(groups) if groups else 0.0
