"""What happens around an optimizer step: the version that came of it is written, checked, and published or dropped.

A step counts from the moment its checkpoint is marked whole. Before that nothing but the store's record of the claim
has changed, and a learner that is killed leaves a version that nobody uses. Afterwards publishing and ending the batch
are made up for at the next start.
"""

import logging
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ...teachers import EMATeacher
from .adapters import remove_old, write_adapter
from .checkpoints import Progress, mark_whole
from .checks import CheckResult, Checks, as_detail, failures
from .desk import OVERTAKEN, WITHDRAWN
from .folders import adapters_of
from .snapshot import Snapshot
from .together import on_main

if TYPE_CHECKING:
    from .trainer import LiveTrainer

logger = logging.getLogger(__name__)

LOGS_TO_KEEP = 200
"""Entries of the log that are saved with each checkpoint. A learner has no end, and its log has none either."""


class Updates(TrainerCallback):
    """Sees to each update of a live trainer. All its work is done by all processes together.

    Args:
        trainer: The trainer.

    Attributes:
        average: The folder with the moving average that goes with the present weights, where the teacher is one.
    """

    def __init__(self, trainer: "LiveTrainer"):
        self.trainer = trainer
        self.checks = Checks(trainer)
        self.average: Path | None = None
        self._before: Snapshot | None = None
        self._version: str | None = None
        self._summary = ""

    # What the trainer calls

    def on_train_begin(self, args, state, control, **kwargs):
        """Keep the average that training starts with, and measure what versions will be compared with."""
        if self.average is None:
            self._save_average()
        self.checks.prepare()

    def on_step_begin(self, args, state, control, **kwargs):
        """Remember the weights."""
        self._before = Snapshot(self.trainer)

    def on_step_end(self, args, state, control, **kwargs):
        """Write the new version, check it, and go back if it fails."""
        del state.log_history[:-LOGS_TO_KEEP]
        reason = self._write_and_check()
        if reason is not None:
            self._reject(reason)
        control.should_save = reason is None
        return control

    def on_save(self, args, state, control, **kwargs):
        """The checkpoint is there: from now on its batches are trained."""
        trainer, version, batch = self.trainer, self._version, self.trainer.batch
        assert version is not None, "a checkpoint follows a version that passed"
        assert batch is not None, "a version comes of a batch"
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        trainer.accelerator.wait_for_everyone()  # each process has written its part
        if on_main(trainer.accelerator, lambda: trainer.at_desk.withdrawn(batch)):  # while it was written
            on_main(trainer.accelerator, lambda: shutil.rmtree(checkpoint))
            self._reject(WITHDRAWN)
            return
        progress = trainer.progress.after(batch.batch_id, version)
        on_main(trainer.accelerator, lambda: self._commit(checkpoint, progress))
        trainer.progress, trainer.batch = progress, None
        self.average, self._version, self._before = checkpoint, None, None
        self.checks.measures.forget(version)

    def begin_average(self) -> None:
        """Let a moving average begin anew with the present weights."""
        teacher = self.trainer.teacher
        if isinstance(teacher, EMATeacher):
            rate, teacher.rate = teacher.rate, 1.0  # all of the way
            try:
                teacher.update(teacher.start + 1)
            finally:
                teacher.rate = rate
        self._save_average()

    # Steps of an update

    def _write_and_check(self) -> str | None:
        """What is wrong with the weights as they are now, which become a version; `None` if nothing is."""
        trainer, began = self.trainer, time.monotonic()
        assert self._before is not None, "a step begins before it ends"
        scores = trainer.notes.gathered()
        self._version = version = on_main(trainer.accelerator, lambda: self._add_version(scores))
        results = self.checks(version, self._before)
        for name, result in results.items():
            for number, value in result.numbers.items():
                trainer.record_metric(f"check/{name}/{number}", value)
        self._summary = ", ".join(f"{name} {result.outcome.replace('_', ' ')}" for name, result in results.items())
        seconds = time.monotonic() - began
        return on_main(trainer.accelerator, lambda: self._judge(version, results, seconds))

    def _add_version(self, scores: dict[str, Any]) -> str:
        trainer, store = self.trainer, self.trainer.at_desk.store
        batch, args = trainer.batch, trainer.args
        assert batch is not None, "a step is made on a batch"
        followed = {one.turn.turn_id: one.turn.next_state for one in batch.turns}
        store.add_token_scores(batch.batch_id, scores, on=followed)
        version = store.next_version(args.user)
        folder = adapters_of(args.live_folder.resolve(), args.user) / version
        write_adapter(trainer, folder)
        store.add_version(args.user, version, trainer.progress.version, str(folder))
        return version

    def _judge(self, version: str, results: dict[str, CheckResult], seconds: float) -> str | None:
        store, user, batch = self.trainer.at_desk.store, self.trainer.args.user, self.trainer.batch
        assert batch is not None, "a step is made on a batch"
        detail = {"checks": as_detail(results), "turns": len(batch.turns), "seconds": round(seconds, 3)}
        store.add_version_event(user, version, "checked", detail)
        if self.trainer.at_desk.withdrawn(batch):
            return WITHDRAWN
        overtaken = store.published_version(user) != self.trainer.progress.version
        return failures(results) or (OVERTAKEN if overtaken else None)

    def _reject(self, reason: str) -> None:
        trainer, version, batch = self.trainer, self._version, self.trainer.batch
        assert version is not None, "what is rejected is a version"
        assert batch is not None, "a version comes of a batch"
        assert self._before is not None, "a step begins before it ends"
        on_main(trainer.accelerator, lambda: self._record_rejection(batch.batch_id, version, reason))
        self._before.restore(trainer)
        if isinstance(trainer.teacher, EMATeacher):
            trainer.teacher.restore(str(self.average))
            trainer.teacher.begin()
        self.checks.measures.forget(trainer.progress.version)
        trainer.batch = self._version = self._before = None
        trainer.record_metric("live/rejected", 1.0)
        trainer.accelerator.print(f"Version {version} was rejected: {reason}.", flush=True)

    def _record_rejection(self, batch_id: str, version: str, reason: str) -> None:
        desk, blameless = self.trainer.at_desk, reason in (OVERTAKEN, WITHDRAWN)
        desk.open = None
        desk.store.end_batch(batch_id, "released" if blameless else "rejected", version)
        desk.store.add_version_event(desk.user, version, "rejected", {"reason": reason})
        if reason == WITHDRAWN:
            shutil.rmtree(adapters_of(self.trainer.args.live_folder, desk.user) / version, ignore_errors=True)

    def _commit(self, checkpoint: Path, progress: Progress) -> None:
        trainer, desk = self.trainer, self.trainer.at_desk
        batch_id, version = list(progress.batches.items())[-1]
        parent = trainer.progress.version
        desk.open = None  # whatever fails from here on, the marker alone says whether the batch is free again
        mark_whole(checkpoint, progress, desk.user)
        published = desk.store.publish(desk.user, version, if_published=parent)
        if published:
            trainer.accelerator.print(f"Version {version} is published ({self._summary}).", flush=True)
        else:  # training goes on from the other one, in which the batch is not
            desk.store.add_version_event(desk.user, version, "rejected", {"reason": OVERTAKEN})
            trainer.accelerator.print(f"Version {version} is not published: {OVERTAKEN}.", flush=True)
        desk.store.end_batch(batch_id, "trained" if published else "released", version)
        folder = adapters_of(trainer.args.live_folder, desk.user)
        used = {version, parent, desk.store.published_version(desk.user)}  # `parent`: should the engine refuse this one
        remove_old(folder, trainer.args.keep_versions, used)

    def _save_average(self) -> None:
        """Keep the moving average of weights that no checkpoint has."""
        if isinstance(self.trainer.teacher, EMATeacher):
            self.average = Path(self.trainer.args.output_dir or "") / "average"
            self.trainer.teacher.save(str(self.average), writes=self.trainer.accelerator.is_main_process)
