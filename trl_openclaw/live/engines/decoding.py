"""Sampling from a transformers model, one token at a time, with the log-prob of each."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from ...prefix_passes import cache_name_of
from .base import GREEDY_BELOW

COLD = 0.2
"""Below this temperature next to nothing is left to chance: log-probs are 0 or far below, and tell little."""


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Args:
        temperature: 0, and anything below 1e-5, takes the likeliest token each time.
        top_p: The smallest set of likeliest tokens with at least this mass is sampled from.
        seed: The same seed gives the same reply to the same prompt; `None` draws one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature < GREEDY_BELOW

    @property
    def logprobs_temperature(self) -> float:
        """At which temperature log-probs are taken: that of sampling, or 1 where it is below 0.2."""
        return self.temperature if self.temperature >= COLD else 1.0


@torch.no_grad()
def sampled_tokens(model: nn.Module, prompt_ids: Sequence[int], sampling: Sampling) -> Iterator[tuple[int, float]]:
    """Ids, each with its log-prob in nats at `sampling.logprobs_temperature`, without end. `top_p` leaves it as it is.

    Args:
        model: A causal language model in evaluation mode.
        prompt_ids: What stands before, at least one id.
        sampling: How to sample.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device)
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed % 2**63)
    ids = torch.tensor([list(prompt_ids)], device=device)
    settings = _forward_settings(model)
    while True:
        logits = model(input_ids=ids, use_cache=True, **settings).logits[0, -1].float()  # (V,)
        token = _draw(logits, sampling, generator)
        yield int(token), float((logits / sampling.logprobs_temperature).log_softmax(-1)[token])
        ids = token.view(1, 1)


def _draw(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> torch.Tensor:
    """The next id, of logits (V,)."""
    if sampling.greedy:
        return logits.argmax()
    probs = (logits / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        ordered, places = probs.sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p  # the mass before a token is enough without it
        probs = probs.scatter(-1, places, ordered.masked_fill(beyond, 0.0))
    return torch.multinomial(probs, 1, generator=generator).squeeze()


def _forward_settings(model: Any) -> dict[str, Any]:
    """A new cache, and logits of the last position alone, under the names that this model has for them."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    settings: dict[str, Any] = {cache_name_of(base.forward): DynamicCache(config=base.config)}
    keeps = "logits_to_keep" in inspect.signature(base.forward).parameters
    return {**settings, "logits_to_keep": 1} if keeps else settings
