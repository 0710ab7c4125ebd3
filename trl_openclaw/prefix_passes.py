"""Runs the passes of a plan, each of which goes on from the cache of the one before."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from .prefix_plan import ENDED, Pass, Plan


def run_passes(backbone: Callable, ids: torch.Tensor, plan: Plan, model: nn.Module) -> Iterator[Any]:
    """The output of every pass, without the cache, which is gone once the last one was asked for.

    Args:
        backbone: The forward function of the backbone.
        ids (`(B, W)`): The rows.
        plan: The passes.
        model: The bare model.
    """
    name, cached = cache_name_of(backbone), len(plan.passes) > 1
    takes_positions = "position_ids" in inspect.signature(backbone).parameters
    cache = DynamicCache(config=model.config.get_text_config())
    for layer in cache.layers:
        if hasattr(layer, "update_recurrent_state"):
            layer.update_recurrent_state = partial(_assign_recurrent_state, layer)
    for part in plan.passes:
        if part.parents:
            cache.reorder_cache(torch.tensor(part.parents, device=ids.device))
        entries = ids[list(part.rows), part.start : part.stop]
        kwargs: dict[str, Any] = {name: cache} if cached else {}
        if takes_positions:  # models that see images would take up where the last sampling left off
            kwargs["position_ids"] = torch.arange(part.start, part.stop, device=ids.device).expand(len(entries), -1)
        output = backbone(input_ids=entries, use_cache=cached, **kwargs)
        yield type(output)(last_hidden_state=output.last_hidden_state)


def copy_wanted(
    hidden: torch.Tensor, group: Sequence[int], starts: torch.Tensor, part: Pass, states: torch.Tensor
) -> None:
    """Put what a pass found at the last prompt tokens and the completions in its place.

    Args:
        hidden (`(B, T + 1, H)`): Of all rows of the call; changed.
        group: The n rows that were run.
        starts (`(n,)`): Where their completions begin.
        part: The pass.
        states (`(entries, stop - start, H)`): Its hidden states.
    """
    entries = torch.tensor(part.entries)
    columns = starts.unsqueeze(1) - 1 - part.start + torch.arange(hidden.size(1))
    wanted = (columns >= 0) & (columns < states.size(1)) & (entries != ENDED).unsqueeze(1)
    row, place = wanted.nonzero(as_tuple=True)
    if not len(row):  # nor would a backward pass gain by it
        return
    to, place, entry, column = (
        index.to(hidden.device) for index in (torch.tensor(group)[row], place, entries[row], columns[row, place])
    )
    hidden[to, place] = states[entry, column]


def cache_name_of(backbone: Callable) -> str:
    """What this release of transformers calls the cache among the arguments of a backbone."""
    return "cache" if "cache" in inspect.signature(backbone).parameters else "past_key_values"


def _assign_recurrent_state(layer: Any, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
    """What `LinearAttentionLayer.update_recurrent_state` does, without writing over what a backward pass needs."""
    layer.is_recurrent_states_initialized[state_idx] = True
    layer.recurrent_states[state_idx] = recurrent_states
    return recurrent_states
