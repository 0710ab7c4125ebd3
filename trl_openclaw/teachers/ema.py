"""A teacher that follows the student slowly: the exponential moving average (EMA) of the student's weights."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerCallback

from .._trl import SeamGRPOTrainer
from ..scoring import TokenScorer
from .local import LocalTeacher
from .weights import InitialWeights, adapter_switched, keep_initial_adapter, max_model_length, trained_outside

ADAPTER = "teacher"
"""The name of the averaged adapter beside the one in training."""

STATE_FILE = "ema_teacher.safetensors"
"""The file in a checkpoint's folder that holds the average."""

AVERAGED_ADAPTERS = ("LORA", "IA3")
"""PEFT types each of whose adapters has all its tensors to itself."""


class EMATeacher(LocalTeacher):
    """The exponential moving average of the policy, seeing the hint. Starts as the initial policy.

    Full tuning keeps a second model. PEFT keeps a second, frozen adapter in the same model and averages the adapters'
    parameters: for LoRA the mean of the factors, which is not the mean of their products but has the same limit.

    Args:
        trainer: Holds the policy and the settings `teacher_ema_rate` and `teacher_ema_start`.
        scorer: Runs the forward passes.
        model: The model that is called.
        sources: The name of each of the teacher's tensors, with the name of the student's that it follows.
        adapter: The adapter of `model` that is the teacher; `None` where all of the model is.

    Attributes:
        same_weights_at_start (`bool`): True until the first update.
    """

    same_weights_at_start = True

    def __init__(
        self,
        trainer: SeamGRPOTrainer,
        scorer: TokenScorer,
        model: nn.Module,
        sources: Mapping[str, str],
        *,
        adapter: str | None = None,
    ):
        super().__init__(model, scorer, max_length=max_model_length(trainer.model))
        self.trainer = trainer
        saved = saved_tensors(self._unwrapped(model))
        self.sources = {name: source for name, source in sources.items() if name in saved}
        self.adapter = adapter
        self.rate, self.start = trainer.args.teacher_ema_rate, trainer.args.teacher_ema_start
        own = {name: p.detach() for name, p in self._unwrapped(model).named_parameters() if name in self.sources}
        self._averaged = frozenset(own)
        # Half precision has no room for 5 % of a small change, so such weights are averaged in float32 beside them.
        self._masters = {name: tensor.float() for name, tensor in own.items() if tensor.dtype.itemsize < 4}

    @classmethod
    def build(cls, trainer: SeamGRPOTrainer, scorer: TokenScorer, initial: InitialWeights) -> "EMATeacher":
        """Make the teacher out of the initial weights, and let it follow the trainer's steps.

        Raises:
            ValueError: If the weights are spread over processes, or the adapter is of a kind that cannot be averaged.
        """
        check_not_sharded(trainer)
        if is_peft_model(trainer.model):
            check_adapter(trainer.model, trainer.use_vllm)
            sources = keep_initial_adapter(trainer.model, ADAPTER)
            teacher = cls(trainer, scorer, trainer.model, sources, adapter=ADAPTER)
        else:
            model = initial.second_model(trainer, moves=True)
            names = saved_tensors(trainer.accelerator.unwrap_model(model))
            teacher = cls(trainer, scorer, model, {name: name for name in names})
        trainer.add_callback(EMACallback(teacher))
        return teacher

    def weights(self) -> AbstractContextManager:
        """The teacher's adapter, where it is one."""
        return adapter_switched(self._unwrapped(self.model), self.adapter) if self.adapter else nullcontext()

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move `rate` of the way to the student: teacher = (1 - rate) * teacher + rate * student.

        Args:
            step: Optimiser steps so far, with the one that has just been taken. Up to `start` nothing moves.
        """
        if step <= self.start:
            return
        self.same_weights_at_start = False
        own, student = self._own_tensors(), saved_tensors(self._unwrapped(self.trainer.model))
        for name, source in self.sources.items():
            if name not in self._averaged:
                own[name].copy_(student[source])
                continue
            average = self._masters.get(name, own[name])
            average.lerp_(student[source].to(average), self.rate)
            if name in self._masters:
                own[name].copy_(average)

    def save(self, checkpoint: str | Path) -> None:
        """Write the average, at its full precision, into a checkpoint's folder, whole or not at all."""
        tensors = {name: tensor.contiguous() for name, tensor in {**self._own_tensors(), **self._masters}.items()}
        Path(checkpoint).mkdir(parents=True, exist_ok=True)
        unfinished = Path(checkpoint) / f"{STATE_FILE}.unfinished"
        save_file(tensors, unfinished)
        unfinished.replace(Path(checkpoint) / STATE_FILE)

    @torch.no_grad()
    def restore(self, checkpoint: str | Path) -> None:
        """Take the average from a checkpoint's folder.

        Raises:
            ValueError: If it holds none, or one of another model.
        """
        path = Path(checkpoint) / STATE_FILE
        own = self._own_tensors()
        for name, tensor in self._read(path, own).items():
            own[name].copy_(tensor)
            if name in self._masters:
                self._masters[name].copy_(tensor)
        self.same_weights_at_start = False

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Hide the teacher's adapter from whoever saves all adapters; the average is saved by `save`."""
        configs = self._unwrapped(self.model).peft_config if self.adapter else {}
        config = configs.pop(self.adapter, None)
        try:
            yield
        finally:
            if config is not None:
                configs[self.adapter] = config

    def _read(self, path: Path, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors in the file, checked against those that this teacher has."""
        if not path.is_file():
            raise ValueError(
                f"`{path.parent}` has no `{path.name}`, so the EMA teacher cannot go on from there. Resume from a "
                "checkpoint that was saved whole, with `teacher='ema'` and without `save_only_model` (where a run was "
                "killed while it saved, from the one before), or use `teacher='frozen'`."
            )
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"`{path}` is damaged: {error}. Resume from another checkpoint.") from error
        shapes, found = ({name: tuple(t.shape) for name, t in tensors_.items()} for tensors_ in (own, tensors))
        if shapes != found:
            name = min(name for name in {**shapes, **found} if shapes.get(name) != found.get(name))
            raise ValueError(
                f"`{path}` was saved of another model or adapter: `{name}` has the shape {found.get(name)} there and "
                f"{shapes.get(name)} here. Resume with the model that the checkpoint was made of."
            )
        return tensors

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        tensors = saved_tensors(self._unwrapped(self.model))
        return {name: tensors[name] for name in self.sources}

    def _unwrapped(self, model: nn.Module) -> Any:
        return self.trainer.accelerator.unwrap_model(model)


class EMACallback(TrainerCallback):
    """Moves an EMA teacher after every optimiser step.

    Args:
        teacher: The teacher.
    """

    def __init__(self, teacher: EMATeacher):
        self.teacher = teacher

    def on_step_end(self, args, state, control, **kwargs):
        """Update the average."""
        self.teacher.update(state.global_step)


def check_not_sharded(trainer: SeamGRPOTrainer) -> None:
    """Refuse engines that give every process a part of the weights only.

    Raises:
        ValueError: If there is such an engine.
    """
    plugin = trainer.args.deepspeed_plugin
    zero3 = plugin is not None and plugin.zero_stage == 3
    parts = any(hasattr(p, "ds_id") or hasattr(p, "device_mesh") for p in trainer.model.parameters())
    if zero3 or trainer.is_fsdp_enabled or parts:
        raise ValueError(
            "`teacher='ema'` does not work with weights that are spread over processes (ZeRO-3, FSDP, tensor "
            "parallelism). Use ZeRO-2 or plain data parallelism, or `teacher='frozen'`."
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


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters, each once however many names it has, and the buffers that are part of its checkpoint.

    Other buffers are caches that every model keeps for itself, such as the frequencies of a rotary embedding.
    """
    buffers = dict(model.named_buffers())
    saved = model.state_dict() if buffers else {}
    return {
        **{name: parameter.detach() for name, parameter in model.named_parameters() if parameter.is_floating_point()},
        **{name: buffer for name, buffer in buffers.items() if name in saved},
    }
