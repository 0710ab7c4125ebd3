"""Stops all processes together, with one message, when feedback cannot be had."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object

from .._trl import SeamGRPOTrainer
from ..errors import JudgeUnavailableError
from ..types import Feedback

logger = get_logger(__name__)


def check_services(services: Sequence[Any], trainer: SeamGRPOTrainer) -> None:
    """Ask every judge and next-state provider that has a `check()` whether it can work. A collective.

    Only the main process asks, so that a cluster does not knock on one server's door at once; all hear the answer.

    Raises:
        JudgeUnavailableError: On every rank, with the service's own message.
    """
    problem: list[str | None] = [None]
    if trainer.accelerator.is_main_process:
        try:
            for service in services:
                check = getattr(service, "check", None)
                if check is not None:
                    trainer.run_async(check())
        except (Exception, SystemExit) as error:  # whatever it is, the other ranks wait for this one's word
            known = isinstance(error, JudgeUnavailableError)
            problem = [str(error) if known else f"{type(service).__name__}.check() failed: {error!r}"]
    if trainer.accelerator.num_processes > 1:
        broadcast_object_list(problem)
    if problem[0] is not None:
        raise JudgeUnavailableError(problem[0])


def stop_together(problem: str | None, accelerator: Accelerator, error: type[Exception]) -> None:
    """Raise what one process found on all of them, so that none waits for ever. A collective.

    Args:
        problem: What this process found, if anything.
        error: The class of what is raised.

    Raises:
        Exception: On every rank, of the class `error`, with the first problem found.
    """
    found = accelerator.gather(torch.tensor([problem is not None], device=accelerator.device))
    if found.any():
        raise error(gather_object([] if problem is None else [problem])[0])


class FailureGuard:
    """Counts batches in which nearly all feedback failed, over all processes.

    Args:
        limit: Share of turns, over all processes, from which a batch counts as failed.
        patience: Failed batches in a row that end the training.
    """

    def __init__(self, limit: float, patience: int):
        self.limit = limit
        self.patience = patience
        self.failed_batches = 0
        self._seen: set[str] = set()

    def observe(self, feedbacks: Sequence[Feedback], accelerator: Accelerator) -> None:
        """Count one batch. A collective: every rank calls it and every rank comes to the same decision.

        Raises:
            JudgeUnavailableError: On every rank, when `patience` batches in a row failed.
        """
        failures = [feedback for feedback in feedbacks if feedback.failure is not None]
        for feedback in failures:
            if feedback.failure not in self._seen:  # the first of its kind says why; the metrics count the others
                self._seen.add(str(feedback.failure))
                logger.warning(f"Feedback failed, counted as `feedback/failed/{feedback.failure}`: {feedback.detail}")
        local = torch.tensor([len(failures), len(feedbacks)], device=accelerator.device)
        failed, total = accelerator.gather(local).view(-1, 2).sum(0).tolist()
        self.failed_batches = self.failed_batches + 1 if total and failed >= self.limit * total else 0
        if self.failed_batches < self.patience:
            return
        details = gather_object([f"{failures[-1].failure}: {failures[-1].detail}"] if failures else [])
        raise JudgeUnavailableError(
            f"Feedback failed for {failed} of {total} turns, for {self.failed_batches} batches in a row "
            f"(`judge_failure_limit={self.limit:g}`, `judge_failure_patience={self.patience}`), so there is nothing to "
            f"train on. All processes stop. The last failure was {details[-1]}"
        )


class SilenceAlarm:
    """Warns when several batches in a row had nothing to train on, since a loss of 0 is easily overlooked.

    Args:
        patience: Such batches in a row before it warns, once.
    """

    def __init__(self, patience: int = 3):
        self.patience = patience
        self.silent_batches = 0

    def observe(self, share: float) -> None:
        """Count a batch by the share of its rows, over all processes, that carry a signal."""
        self.silent_batches = self.silent_batches + 1 if share == 0 else 0
        if self.silent_batches == self.patience:
            logger.warning(
                f"No row of the last {self.patience} batches carried a signal, so nothing was trained. The metrics "
                "`hint/dropped/*`, `judge/score/*` and `next_state/missing` say why."
            )
