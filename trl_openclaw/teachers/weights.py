"""Where a teacher's weights come from: a copy, an adapter, a checkpoint."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn

from .._trl import SeamGRPOTrainer, create_model_from_path, get_config_model_id, prepare_scoring_model, use_adapter
from .._trl.forward import replaced
from .parts import is_spread


@dataclass(frozen=True)
class InitialWeights:
    """What is left of the policy as it was before TRL touched it.

    Args:
        copy: A copy of a model in memory, where a teacher needs one.
        fresh_adapter: Whether TRL makes the adapter. Without it the model is then the initial policy, if
            `adapter_changes_nothing_yet`.
    """

    copy: nn.Module | None = None
    fresh_adapter: bool = False

    @classmethod
    def before_training(cls, model: Any, args: Any, peft_config: Any) -> "InitialWeights":
        """Look at the policy before TRL's set-up, and copy it if the teacher cannot be had more cheaply.

        A path is loaded again, PEFT needs no second model, and a frozen teacher shares TRL's reference model (`beta`).
        So does the initial policy as the reference of G-OPD, whoever the teacher is.

        Raises:
            ValueError: If the policy is a model in memory that is already spread over processes.
        """
        shared = args.beta != 0.0 and not args.sync_ref_model
        stays = args.teacher == "frozen" or args.uses_initial_reference
        copied = args.teacher == "ema" or (stays and not shared)
        fresh = peft_config is not None
        if not copied or isinstance(model, str) or fresh or is_peft_model(model):
            return cls(fresh_adapter=fresh)
        if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            raise ValueError(
                "A model that ZeRO-3 has already spread over processes cannot be copied for the teacher. Pass its path "
                "as `model`."
            )
        return cls(copy=copy.deepcopy(model))

    def second_model(self, trainer: SeamGRPOTrainer, *, moves: bool = False) -> nn.Module:
        """A second model with these weights, ready to score: the copy, or the policy's checkpoint once more.

        Args:
            trainer: Holds the policy.
            moves: Whether its weights will change, so that it must not be the copy that others are given, too.
        """
        model = copy.deepcopy(self.copy) if moves and trainer.args.uses_initial_reference else self.copy
        if model is None:
            model = load_beside(trainer, get_config_model_id(trainer.model.config))
        return prepare_scoring_model(model, trainer)


def load_beside(trainer: SeamGRPOTrainer, path: str, **overrides: Any) -> nn.Module:
    """Load a second model from `path` with the student's loading arguments, precision and attention.

    Args:
        overrides: Loading arguments that differ from the student's.

    Raises:
        ValueError: If FSDP would leave the second model empty on all processes but the first.
    """
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "`fsdp_cpu_ram_efficient_loading: true` loads weights on the first process alone and hands out only the "
            "policy's: a second model would hold noise on the others. Set it to false in the accelerate config."
        )
    kwargs = {**(trainer.args.model_init_kwargs or {}), **overrides}
    if trainer.accelerator.num_processes > 1:  # each loads its own; "auto" would spread it over the GPUs of all
        kwargs["device_map"] = None
    kwargs.setdefault("trust_remote_code", trainer.args.trust_remote_code)
    kwargs.setdefault("dtype", trainer.model.dtype)
    kwargs.setdefault("attn_implementation", trainer.model.config._attn_implementation)
    return create_model_from_path(path, **kwargs)


def adapter_changes_nothing_yet(config: Any) -> bool:
    """Whether PEFT makes such an adapter so that the model computes what it did, on the base weights as they were.

    PiSSA, OLoRA and others move a part of the base weights into the adapter, so that without it the model is another.
    """
    start = getattr(config, "init_lora_weights", getattr(config, "init_weights", True))
    return start in (True, "gaussian", "eva", "orthogonal", "mica") and getattr(config, "kasa_config", None) is None


def keep_initial_adapter(model: Any, name: str = "ref") -> dict[str, str]:
    """Copy an adapter that came with the policy to a frozen one, so that it can be a teacher.

    By default to `"ref"`, as TRL does for `beta`.

    Returns:
        The name of each parameter and buffer of the copy, with the name of what it was copied from.

    Raises:
        ValueError: If the adapter in training has that name itself, or cannot be copied tensor by tensor.
    """
    active = model.active_adapter
    if active == name:
        raise ValueError(f"The adapter in training is called {name!r}, which names the frozen copy. Rename it.")
    if any(parameter.requires_grad and is_spread(parameter) for parameter in model.parameters()):
        raise ValueError(
            f"The adapter {active!r} is spread over processes already, as an earlier trainer leaves it, and cannot be "
            "copied. Save it, and load it into a new model."
        )
    before = set(_tensors(model))
    if name not in model.peft_config:
        with _same_trainability(model):
            model.add_adapter(name, _config_of_copy(model.peft_config[active]))
    tensors = _tensors(model)
    sources = {found: source for source in tensors if (found := _renamed(source, active, name, tensors))}
    if not sources or not sources.keys() >= tensors.keys() - before:
        raise ValueError(
            f"The adapter {active!r} has not the tensors that its config says, so it cannot be copied to {name!r}. Use "
            "an adapter as PEFT makes it."
        )
    for found, source in sources.items():
        tensors[found].data = tensors[source].data.clone()  # with its dtype, which PEFT may choose otherwise
        tensors[found].requires_grad_(False)
    return sources


@contextmanager
def adapter_switched(model: Any, name: str | None) -> Iterator[None]:
    """Switch to another adapter, or to none, for a while. No parameter's `requires_grad` is another afterwards."""
    with _same_trainability(model), use_adapter(model, name):
        yield


@contextmanager
def adapter_hidden(model: Any, name: str | None) -> Iterator[None]:
    """Have an adapter left out when all of a model's adapters are saved: its files, and its tensors in theirs."""
    if name is None:
        yield
        return
    others = [other for other in model.peft_config if other != name]
    with replaced(model, "save_pretrained", partial(model.save_pretrained, selected_adapters=others)):
        yield


@contextmanager
def _same_trainability(model: nn.Module) -> Iterator[None]:
    """PEFT makes trainable what it switches on, also where somebody had frozen it."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _config_of_copy(config: Any) -> Any:
    """An adapter's config for a second one beside it, whose making must not change the base weights once more.

    Raises:
        ValueError: If it cannot but change them.
    """
    if getattr(config, "kasa_config", None) is not None:
        raise ValueError("A KaSA adapter truncates the base weights once more when it is copied. Use plain LoRA.")
    config = copy.deepcopy(config)
    for field, harmless in (("init_lora_weights", True), ("layer_replication", None)):  # PiSSA, OLoRA, LoftQ, ...
        if hasattr(config, field):
            setattr(config, field, harmless)
    return config


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _renamed(name: str, old: str, new: str, known: dict[str, torch.Tensor]) -> str | None:
    """The tensor of the adapter `new` that is the counterpart of one of the adapter `old`."""
    parts = name.split(".")
    candidates = (".".join([*parts[:i], new, *parts[i + 1 :]]) for i, part in enumerate(parts) if part == old)
    return next((candidate for candidate in candidates if candidate in known), None)


def trained_outside(model: Any) -> str | None:
    """A parameter that is trained although no adapter holds it, such as a bias; `None` where there is none."""
    active = model.active_adapter
    names = (name for name, p in model.named_parameters() if p.requires_grad and active not in name.split("."))
    return next(names, None)


def max_model_length(model: nn.Module) -> int | None:
    """Tokens that fit into the model's window, or `None` where its config does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)
