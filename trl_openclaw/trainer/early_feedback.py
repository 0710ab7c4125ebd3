"""Feedback on a reply starts when the reply is sampled, not when its batch is.

The rows of a batch end at different times, and sampling goes on until the last one has. Whoever says what follows a
reply and judges it, a server or a test run, is mostly not the model that is sampling, so a row that has ended is handed
on at once, to tasks on TRL's own event loop. TRL calls its reward functions when all rows are there, as ever: the
judge's score then waits for the tasks that run already, and starts those of the other rows. Which feedback a turn gets,
in which order it comes back and what processes do together is the same as without a head start; only the wait is
shorter. The metric `feedback/early` is the share of turns that had one.

Functions in threads take their share of the CPU while the policy samples. What runs a model in this process is not
asked before sampling is over.
"""

from typing import Any

from .._trl import SeamGRPOTrainer, as_rewards_see
from ..calls import runs_in_process
from ..rewards import HindsightReward


class EarlyFeedback:
    """Starts the feedback on rows of the batch that is being sampled.

    Args:
        trainer: Its event loop runs the tasks.
        reward: The reward function that will ask for the batch's feedback.
    """

    def __init__(self, trainer: SeamGRPOTrainer, reward: HindsightReward):
        self.trainer, self.reward = trainer, reward
        self._rows: list[dict[str, Any]] = []

    @property
    def possible(self) -> bool:
        """Whether there is anyone to ask, and nobody who must wait until the policy has sampled."""
        asked = [thing for thing in (self.reward.judge, self.reward.next_state) if thing is not None]
        return bool(asked) and not any(map(runs_in_process, asked))

    def open(self, rows: list[dict[str, Any]]) -> None:
        """A batch with these rows is about to be sampled."""
        self.close()
        self._rows = rows
        self._batch = self.reward.open_batch()

    def start(self, place: int, completion_ids: list[int]) -> None:
        """The row at `place` has ended with these ids."""
        prompt, completion, row = as_rewards_see(self.trainer, self._rows, place, completion_ids)
        turn = self.reward.turn(prompt, completion, completion_ids)
        self.trainer.async_loop.call_soon_threadsafe(self._batch.start, place, turn, row)

    def close(self) -> None:
        """Nobody will ask for the batch's feedback any more: stop what still runs for it."""
        batch = self.reward.take_batch()
        if batch is not None:
            self.trainer.run_async(batch.close())
