"""What a step computed for each token of its turns, kept for the store."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object

from ...scoring import TeacherScores
from ..records import TokenScores
from .measure import Item
from .preferences import Preferences, preferences
from .rollouts import LiveTurn

if TYPE_CHECKING:
    from .trainer import LiveTrainer


class TokenNotes:
    """Collects, over the forward passes of a step, what the tokens of this process's turns were trained with.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: "LiveTrainer"):
        self.trainer = trainer
        self._turns: list[LiveTurn] = []
        self._read: tuple[list[LiveTurn], TeacherScores] | None = None
        self._prefers: list[Preferences] | None = None
        self._scores: dict[str, TokenScores] = {}

    def read(self, turns: Sequence[LiveTurn], student: TeacherScores | None) -> None:
        """What the policy says of this process's turns before a step, for the preferences."""
        self._read = None if student is None else (list(turns), student)

    def begin(self, turns: Sequence[LiveTurn]) -> None:
        """A batch with these turns has been scored by its teacher. A collective where preferences are kept."""
        self._turns, self._scores, self._prefers = list(turns), {}, None
        if self.trainer.args.token_preferences:
            chosen = self.trainer.chosen_hints
            contexts = [one.context_ids for one in chosen] if chosen else [None] * len(turns)
            assert self._read is not None, "the policy reads a batch before it is taken"
            (read, student), self._read = self._read, None
            assert read == self._turns, "a process trains its share, in its order"
            rows = [Item.of(one.turn).row for one in turns]
            self._prefers = preferences(self.trainer, rows, student, contexts, self._text)

    def add(self, inputs: dict[str, Any], advantages: torch.Tensor) -> None:
        """Take note of a micro-batch, as the loss reads it.

        Args:
            inputs: The micro-batch. `place` `(B,)` says which turns its rows are.
            advantages: Of its tokens, `(B, T)`.
        """
        missing = torch.full_like(advantages, float("nan"))
        teacher = inputs.get("teacher_per_token_logps", missing)
        trained = inputs["tool_mask"].bool() if "tool_mask" in inputs else torch.ones_like(advantages, dtype=torch.bool)
        values = [teacher.tolist(), advantages.masked_fill(~trained, 0.0).tolist()]
        for row, place in enumerate(inputs["place"].tolist()):
            turn = self._turns[place].turn
            length = len(turn.completion_ids)
            by_teacher, trained_with = (value[row][:length] for value in values)
            self._scores[turn.turn_id] = TokenScores(
                turn.logprobs,
                by_teacher,
                trained_with,
                None if self._prefers is None else self._prefers[place],
                [self._text(token) for token in turn.completion_ids],
            )

    def gathered(self) -> dict[str, TokenScores]:
        """The notes of all processes. A collective."""
        found = gather_object(list(self._scores.items()))
        self._turns, self._scores, self._prefers = [], {}, None
        return dict(found)

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self.trainer.tokenizer.decode([token])
        return self._texts[token]

    @cached_property
    def _texts(self) -> dict[int, str]:
        return {}


def gains(turn_scores: TokenScores, logps: Sequence[float]) -> float | None:
    """How far log-probs have moved the way a turn was trained, per unit of advantage, in nats; `None` without any.

    Args:
        turn_scores: What the turn was trained with.
        logps: Log-probs of its tokens now.
    """
    pairs = [
        (a, now - before) for a, now, before in zip(turn_scores.advantages, logps, turn_scores.student, strict=True)
    ]
    weight = sum(abs(a) for a, _ in pairs)
    return sum(a * moved for a, moved in pairs) / weight if weight else None
