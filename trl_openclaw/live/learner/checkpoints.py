"""Checkpoints as the record of what was trained: which batches are in their weights, and which checkpoint is whole."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import LearnerError
from ..records import BASE_VERSION
from .folders import onto_disk

MARKER = "live_batches.json"
"""The last file that is written into a checkpoint's folder. A folder without it was not finished."""


BATCHES_TO_REMEMBER = 1000


@dataclass(frozen=True)
class Progress:
    """What is in some weights.

    Args:
        version: The adapter version that they are.
        batches: The batches they were trained on, each with the version that came of it.
    """

    version: str = BASE_VERSION
    batches: Mapping[str, str] = field(default_factory=dict)

    def after(self, batch_id: str, version: str) -> "Progress":
        """The same with one more batch. The store knows the end of batches that are this far back."""
        batches = [*self.batches.items(), (batch_id, version)]
        return Progress(version, dict(batches[-BATCHES_TO_REMEMBER:]))


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is whole. What a learner that was killed has left unfinished is removed."""
    found = {int(path.name.split("-")[-1]): path for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal()}
    whole = {step: path for step, path in found.items() if (path / MARKER).is_file()}
    for path in found.keys() - whole.keys():
        shutil.rmtree(found[path])
    return whole[max(whole)] if whole else None


def read_progress(checkpoint: Path | None, user: str) -> Progress:
    """What the marker of a checkpoint says; nothing yet where there is none.

    Raises:
        LearnerError: If it cannot be read, or is another user's.
    """
    if checkpoint is None:
        return Progress()
    try:
        found = json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))
        owner, progress = found.get("user", user), Progress(found["version"], found["batches"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LearnerError(f"{checkpoint / MARKER} cannot be read ({error}): it says what was trained.") from error
    if owner != user:
        raise LearnerError(
            f"{checkpoint} is of user {owner!r}, not of {user!r}: each needs an `output_dir` of its own."
        )
    return progress


def mark_whole(checkpoint: Path, progress: Progress, user: str) -> None:
    """Write the marker, all at once, when the rest is on the disk. From now on these batches are trained."""
    onto_disk(checkpoint)
    unfinished = checkpoint / f"{MARKER}.unfinished"
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump({"user": user, "version": progress.version, "batches": dict(progress.batches)}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(checkpoint / MARKER)
    onto_disk(checkpoint)
