"""The turns of a sampled batch, and what is known of each turn at the tokens that are its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from .._trl import Rollout
from ..trajectories import sampled_spans, split_trajectory
from ..types import Feedback, Turn

NO_TURN = -1
"""The step of a token that the policy did not write."""


@dataclass(frozen=True)
class BatchTurn:
    """One turn of one row.

    Args:
        row: The row of this process's batch.
        step: Its place among the row's turns, from 0.
        start: Its first token in the completion.
        stop: The token after its last one.
        matched: Whether it is one of as many turns as the row's messages have, so that what is said of the message of
            that step is said of these tokens.
    """

    row: int
    step: int
    start: int
    stop: int
    matched: bool = True


class BatchTurns:
    """All turns of this process's batch, row by row.

    Args:
        turns: The turns.
        rows: How many rows there are.
    """

    def __init__(self, turns: Sequence[BatchTurn], rows: int):
        self.turns, self.rows = tuple(turns), rows

    @classmethod
    def of(cls, rollout: Rollout) -> "BatchTurns":
        """The turns of what was sampled: the tokens are found by the mask, and matched with the messages in order."""
        turns = []
        for row, ids in enumerate(rollout.completion_ids):
            spans = sampled_spans(len(ids), rollout.tool_mask[row] if rollout.tool_mask is not None else None)
            said = split_trajectory(rollout.prompts[row], rollout.completions[row])
            for step, span in enumerate(spans):
                turns.append(BatchTurn(row, step, span.start, span.stop, matched=len(said) == len(spans)))
        return cls(turns, len(rollout.completion_ids))

    @cached_property
    def num_steps(self) -> int:
        """Turns of the row that has most; at least 1."""
        return max((turn.step + 1 for turn in self.turns), default=1)

    @property
    def unmatched(self) -> int:
        """Rows whose tokens and messages do not have the same number of turns."""
        return len({turn.row for turn in self.turns if not turn.matched})

    def index(self, shape: torch.Size | tuple[int, int], device: torch.device) -> torch.Tensor:
        """The step that each token belongs to `(B, T)`, `NO_TURN` for the others."""
        steps = torch.full(tuple(shape), NO_TURN, dtype=torch.long)
        for turn in self.turns:
            steps[turn.row, turn.start : turn.stop] = turn.step
        return steps.to(device)

    def feedback(self, found: Sequence[Feedback], places: Sequence[tuple[int, int]]) -> list[Feedback]:
        """What was said of each turn; an empty feedback where nothing can be told of these tokens.

        Args:
            found: Of all turns that the messages have.
            places: Their rows and steps.
        """
        known = dict(zip(places, found, strict=True))
        return [
            known.get((turn.row, turn.step), _NOTHING_SAID) if turn.matched else _NOTHING_SAID for turn in self.turns
        ]

    def table(self, values: Sequence[float | None]) -> torch.Tensor:
        """A number of each turn as a table `(B, S)`, NaN where there is none."""
        found = torch.full((self.rows, self.num_steps), float("nan"))
        for turn, value in zip(self.turns, values, strict=True):
            if value is not None:
                found[turn.row, turn.step] = value
        return found

    def by_row(self, values: Sequence[str | None]) -> list[list[str | None]]:
        """What is said of each turn, row by row; one `None` for a row without turns."""
        found: list[list[str | None]] = [[] for _ in range(self.rows)]
        for turn, value in zip(self.turns, values, strict=True):
            found[turn.row].append(value)
        return [row or [None] for row in found]


_NOTHING_SAID = Feedback(Turn("", ""))


def at_tokens(values: torch.Tensor, steps: torch.Tensor, missing: float) -> torch.Tensor:
    """What is known of each turn `(B, S)` at its tokens `(B, T)`; `missing` at tokens of no turn."""
    return values.gather(1, steps.clamp(min=0)).masked_fill(steps == NO_TURN, missing)


def turn_masks(steps: torch.Tensor, num_steps: int) -> torch.Tensor:
    """The tokens of each turn `(B, S, T)`."""
    return steps.unsqueeze(1) == torch.arange(num_steps, device=steps.device).view(1, -1, 1)
