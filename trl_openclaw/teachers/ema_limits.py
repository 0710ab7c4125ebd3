"""What a moving average cannot follow: some engines, and some adapters."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch.distributed.tensor import DTensor

from .._trl import SeamGRPOTrainer
from .parts import is_spread, part_of
from .weights import trained_outside

ADAPTER = "teacher"
"""The name of the averaged adapter beside the one in training."""

AVERAGED_ADAPTERS = ("LORA", "IA3")
"""PEFT types each of whose adapters has all its tensors to itself."""

UNFOLLOWED: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "weights that DeepSpeed keeps on a disk (`offload_param_device: nvme`)": lambda zero: (
        (zero.get("offload_param") or {}).get("device") == "nvme"
    ),
    "DeepSpeed's second partition in each node (`zero_hpz_partition_size`)": lambda zero: (
        zero.get("zero_hpz_partition_size", 1) > 1
    ),
    "frozen weights that DeepSpeed quantises (`zero_quantized_nontrainable_weights`)": lambda zero: zero.get(
        "zero_quantized_nontrainable_weights"
    ),
}
"""Settings of ZeRO-3 under which a weight's part on a process is not all that there is to change."""


def check_engine(trainer: SeamGRPOTrainer) -> None:
    """Refuse engines that spread weights over processes in a way that an average cannot follow part by part.

    Raises:
        ValueError: If there is such an engine, saying what to use instead.
    """
    problem = None
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1:
        problem = "FSDP in its first version (set `fsdp_version: 2`)"
    elif any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()):
        problem = "weights that were spread over processes before the trainer had them, as tensor parallelism does"
    elif is_peft_model(trainer.model) and any(is_spread(p) for p in trainer.model.parameters() if p.requires_grad):
        problem = "an adapter that an earlier trainer has spread over processes (make a new model)"
    elif trainer.is_deepspeed_enabled:
        zero = trainer.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        problem = next((name for name, is_on in UNFOLLOWED.items() if zero.get("stage") == 3 and is_on(zero)), None)
    if problem is not None:
        raise ValueError(f"`teacher='ema'` does not work with {problem}. Or use `teacher='frozen'`.")


def check_spread_alike(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Refuse weights whose parts on this process differ between teacher and student.

    Raises:
        ValueError: Naming one.
    """
    for name, (own, student) in pairs.items():
        shapes = [tuple(part_of(tensor).shape) for tensor in (own, student)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"`teacher='ema'` cannot follow `{name}`: this process holds {shapes[0]} of the teacher's and "
                f"{shapes[1]} of the student's. Use `teacher='frozen'`."
            )


def check_adapter(model: Any, use_vllm: bool) -> None:
    """Refuse adapters that cannot have an average beside them.

    Raises:
        ValueError: Saying what is in the way.
    """
    active = model.active_adapter
    config = model.peft_config[active]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    outside = trained_outside(model)
    problem = None
    if kind not in AVERAGED_ADAPTERS:
        problem = f"averages adapters of the types {', '.join(AVERAGED_ADAPTERS)}, not {kind}"
    elif ADAPTER in model.peft_config:
        problem = (
            f"keeps its average in an adapter called {ADAPTER!r}, and there is one already. Rename it, or remove what "
            f"an earlier trainer left with `model.delete_adapter({ADAPTER!r})`"
        )
    elif outside:
        problem = (
            f"averages the adapter, but `{outside}` is trained outside of it (`bias`, or weights that were made "
            "trainable by hand), so the teacher would share it with the student"
        )
    elif use_vllm and getattr(config, "modules_to_save", None):
        problem = "with `use_vllm=True` does not support `modules_to_save`: TRL would send vLLM the teacher's copies"
    if problem is not None:
        raise ValueError(f"`teacher='ema'` {problem}. Or use `teacher='frozen'`.")
