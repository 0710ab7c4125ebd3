"""From a sampled batch to what the loss compares: hints are placed, the teacher scores, and the student is compared.

What is compared may depend on the student: which hint agrees with it best, and which tokens it thinks of. No pass is
made for that. Where TRL scores the sampled batch with the policy anyway, because the policy may move before the last
use of the batch, its states are read from that pass; otherwise they are those of the loss's own forward, which is the
first.

What needs no feedback is scored while feedback comes in. The configuration alone decides what that is, never who
answers first, so that all ranks run the same collectives in the same order. For the same reason, and since a prompt
that rows share would be run once a round, rows with a verdict do not go ahead of those without.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._trl import Rollout
from ..lm_head import LMHead, TokenStates
from .comparison import Comparison, Heads, OldPolicy, Student
from .hint_rows import HintedTurn
from .read_hints import HintReader
from .records import ChoiceRecord, record_lesson
from .teacher_pass import Answers, ReferenceScores, TeacherPass, last_ends

if TYPE_CHECKING:
    from .opd_trainer import OPDTrainer


class Teaching:
    """Has a generation batch scored, and compares it, whole or by micro-batches, as soon as the student is known.

    Args:
        trainer: The trainer.
        lessons: The teacher's pass.
        comparison: What is made of it.
    """

    def __init__(self, trainer: "OPDTrainer", lessons: TeacherPass, comparison: Comparison):
        self.trainer, self.lessons, self.comparison = trainer, lessons, comparison
        self.reader = HintReader(trainer)
        self.old_policy = OldPolicy(trainer.args.topk, self.head_of)
        self.heads = Heads()
        self.chosen: list[HintedTurn] = []
        """What each turn of the latest batch is taught with. Until all rows have been compared it is known only of
        turns that leave no choice."""
        self._answers: Answers | None = None
        self._reference: ReferenceScores | None = None
        self._record: ChoiceRecord | None = None

    def head_of(self, model: nn.Module, hidden: torch.Tensor) -> LMHead:
        """The head of the policy, or of a model like it, as it projects `hidden`."""
        args = self.trainer.args
        return LMHead.of(model, hidden, self.trainer.temperature, in_float32=args.cast_lm_head_to_fp32)

    def forget(self) -> None:
        """Let go of a batch that was given up on its way from sampling to here."""
        self.old_policy.forget()
        self._answers = self._reference = None
        self.chosen = []

    def score_ahead(self, inputs: list[dict[str, Any]], rollout: Rollout) -> None:
        """Score what needs no feedback. A collective.

        Where hints do not come from the judge or from next states, that is everything, and what would be scored anyway.
        Where they do, it is the plain prompts of a reference that is asked by itself. It then scores the rows that will
        have no hint for nothing: at most their share of its pass, while a verdict from a server takes seconds, which
        the whole pass would otherwise add to. A reference that is the teacher itself waits: asked at once for plain and
        hinted prompts, it runs what they share once.
        """
        with self.trainer.timed("teacher"):
            if not self.reader.needs_feedback:
                self._answers = self._ask(inputs, rollout)
            elif self.lessons.has_reference_apart:
                ends = last_ends(self.reader.teachable(rollout, self.lessons.max_length))
                self._reference = self.lessons.ask_reference(rollout, ends)

    def teach(self, inputs: list[dict[str, Any]], batch: dict[str, Any], rollout: Rollout) -> None:
        """Put into a generation batch what the teacher knows of it, and compare it unless that has to wait."""
        trainer = self.trainer
        with trainer.timed("teacher"):
            lesson = self.lessons(self._answers or self._ask(inputs, rollout), batch)
            self._answers = self._reference = None
            batch |= lesson.batch
            lesson.batch.clear()  # the batch alone holds what is large, and lets go of it
            self.heads = lesson.heads
            self._record = ChoiceRecord(lesson, trainer.turns, trainer.turn_feedback(), batch)
            student = self.old_policy.take(batch)
            waits = self.lessons.uses_student and student is None
            if not waits:
                self._compare(batch, student)
        record_lesson(trainer, lesson, trainer.turns, counts_candidates=self.lessons.uses_student)
        if waits:
            self._record.reserve_columns(trainer)
            self.chosen = lesson.certain()
        self.record_choice()

    def compare_in_loss(self, inputs: dict[str, Any], states: TokenStates) -> None:
        """Compare a micro-batch that has waited for the student, with its states `(B, T)` in the loss's forward."""
        self._compare(inputs, Student.of(states, inputs["teacher_mask"], self.trainer.args.topk))

    def record_choice(self) -> None:
        """Log what was chosen, once all rows of the generation batch have been compared. A collective then."""
        if self._record is not None and self._record.is_complete:
            self.chosen = self._record.record(self.trainer)
            self._record = None

    def _ask(self, inputs: list[dict[str, Any]], rollout: Rollout) -> Answers:
        """Read the hints and have all candidates scored. A collective."""
        candidates = self.reader(inputs, rollout, self.lessons.max_length)
        return self.lessons.ask(rollout, self.trainer.turns.turns, candidates, self._reference)

    def _compare(self, batch: dict[str, Any], student: Student | None) -> None:
        self.comparison(batch, student, self.heads)
        assert self._record is not None, "a batch is scored before it is compared"
        self._record.add(batch)
