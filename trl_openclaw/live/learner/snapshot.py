"""The weights before an update, to compare with and to go back to."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .trainer import LiveTrainer


class Snapshot:
    """What an optimizer step changes: the adapter, the optimizer's state and the place in the schedule.

    A moving average of the adapter is not in it: that is in the checkpoint.

    Args:
        trainer: The trainer, between two steps.
    """

    def __init__(self, trainer: "LiveTrainer"):
        self.weights = {name: tensor.clone() for name, tensor in trained_tensors(trainer).items()}
        self.optimizer = copy.deepcopy(trainer.optimizer.state_dict())
        self.schedule = copy.deepcopy(trainer.lr_scheduler.state_dict())

    def restore(self, trainer: "LiveTrainer") -> None:
        """Undo what was changed since."""
        load_tensors(trainer, self.weights)
        trainer.optimizer.load_state_dict(copy.deepcopy(self.optimizer))
        trainer.lr_scheduler.load_state_dict(copy.deepcopy(self.schedule))


def trained_tensors(trainer: "LiveTrainer") -> dict[str, torch.Tensor]:
    """The adapter's tensors themselves, without gradient."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}


@torch.no_grad()
def load_tensors(trainer: "LiveTrainer", weights: dict[str, torch.Tensor]) -> None:
    """Put values into the adapter's tensors."""
    for name, tensor in trained_tensors(trainer).items():
        tensor.copy_(weights[name])


@contextmanager
def other_weights(trainer: "LiveTrainer", weights: dict[str, torch.Tensor]) -> Iterator[None]:
    """While this is open, the adapter has other values."""
    kept = {name: tensor.clone() for name, tensor in trained_tensors(trainer).items()}
    load_tensors(trainer, weights)
    try:
        yield
    finally:
        load_tensors(trainer, kept)
