"""The one call of a model that TRL makes per batch: what the LM head need not see is cut, and the result is shown."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..prefix_passes import cache_name_of
from ..shared_prefix import TEXT_INPUTS, PrefixSharing, bare_model


class ObservedForward:
    """Stands in for the model in one call: only completion positions reach the LM head, and the result is shown.

    `GRPOTrainer._compute_loss` uses its model for the forward pass alone and reads the advantages after it, so the
    advantages can be formed from the very log-probs of that pass: no copied loss, no second student forward.

    Args:
        model: The (wrapped) student.
        keep: Number T of completion positions.
        show: Called with the detached log-probs `(B, T)` right after the forward.
        sharing: Runs what rows have in common once.
        temperatures: What the logits of each row `(N,)` are divided by, beyond what all are; `None` for nothing. The
            rows of several calls follow each other.

    Attributes:
        token_losses: Called inside the forward with log-probs `(B, T)`, hidden states `(B, T, H)` and the unwrapped
            model; gives losses `(B, T)`.
        added: What `token_losses` gave.
    """

    token_losses: Callable[[torch.Tensor, torch.Tensor, nn.Module], torch.Tensor] | None = None
    added: torch.Tensor | None = None

    def __init__(
        self,
        model: nn.Module,
        accelerator: Accelerator,
        keep: int,
        show: Callable[[torch.Tensor], None] | None = None,
        sharing: PrefixSharing | None = None,
        temperatures: torch.Tensor | None = None,
    ):
        self.model, self.accelerator, self.keep, self.show = model, accelerator, keep, show
        self.temperatures, self._rows_seen = temperatures, 0
        # `DataParallel` hands each of its copies a part of the rows.
        self.sharing = None if isinstance(model, nn.DataParallel) else sharing

    def __call__(self, **kwargs: Any) -> Any:
        unwrapped = self.accelerator.unwrap_model(self.model)
        _put_trained_head_together(bare_model(unwrapped))
        read = self._add_losses if self.token_losses is not None else None
        first, self._rows_seen = self._rows_seen, self._rows_seen + len(kwargs["input_ids"])
        temperatures = None if self.temperatures is None else self.temperatures[first : self._rows_seen]
        with completion_positions_only(unwrapped, kwargs, self.keep, read, self.sharing, temperatures):
            outputs = self.model(**kwargs)
        if read is not None:
            self.added = outputs.loss
        if self.show is not None:
            self.show(outputs.log_probs[:, -self.keep :].detach())
        return outputs

    def _add_losses(self, outputs: Any, hidden: torch.Tensor, model: nn.Module) -> None:
        """Put the losses where TRL has one number that nobody reads, so that wrappers see them in the output."""
        assert self.token_losses is not None
        outputs.loss = self.token_losses(outputs.log_probs[:, -self.keep :], hidden, model)


def _put_trained_head_together(model: nn.Module) -> None:
    """Let FSDP2 hold an LM head whole that is about to be trained, and sum its gradient over the processes.

    The fused head reads the weight without calling the module, so FSDP2 does not know. TRL then gathers it by hand, and
    each process would keep a part of its own gradient alone: so with `modules_to_save=["lm_head"]`.
    """
    head = model.get_output_embeddings()
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in head.parameters()):
        for module in head.modules():
            if isinstance(module, FSDPModule):
                module.unshard()


def has_virtual_tokens(model: nn.Module) -> bool:
    """Whether an unwrapped model carries a prompt-learning adapter."""
    return is_peft_model(model) and model.active_peft_config.is_prompt_learning


def takes_row_temperatures(model: nn.Module) -> bool:
    """Whether each row of an unwrapped model may have a temperature of its own: its head is linear, without a bias or a
    bound on logits, and no virtual tokens stand in front."""
    head = bare_model(model).get_output_embeddings()
    capped = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return getattr(head, "bias", None) is None and capped is None and not has_virtual_tokens(model)


@contextmanager
def completion_positions_only(
    model: nn.Module,
    kwargs: dict[str, Any],
    keep: int,
    read: Callable[[Any, torch.Tensor, nn.Module], None] | None = None,
    sharing: PrefixSharing | None = None,
    temperatures: torch.Tensor | None = None,
) -> Iterator[None]:
    """Let TRL's fused LM head see only the last `keep` tokens, by cutting the backbone's output and the labels alike.

    Without Triton the fused head projects every position, prompts too, and then throws those away. The numbers that
    are kept are the same; the time and memory of the head shrink to the completion's share.

    Args:
        model: The unwrapped model, with a fused LM head, perhaps inside a PEFT model.
        kwargs: The keyword arguments of the coming call; `labels` `(B, P + T)` is replaced, and `position_ids` added,
            so that padding moves nothing in models whose positions are absolute. Then columns in front that are padding
            in every row go: TRL pads to the longest prompt of a generation batch, whatever a micro-batch holds of it.
        keep: Number T of trailing positions that carry labels.
        read: Called inside the forward, where parameters that an engine spreads over processes can be gathered, with
            the output, the hidden states `(B, T, H)` that its last T log-probs were made of, and the bare model. It may
            set fields of the output. Not for virtual tokens.
        sharing: Runs the backbone once for what rows have in common. Makes this a collective.
        temperatures: What the logits of each row `(B,)` are divided by, beyond what the head divides all by. The hidden
            states are, which is the same for a head that is linear (`takes_row_temperatures`).
    """
    if has_virtual_tokens(model):  # they shift positions inside PEFT's own forward
        assert read is None, "no objective reads hidden states under virtual tokens"
        assert temperatures is None, "rows have one temperature under virtual tokens"
        if sharing is not None and len(kwargs["input_ids"]) > 1:
            sharing.say("virtual tokens (a prompt-learning adapter) stand in front of each row's own")
        yield
        return
    model = bare_model(model)
    backbone = model.base_model
    if set(kwargs) <= TEXT_INPUTS and "position_ids" in inspect.signature(backbone.forward).parameters:
        kwargs["position_ids"] = (kwargs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        _cut_empty_columns(kwargs, keep)
    rows = sharing.find(model, kwargs, keep) if sharing is not None else None
    kwargs["labels"] = kwargs["labels"][:, -(keep + 1) :]
    states: list[torch.Tensor] = []
    forward, run_backbone = model.forward, backbone.forward

    def cut(_module: nn.Module, _args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, -(keep + 1) :]
        if temperatures is not None:
            output.last_hidden_state = output.last_hidden_state / temperatures.view(-1, 1, 1).to(
                output.last_hidden_state.dtype
            )
        states[:] = [output.last_hidden_state[:, :-1]]
        return output

    def read_forward(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        assert read is not None
        read(output, states.pop(), model)
        return output

    def shared_forward(**kwargs: Any) -> Any:
        assert sharing is not None
        assert rows is not None
        return sharing.run(rows, model, run_backbone, keep, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(_hooked(backbone, cut))
        if rows is not None:
            stack.enter_context(replaced(backbone, "forward", shared_forward))
        if read is not None:  # a hook of the model would not do: PEFT calls its `forward` past all hooks
            stack.enter_context(replaced(model, "forward", read_forward))
        yield


def _cut_empty_columns(kwargs: dict[str, Any], keep: int) -> None:
    """Cut what is padding in every row off the front of all tensors `(B, P + T)`, down to one column before the last T.

    Each process cuts by its own rows: what processes exchange in a forward pass does not depend on their widths.
    """
    mask = kwargs["attention_mask"]
    first = max(0, min(int(mask.any(dim=0).int().argmax()), mask.size(1) - keep - 1))
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and value.shape == mask.shape:
            kwargs[name] = value[:, first:]


@contextmanager
def shared_prefill(model: nn.Module, sharing: PrefixSharing | None) -> Iterator[None]:
    """Let generation run a prompt that stands in several rows once.

    Args:
        model: The unwrapped model, perhaps inside a PEFT model.
        sharing: Runs the prompts; `None` to run every row.
    """
    if sharing is None:
        yield
        return
    bare = bare_model(model)
    forward = bare.base_model.forward
    prefill = partial(sharing.prefill, bare, forward, cache_name_of(forward))
    with replaced(bare.base_model, "forward", functools.wraps(forward)(prefill)):
        yield


@contextmanager
def _hooked(module: nn.Module, hook: Callable) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object another attribute for a while; what it had of its own, or had not, comes back."""
    had = name in vars(thing)
    before = vars(thing).get(name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        if had:
            setattr(thing, name, before)
        else:
            delattr(thing, name)
