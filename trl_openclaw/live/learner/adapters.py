"""Adapter versions as folders: written whole or not at all, read back, and removed when they are old."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors import LearnerError
from .folders import onto_disk
from .snapshot import load_tensors, trained_tensors

if TYPE_CHECKING:
    from .trainer import LiveTrainer


HARMLESS_STARTS = (True, "gaussian", "eva")
"""`init_lora_weights` with which an adapter changes nothing at first, and the base weights never."""


def check_adapter(config: Any) -> None:
    """Refuse what the gateway could not answer with on top of its own model.

    Raises:
        ValueError: If no adapter would be made, or one that begins with other base weights.
    """
    if config is None:
        raise ValueError(
            "Live training publishes adapters: pass `peft_config` (in a recipe `use_peft: true`). What full weights "
            "would take is in docs/live_learner.md."
        )
    start = getattr(config, "init_lora_weights", True)
    if start not in HARMLESS_STARTS:
        raise ValueError(
            f"`init_lora_weights={start!r}` changes the base weights, which the gateway's model does not: an adapter "
            f"trained on top of them would not fit. Use one of {', '.join(map(repr, HARMLESS_STARTS))}."
        )


def write_adapter(trainer: "LiveTrainer", folder: Path) -> None:
    """Write the adapter in training to `folder`, beside it first. For one process."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    name = model.active_adapter
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    for leftover in (unfinished, folder):  # of a learner that was killed; a finished version is never written again
        shutil.rmtree(leftover, ignore_errors=True)
    model.save_pretrained(unfinished, selected_adapters=[name])
    inner = unfinished / name
    onto_disk(unfinished)  # before anything can say that it is there
    (inner if inner.is_dir() else unfinished).rename(folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    onto_disk(folder.parent, inside=False)


@torch.no_grad()
def read_adapter(trainer: "LiveTrainer", path: str | None) -> None:
    """Put a version's weights into the adapter in training; those of the start for the base model (`None`).

    Raises:
        LearnerError: If the folder is not there, or holds another kind of adapter.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    if path is None:
        load_tensors(trainer, trainer.initial_weights)
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    before = {name: tensor.shape for name, tensor in trained_tensors(trainer).items()}
    try:
        weights = load_peft_weights(path, device=str(trainer.accelerator.device))
        found = set_peft_model_state_dict(model, weights, adapter_name=model.active_adapter)
    except (OSError, ValueError, RuntimeError) as error:
        raise LearnerError(f"The adapter in {path} cannot be loaded: {error}") from error
    if found.unexpected_keys or {name: tensor.shape for name, tensor in trained_tensors(trainer).items()} != before:
        raise LearnerError(f"The adapter in {path} is of another kind than the one in training.")


def remove_old(folder: Path, keep: int, used: set[str]) -> None:
    """Remove a user's oldest version folders, as many as there are beyond `keep`, but none that is used."""
    versions = sorted(path for path in folder.glob("v*") if path.is_dir())
    for path in versions[:-keep]:
        if path.name not in used:
            shutil.rmtree(path, ignore_errors=True)
