"""Where a teacher's weights come from: a copy, an adapter, a checkpoint."""

import copy
from dataclasses import dataclass
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn

from .._trl import SeamGRPOTrainer, create_model_from_path


@dataclass(frozen=True)
class InitialWeights:
    """What is left of the policy as it was before TRL touched it.

    Args:
        copy: A copy of a model in memory, where a frozen teacher needs one.
        fresh_adapter: Whether TRL makes the adapter, so that "adapter off" is the initial policy.
    """

    copy: nn.Module | None = None
    fresh_adapter: bool = False

    @classmethod
    def before_training(cls, model: Any, args: Any, peft_config: Any) -> "InitialWeights":
        """Look at the policy before TRL's set-up, and copy it if a frozen teacher cannot be had more cheaply.

        A path is loaded again, PEFT switches its adapter off, and TRL's reference model (`beta`) is shared.

        Raises:
            ValueError: If the policy is a model in memory that is already spread over processes.
        """
        shared = args.beta != 0.0 and not args.sync_ref_model
        fresh = peft_config is not None
        if args.teacher != "frozen" or isinstance(model, str) or fresh or is_peft_model(model) or shared:
            return cls(fresh_adapter=fresh)
        if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            raise ValueError(
                "A model that ZeRO-3 has already spread over processes cannot be copied for the frozen teacher. Pass "
                "its path as `model`."
            )
        return cls(copy=copy.deepcopy(model))


def load_beside(trainer: SeamGRPOTrainer, path: str, **overrides: Any) -> nn.Module:
    """Load a second model from `path` with the student's loading arguments, precision and attention.

    Args:
        overrides: Loading arguments that differ from the student's.
    """
    kwargs = {**(trainer.args.model_init_kwargs or {}), **overrides}
    if trainer.args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        kwargs["device_map"] = None
    kwargs.setdefault("trust_remote_code", trainer.args.trust_remote_code)
    kwargs.setdefault("dtype", trainer.model.dtype)
    kwargs.setdefault("attn_implementation", trainer.model.config._attn_implementation)
    return create_model_from_path(path, **kwargs)


def keep_initial_adapter(model: Any) -> None:
    """Copy an adapter that came with the policy to `"ref"`, as TRL does for `beta`, so that it can be a teacher.

    Raises:
        ValueError: If the adapter in training is itself called "ref".
    """
    active = model.active_adapter
    if active == "ref":
        raise ValueError("The adapter in training is called 'ref', which names the frozen copy. Rename it.")
    if "ref" in model.peft_config:
        return
    model.add_adapter("ref", model.peft_config[active])
    for name, parameter in model.named_parameters():
        if f".{active}." in name:
            reference = model.get_parameter(name.replace(f".{active}.", ".ref."))
            reference.data.copy_(parameter.data)
            reference.requires_grad_(False)
    model.set_adapter(active)


def max_model_length(model: nn.Module) -> int | None:
    """Tokens that fit into the model's window, or `None` where its config does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)
