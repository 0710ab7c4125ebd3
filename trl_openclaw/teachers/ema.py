"""A teacher that follows the student slowly: the exponential moving average (EMA) of the student's weights."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import TrainerCallback

from .._trl import SeamGRPOTrainer
from ..scoring import TokenScorer
from .ema_limits import ADAPTER, check_adapter, check_engine, check_spread_alike
from .local import LocalTeacher
from .parts import only_parts, part_changed, part_of, put_together, save_one_by_one, shape_of, take_apart
from .weights import InitialWeights, adapter_hidden, adapter_switched, keep_initial_adapter, max_model_length

STATE_FILE = "ema_teacher.safetensors"
"""The file in a checkpoint's folder that holds the average."""


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
        self._averaged = {name for name, _ in self._unwrapped(model).named_parameters() if name in self.sources}
        self._masters: dict[str, torch.Tensor] = {}
        self._saved_in: Path | None = None

    @classmethod
    def build(cls, trainer: SeamGRPOTrainer, scorer: TokenScorer, initial: InitialWeights) -> "EMATeacher":
        """Make the teacher out of the initial weights, and let it follow the trainer's steps.

        Raises:
            ValueError: If weights are spread in a way that cannot be followed, or the adapter cannot be averaged.
        """
        check_engine(trainer)
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
        own, student = self._own_tensors(), self._tensors(self.trainer.model)
        for name, source in self.sources.items():
            if name not in self._averaged:
                own[name].copy_(student[source])
                continue
            average = self._average(name, own[name])
            average.lerp_(part_of(student[source]).to(average), self.rate)
            self._place(own[name], average)

    @torch.no_grad()
    def save(self, checkpoint: str | Path, writes: bool = True) -> None:
        """Write the average, at its full precision, into a checkpoint's folder, whole or not at all. A collective.

        Args:
            checkpoint: The folder.
            writes: Whether this process is one that writes.
        """
        own, device = self._own_tensors(), self.trainer.accelerator.device
        parts = {name: self._average(name, tensor) for name, tensor in own.items()}
        described = {name: (part.dtype, shape_of(own[name])) for name, part in parts.items()}
        file = Path(checkpoint) / STATE_FILE
        unfinished = file.with_name(f"{STATE_FILE}.unfinished") if writes else None
        if unfinished is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        save_one_by_one(unfinished, described, lambda name: put_together(own[name], parts[name], device))
        if unfinished is not None:
            unfinished.replace(file)

    def restore(self, checkpoint: str | Path) -> None:
        """Go on from the average in a checkpoint's folder, once training begins: engines lay weights out anew there.

        Raises:
            ValueError: If it holds none, or one of another model.
        """
        path = Path(checkpoint) / STATE_FILE
        self._check_file(path)
        self._saved_in, self.same_weights_at_start = path, False

    @torch.no_grad()
    def begin(self) -> None:
        """Take what `restore` found, now that the engine has the weights as they will be trained.

        Raises:
            ValueError: If the engine spreads student and teacher differently.
        """
        own, student = self._own_tensors(), self._tensors(self.trainer.model)
        check_spread_alike({name: (own[name], student[source]) for name, source in self.sources.items()})
        path, self._saved_in = self._saved_in, None
        if path is None:
            return
        with safe_open(path, "pt") as file:
            for name, tensor in own.items():
                average = self._average(name, tensor)
                average.copy_(take_apart(file.get_tensor(name), tensor))
                self._place(tensor, average)

    def left_out(self) -> AbstractContextManager:
        """Saving leaves out the teacher's adapter; the average is saved by `save`."""
        return adapter_hidden(self._unwrapped(self.model), self.adapter)

    def _check_file(self, path: Path) -> None:
        """Compare the tensors in the file with those that this teacher has."""
        if not path.is_file():
            raise ValueError(
                f"`{path.parent}` has no `{path.name}`, so the EMA teacher cannot go on from there. Resume from a "
                "checkpoint that was saved whole, with `teacher='ema'` and without `save_only_model` (where a run was "
                "killed while it saved, from the one before), or use `teacher='frozen'`."
            )
        try:
            with safe_open(path, "pt") as file:
                found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"`{path}` is damaged: {error}. Resume from another checkpoint.") from error
        shapes = {name: shape_of(tensor) for name, tensor in self._own_tensors().items()}
        if shapes != found:
            name = min(name for name in {**shapes, **found} if shapes.get(name) != found.get(name))
            raise ValueError(
                f"`{path}` was saved of another model or adapter: `{name}` has the shape {found.get(name)} there and "
                f"{shapes.get(name)} here. Resume with the model that the checkpoint was made of."
            )

    def _average(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This process's part of the average, to be changed in place.

        Half precision has no room for 5 % of a small change, so such weights are averaged in float32 beside them.
        """
        part = part_of(tensor)
        if name not in self._averaged or part.dtype.itemsize >= 4:
            return part
        if name not in self._masters:
            self._masters[name] = part.float()
        return self._masters[name]

    def _place(self, tensor: torch.Tensor, average: torch.Tensor) -> None:
        """Let the teacher compute with its average as it is now."""
        part = part_of(tensor)
        if part is not average:
            part.copy_(average)
        part_changed(tensor)

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        tensors = self._tensors(self.model)
        return {name: tensors[name] for name in self.sources}

    def _tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        only_parts(self._unwrapped(model))
        return saved_tensors(self._unwrapped(model))

    def _unwrapped(self, model: nn.Module) -> Any:
        return self.trainer.accelerator.unwrap_model(model)


class EMACallback(TrainerCallback):
    """Moves an EMA teacher after every optimiser step.

    Args:
        teacher: The teacher.
    """

    def __init__(self, teacher: EMATeacher):
        self.teacher = teacher

    def on_train_begin(self, args, state, control, **kwargs):
        """Look at how the engine laid the weights out, and go on from a saved average."""
        self.teacher.begin()

    def on_step_end(self, args, state, control, **kwargs):
        """Update the average."""
        self.teacher.update(state.global_step)


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters, each once however many names it has, and the buffers that are part of its checkpoint.

    Other buffers are caches that every model keeps for itself, such as the frequencies of a rotary embedding.
    """
    buffers = dict(model.named_buffers())
    saved = model.state_dict() if buffers else {}
    return {
        **{name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()},
        **{name: buffer for name, buffer in buffers.items() if name in saved},
    }
