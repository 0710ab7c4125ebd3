"""What a version says when it may choose freely: length, repetition and entropy of greedy replies."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

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
    """Have the model as it is now answer, all prompts at once, for one process alone.

    Args:
        trainer: Holds the model.
        prompts: Ids, up to where the reply begins.
        tokens: Room for a reply.
    """
    model, device = trainer.accelerator.unwrap_model(trainer.model), trainer.accelerator.device
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    masks = [torch.ones_like(row) for row in rows]
    ids = pad_sequence(rows, batch_first=True, padding_value=trainer.pad_token_id, padding_side="left")
    with evaluating(model), trainer.accelerator.autocast():
        found = model.generate(
            input_ids=ids,
            attention_mask=pad_sequence(masks, batch_first=True, padding_side="left"),
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
    sampled = found.sequences[:, ids.size(1) :].tolist()
    replies = [until_end(reply, trainer.eos_token_ids) for reply in sampled]
    entropies = torch.stack([entropy(logits) for logits in found.logits], dim=1)  # (prompts, tokens)
    return Replies(
        mean([len(reply) for reply in replies]),
        mean([row[: len(reply)].mean().item() for row, reply in zip(entropies, replies, strict=True)]),
        mean([repetition(reply) for reply in replies]),
    )


def until_end(ids: Sequence[int], ends: Collection[int]) -> Sequence[int]:
    """A reply up to the token that ends it, which is part of it; what a batch fills it up with is not."""
    return ids[: next((place for place, token in enumerate(ids, start=1) if token in ends), len(ids))]


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Of distributions over `V` tokens with logits `(..., V)`, in nats `(...)`."""
    logps = logits.float().log_softmax(dim=-1)
    return -(logps.exp() * logps).nansum(dim=-1)


def repetition(ids: Sequence[int]) -> float:
    """The share of groups of `GROUP` tokens that stood before."""
    groups = [tuple(ids[i : i + GROUP]) for i in range(len(ids) - GROUP + 1)]
    return 1 - len(set(groups)) / len(groups) if groups else 0.0
