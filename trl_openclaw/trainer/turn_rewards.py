"""What is known of the turns of the batch at hand: what was said of each, and what it is rewarded with."""

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from .._trl import ChatSuffixes, SeamGRPOTrainer
from ..rewards import HindsightReward
from ..types import Feedback
from .step_rewards import outcome_plus_process
from .turns import BatchTurns


class TurnRewards(SeamGRPOTrainer if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixin for a trainer one of whose reward functions, `feedback`, judges turn by turn."""

    feedback: HindsightReward
    turns = BatchTurns((), 0)

    @cached_property
    def suffixes(self) -> ChatSuffixes:
        """Renders messages in the middle of a trajectory."""
        return ChatSuffixes(self)

    def turn_feedback(self) -> list[Feedback]:
        """What was said of each of this rank's turns; an empty feedback of those that nothing can be told of."""
        return self.turns.feedback(self.feedback.last, self.feedback.places)

    def turn_scores(self) -> list[float | None]:
        """The judge's score of each of this rank's turns."""
        known = dict(zip(self.feedback.places, self.feedback.turn_scores(), strict=True))
        return [known.get((turn.row, turn.step)) if turn.matched else None for turn in self.turns.turns]

    def step_rewards(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """What each of this rank's turns is rewarded with, outcome and process `(B, S)`; NaN where there is neither.

        Args:
            rewards_per_func (`(world * B, F)`): All ranks' rewards, NaN where a function had none to give.
        """
        rewards = self.own_rows(rewards_per_func * self.reward_weights.to(rewards_per_func))
        judge = self.reward_funcs.index(self.feedback)
        others = torch.cat([rewards[:, :judge], rewards[:, judge + 1 :]], dim=1)
        outcome = others.nansum(dim=1).masked_fill(others.isnan().all(dim=1), float("nan"))
        process = self.turns.table(self.turn_scores()).to(outcome)
        exists = ~self.turns.table([0.0] * len(self.turns.turns)).isnan()
        return outcome_plus_process(outcome, process, exists.to(outcome.device))

    def own_rows(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's part of all ranks' values `(world * B, ...)`."""
        rows = self.turns.rows
        return values[self.accelerator.process_index * rows : (self.accelerator.process_index + 1) * rows]
