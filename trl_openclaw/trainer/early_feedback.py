"""Feedback on a reply starts when the reply is sampled, not when its batch is, nor when it is waited for.

The rows of a batch end at different times, and sampling goes on until the last one has. Whoever says what follows a
reply and judges it, a server or a test run, is mostly not the model that is sampling, so a row that has ended is handed
on at once, to tasks on TRL's own event loop. TRL calls its reward functions when all rows are there, as ever: the
judge's score then waits for the tasks that run already, and starts those of the other rows. Which feedback a turn gets,
in which order it comes back and what processes do together is the same as without a head start; only the wait is
shorter. The metric `feedback/early` is the share of turns that had one.

Once the batch is sampled, the turns that do not run yet are started as well, before any reward function is called, and
the trainer goes on with what needs no feedback. Turns in an environment are left to the reward call, since its reward
functions may still change the environment.

Functions in threads take their share of the CPU while the policy samples. What runs a model in this process is not
asked before sampling is over.
"""

import asyncio
import concurrent.futures
import copy
from functools import partial
from typing import Any

from .._trl import Rollout, SeamGRPOTrainer, as_rewards_see, reward_columns
from ..calls import runs_in_process
from ..feedback import FeedbackBatch
from ..rewards import HindsightReward
from ..types import Turn

_PATIENCE = 2.0
"""Seconds to wait until what is not wanted any more has stopped. The event loop may be blocked by a judge."""


class EarlyFeedback:
    """Starts the feedback on rows of the batch that is being sampled.

    Args:
        trainer: Its event loop runs the tasks.
        reward: The reward function that will ask for the batch's feedback.
    """

    def __init__(self, trainer: SeamGRPOTrainer, reward: HindsightReward):
        self.trainer, self.reward = trainer, reward
        self._rows: list[dict[str, Any]] = []
        self._batch: FeedbackBatch | None = None
        self._places: set[int] = set()

    @property
    def possible(self) -> bool:
        """Whether there is anyone to ask, and nobody who must wait until the policy has sampled."""
        asked = [thing for thing in (self.reward.judge, self.reward.next_state) if thing is not None]
        return bool(asked) and not any(map(runs_in_process, asked))

    @property
    def starts_all(self) -> bool:
        """Whether all turns may be started before the reward functions are called. The same on all ranks."""
        return self.possible and not self.trainer.has_environment

    def open(self, rows: list[dict[str, Any]]) -> None:
        """A batch with these rows is about to be sampled."""
        self.close()
        self._rows, self._places = rows, set()
        self._batch = self.reward.open_batch()

    def start(self, place: int, completion_ids: list[int]) -> None:
        """The row at `place`, which has one turn, has ended with these ids."""
        prompt, completion, row = as_rewards_see(self.trainer, self._rows, place, completion_ids)
        (turn,) = self.reward.turns(prompt, completion, completion_ids, row)
        self._start(place, turn, row, early=True)

    def start_others(self, rollout: Rollout) -> None:
        """All rows have ended: start the turns that have not been, in the order in which they will be asked for."""
        place = 0
        for at in range(len(self._rows)):
            # Copies, which no reward function can rewrite unnoticed.
            prompt, completion = copy.deepcopy((rollout.prompts[at], rollout.completions[at]))
            row = reward_columns(self._rows, at)
            for turn in self.reward.turns(prompt, completion, rollout.completion_ids[at], row):
                if place not in self._places:
                    self._start(place, turn, row, early=False)
                place += 1

    def _start(self, place: int, turn: Turn, row: dict, *, early: bool) -> None:
        assert self._batch is not None, "a batch is opened before it is sampled"
        self._places.add(place)
        start = partial(self._batch.start, place, turn, row, early=early)
        self.trainer.async_loop.call_soon_threadsafe(start)

    def close(self) -> None:
        """Nobody will ask for the batch's feedback any more: stop what still runs for it."""
        was_asked = self.reward.take_batch() is None
        batch, self._batch = self._batch, None
        if batch is None:
            return
        closing = asyncio.run_coroutine_threadsafe(batch.close(), self.trainer.async_loop)
        if not was_asked:  # else the reward call closes it as well, unless that was given up for another one's error
            concurrent.futures.wait([closing], timeout=_PATIENCE)
