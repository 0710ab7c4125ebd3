"""Runs a model on rows that begin alike: each shared beginning once, its keys and values expanded for all that go on.

Exact, with and without gradients: a token sees the very keys and values that it would see in a row of its own. See
`prefix_plan` for which pieces are shared, and `prefix_passes` for how they are run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .dropout import largest_dropout
from .prefix_passes import copy_wanted, run_passes
from .prefix_plan import Plan, make_groups, make_plan

logger = get_logger(__name__)

PASS_COST = {"cpu": 64}
"""What one more forward pass costs, in tokens that could have been run instead. With a model of 135M parameters on two
CPU cores, a pass over 8 tokens took as long as 46 tokens of a long one."""

_OTHER_DEVICES = 512
"""The same for accelerators, which wait for kernels to start: a guess, not a measurement."""

TEXT_INPUTS = {"input_ids", "attention_mask", "labels", "fused_lm_head", "position_ids"}

# Relative differences of hidden states. A wrong cache moves them by their own size, and rounding by far less.
_TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-6}
_TOLERANCE_OF_TF32 = 1e-2
_TOLERANCE_OF_HALF = 0.1

_NO_GRADIENTS = "gradients through the cache of such a model are shared in a single process only"


@dataclass(frozen=True)
class SharedRows:
    """The rows of one call, without padding on the left, and how they are run.

    Args:
        ids (`(B, W)`): Prompt and completion of each row, filled up on the right.
        starts (`(B,)`): Where the completions begin, on the CPU.
        groups: Rows that are run together, and their passes. Empty where this process has to run the batch as it is.
        passes: How many passes every process runs.
    """

    ids: torch.Tensor
    starts: torch.Tensor
    groups: Sequence[tuple[list[int], Plan]]
    passes: int


class PrefixSharing:
    """Decides which calls of a model share prefixes, and runs them.

    A model is tried out at its first call. Where its cache cannot be expanded, or gives other numbers, all its calls
    are run as they are, and a warning says so once.

    Args:
        accelerator: Its processes run the same number of passes, whatever their rows have in common.
        pass_cost: What a pass costs by itself, in tokens.
    """

    def __init__(self, accelerator: Accelerator, pass_cost: int | None = None):
        self.accelerator = accelerator
        device = accelerator.device.type
        self.pass_cost = PASS_COST.get(device, _OTHER_DEVICES) if pass_cost is None else pass_cost
        self._refused: WeakKeyDictionary[nn.Module, dict[bool, str | None]] = WeakKeyDictionary()
        self._said: set[str] = set()

    def works_for(self, model: nn.Module) -> bool:
        """Whether a model, perhaps wrapped, can share prefixes without gradients, or has yet to be tried out."""
        bare = bare_model(self.accelerator.unwrap_model(model))
        return _rope_of_the_length(bare.config.get_text_config()) is None and (
            self._refused.get(bare, {}).get(False) is None
        )

    def find(self, model: nn.Module, kwargs: Mapping[str, Any], keep: int) -> SharedRows | None:
        """What can be shared in a call, or `None`. A collective.

        Args:
            model: The bare model.
            kwargs: The keyword arguments of the call: `input_ids` `(B, P + T)`, prompts padded on the left and
                completions on the right, and `attention_mask`.
            keep: Number T of completion positions.
        """
        rows = self._own_rows(model, kwargs, keep)
        passes = torch.tensor([0 if rows is None else rows.passes], device=self.accelerator.device)
        if self.accelerator.num_processes > 1:
            passes = self.accelerator.gather(passes)
        most = int(passes.max())
        if most == 0:
            return None
        if rows is None:
            return SharedRows(kwargs["input_ids"], torch.zeros(len(kwargs["input_ids"])), (), most)
        return replace(rows, passes=most)

    def _own_rows(self, model: nn.Module, kwargs: Mapping[str, Any], keep: int) -> SharedRows | None:
        if self._refused.get(model, {}).get(torch.is_grad_enabled()) is not None:
            return None
        problem = why_not(model, kwargs)
        if problem in self._said:
            return None
        aligned = _without_left_padding(kwargs["input_ids"], kwargs["attention_mask"], keep)
        if aligned is None:
            return None
        ids, starts, lengths = aligned
        texts = [row[:n] for row, n in zip(ids.tolist(), lengths.tolist(), strict=True)]
        groups = self._groups(texts, starts.tolist())
        if not any(plan.saves for _, plan in groups):
            return None
        if problem is not None:
            self.say(problem)
            return None
        return SharedRows(ids, starts.cpu(), groups, sum(len(plan.passes) for _, plan in groups))

    def _groups(self, rows: Sequence[Sequence[int]], starts: Sequence[int]) -> list[tuple[list[int], Plan]]:
        """Rows that are run together, and their plans; with gradients the last pass alone gives hidden states."""
        if not torch.is_grad_enabled():
            return [(list(range(len(rows))), make_plan(rows, None, self.pass_cost))]
        limits = [start - 1 for start in starts]
        return [
            (group, make_plan([rows[i] for i in group], min(limits[i] for i in group), self.pass_cost))
            for group in make_groups(rows, limits, self.pass_cost)
        ]

    def run(self, rows: SharedRows, model: nn.Module, backbone: Callable, keep: int, **kwargs: Any) -> Any:
        """The backbone's output on a call's rows. All processes must call it.

        Args:
            rows: What `find` found for the call.
            model: The bare model.
            backbone: The forward function of its backbone.
            keep: Number T of completion positions.
            kwargs: The keyword arguments of the call.

        Returns:
            The output, whose `last_hidden_state` is `(B, T + 1, H)`: the last prompt token and the completion.
        """
        if (problem := self._problems(model, backbone)[torch.is_grad_enabled()]) is not None:
            self.say(problem)
            return backbone(**kwargs)
        if not rows.groups:
            output, done = backbone(**kwargs), 1
            hidden = output.last_hidden_state[:, -(keep + 1) :]
        else:
            output, hidden, done = self._run_groups(rows, model, backbone, keep)
        for _ in range(rows.passes - done):  # as often as the process that shares most, in the backward pass, too
            hidden = hidden + backbone(input_ids=rows.ids[:1, :1], use_cache=False).last_hidden_state[:0].sum()
        output.last_hidden_state = hidden
        return output

    def _run_groups(
        self, rows: SharedRows, model: nn.Module, backbone: Callable, keep: int
    ) -> tuple[Any, torch.Tensor, int]:
        """The last output, the states `(B, T + 1, H)` in the order of the rows, and the number of passes."""
        hidden, done = None, 0
        for group, plan in rows.groups:
            unread = []
            for part, output in zip(plan.passes, run_passes(backbone, rows.ids[group], plan, model), strict=True):
                states, done = output.last_hidden_state, done + 1
                if hidden is None:
                    hidden = states.new_zeros(len(rows.ids), keep + 1, states.size(-1))
                copy_wanted(hidden, group, rows.starts[group], part, states)
                unread.append(states[:0].sum())
            # A cache leaves some of the last layer's weights out, which a backward pass then does not reach. DeepSpeed
            # reduces gradients in the order in which they come, which processes must agree on.
            if self.accelerator.num_processes > 1:
                hidden = hidden + sum(unread)
        return output, hidden, done

    @torch.no_grad()
    def prefill(self, model: nn.Module, backbone: Callable, cache_name: str, *args: Any, **kwargs: Any) -> Any:
        """The backbone's output where generation fills its cache; prompts that stand in several rows are run once.

        Any other call is passed on as it is.

        Args:
            model: The bare model.
            backbone: The forward function of its backbone.
            cache_name: See `cache_name_of`.
            args: Passed on.
            kwargs: The keyword arguments of the call.
        """
        cache, ids = kwargs.get(cache_name), kwargs.get("input_ids")
        if args or not isinstance(cache, DynamicCache) or cache.get_seq_length() or cache.offloading:
            return backbone(*args, **kwargs)
        if self._problems(model, backbone)[False] is not None:  # on all processes alike, whatever their rows
            return backbone(**kwargs)
        flags = (type(None), bool, int, str, DynamicCache)
        tensors = {name: value for name, value in kwargs.items() if not isinstance(value, flags) and not _empty(value)}
        plain = all(isinstance(value, torch.Tensor) and value.ndim == 2 for value in tensors.values())
        wants_all = kwargs.get("output_hidden_states") or kwargs.get("output_attentions")
        if wants_all or ids is None or ids.size(1) < 2 or set(tensors) - TEXT_INPUTS or not plain:
            return backbone(**kwargs)
        rows = torch.cat([ids, tensors["attention_mask"].to(ids)], dim=1) if "attention_mask" in tensors else ids
        distinct, group = torch.unique(rows, dim=0, return_inverse=True)
        if len(distinct) == len(ids):
            return backbone(**kwargs)
        places = torch.arange(len(ids), device=ids.device)
        first = places.new_full((len(distinct),), len(ids)).scatter_reduce(0, group, places, "amin")
        once = {name: value[first] if len(value) == len(ids) else value for name, value in tensors.items()}
        output = backbone(**{**kwargs, **once})
        cache.reorder_cache(group)
        output.last_hidden_state = output.last_hidden_state[group]
        return output

    def _problems(self, model: nn.Module, backbone: Callable) -> dict[bool, str | None]:
        """Why the model cannot share prefixes, without and with gradients. A collective the first time."""
        if model not in self._refused:
            self._refused[model] = self._try_out(model, backbone)
        return self._refused[model]

    def _try_out(self, model: nn.Module, backbone: Callable) -> dict[bool, str | None]:
        """Compare both ways on a few tokens. Why the model cannot share prefixes, without and with gradients."""
        problems: dict[bool, str | None] = {}
        with evaluating(model):
            problems[False] = _first_difference(model, backbone, gradients=False)
            problems[True] = problems[False]
            if problems[True] is None and not _has_plain_cache(model):
                # A sharded model's hooks expect one backward pass for each step.
                alone = self.accelerator.num_processes == 1
                problems[True] = _first_difference(model, backbone, gradients=True) if alone else _NO_GRADIENTS
        torch.clear_autocast_cache()  # weights that were cast without gradients must not serve the call that follows
        if self.accelerator.num_processes > 1:
            failed = torch.tensor([[problems[False] is not None, problems[True] is not None]])
            anywhere = self.accelerator.gather(failed.to(self.accelerator.device)).any(0).tolist()
            for gradients, other in enumerate(anywhere):
                if other and problems[bool(gradients)] is None:
                    problems[bool(gradients)] = "another process cannot share them"
        return problems

    def say(self, reason: str) -> None:
        """Warn, once, that calls are run as they are."""
        if reason not in self._said:
            self._said.add(reason)
            logger.warning(
                "Prompts are run once per row, not once for all rows that share them: %s. The numbers are the same; "
                "it takes longer. `prefix_sharing=False` silences this.",
                reason,
                main_process_only=True,
            )


def why_not(model: nn.Module, kwargs: Mapping[str, Any]) -> str | None:
    """Why a call cannot share prefixes, as far as can be seen without trying, or `None`.

    Args:
        model: The bare model, in the mode it is called in.
        kwargs: The keyword arguments of the call.
    """
    config = model.config.get_text_config()
    if "output_router_logits" in kwargs or getattr(config, "output_router_logits", False):
        return "the router's load-balancing loss (`router_aux_loss_coef`) counts the tokens of every row"
    if rope := _rope_of_the_length(config):
        return f"`rope_type={rope!r}` turns positions by the length of a call"
    if others := set(kwargs) - TEXT_INPUTS:
        return f"rows hold more than text ({', '.join(f'`{name}`' for name in sorted(others))})"
    if not model.training:
        return None
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return (
            "activation checkpointing runs without a cache (`gradient_checkpointing=True` is TRL's default; sharing "
            "saves memory, too, so there may be room for `False`)"
        )
    if largest_dropout(model) > 0:
        return "dropout is on (`disable_dropout=False`), and would be drawn once for all rows that share a prompt"
    return None


def _first_difference(model: nn.Module, backbone: Callable, gradients: bool) -> str | None:
    """What is wrong with the numbers of three short rows that begin alike, run both ways, or `None`."""
    size, device = model.config.get_text_config().vocab_size, next(model.parameters()).device
    begin = torch.arange(1, 13, device=device) % size
    ids = torch.stack([torch.cat([begin, (begin[:4] * (3 + i) + i) % size]) for i in range(3)])
    plan = make_plan(ids.tolist(), None, 0)
    entries = list(plan.passes[-1].entries)
    try:
        with torch.set_grad_enabled(gradients), _embeddings_as_leaves(model) as leaves:
            whole = backbone(input_ids=ids, use_cache=False).last_hidden_state[:, len(begin) :]
            *_, last = run_passes(backbone, ids, plan, model)
            parts = last.last_hidden_state[entries]
            if gradients:
                found = [
                    torch.autograd.grad(states[..., ::3].sum(), used)
                    for states, used in ((whole, leaves[:1]), (parts, leaves[1:]))
                ]
                (whole,), (first, rest) = found
                whole = torch.cat([whole[:, : len(begin)].sum(0), whole[:, len(begin) :].flatten(0, 1)])
                parts = torch.cat([first[0], rest[entries].flatten(0, 1)])
    except Exception as error:
        return f"the model's cache cannot be expanded ({type(error).__name__}: {str(error)[:200]})"
    difference = ((parts - whole).norm() / whole.norm()).item()
    if difference <= _tolerance(whole):
        return None
    return f"the model's cache gives other {'gradients' if gradients else 'numbers'} (by {difference:.2g})"


def _tolerance(states: torch.Tensor) -> float:
    """How far two ways to compute these hidden states may differ by rounding."""
    device = states.device.type
    if torch.is_autocast_enabled(device):  # which leaves the states themselves in the precision of the weights
        return _TOLERANCE_OF_HALF
    if states.dtype == torch.float32 and device != "cpu":
        return _TOLERANCE_OF_TF32
    return _TOLERANCE.get(states.dtype, _TOLERANCE_OF_HALF)


def _rope_of_the_length(config: Any) -> str | None:
    """The kind of rotary embedding under which a position looks different in a longer call, if a model has one."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    types = [entry.get("rope_type") for entry in (found, *found.values()) if isinstance(entry, dict)]
    return next((kind for kind in types if kind and (kind == "longrope" or "dynamic" in kind)), None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run a model without dropout and activation checkpointing; what was in training is so again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _embeddings_as_leaves(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collects the token embeddings of each pass, as leaves that gradients can be asked for."""
    leaves: list[torch.Tensor] = []

    def collect(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        leaves.append(output.detach().requires_grad_(torch.is_grad_enabled()))
        return leaves[-1]

    handle = model.get_input_embeddings().register_forward_hook(collect)
    try:
        yield leaves
    finally:
        handle.remove()


def _has_plain_cache(model: nn.Module) -> bool:
    """Whether the cache only ever joins and slices keys and values, which gradients flow through."""
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return all(type(layer) in plain for layer in DynamicCache(config=model.config.get_text_config()).layers)


def bare_model(model: nn.Module) -> nn.Module:
    """The model inside an unwrapped model, which may be a PEFT model."""
    return model.get_base_model() if is_peft_model(model) else model


def _empty(value: Any) -> bool:
    """What models that see images are given in place of what they make of them, where there are none."""
    return isinstance(value, dict) and not value


def _without_left_padding(
    ids: torch.Tensor, mask: torch.Tensor, keep: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Rows that begin with their first token: ids `(B, W)`, where completions begin `(B,)`, lengths `(B,)`.

    `None` where a prompt is empty, or the mask has holes.
    """
    width = ids.size(1) - keep
    starts, tokens = mask[:, :width].sum(1), mask[:, width:].sum(1)
    lengths = starts + tokens
    columns = torch.arange(ids.size(1), device=ids.device)
    first = (width - starts).unsqueeze(1)
    expected = (columns >= first) & (columns < first + lengths.unsqueeze(1))
    if not torch.equal(expected, mask.bool()) or bool((starts == 0).any()):
        return None
    index = (first + columns).clamp(max=ids.size(1) - 1)
    return ids.gather(1, index)[:, : int(lengths.max())], starts, lengths
