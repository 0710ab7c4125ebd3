"""The teacher's pass over a generation batch: hint candidates in, what the teacher knows of each out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._trl import Rollout, SeamGRPOTrainer
from ..hint_selection import OVERLAP_RULES, alike
from ..objectives import Objective
from ..scoring import TeacherRow, TeacherScores
from ..teachers import Teacher
from .ask_teacher import ask_teacher
from .comparison import Heads
from .hint_rows import HintedRow


@dataclass(frozen=True)
class ReferenceScores:
    """What the reference of G-OPD says of plain prompts.

    Args:
        places: The rows of the batch that were scored.
        scores (`(n, T)`): Their scores.
    """

    places: list[int]
    scores: TeacherScores


@dataclass(frozen=True)
class Answers:
    """What teacher and reference say of a generation batch.

    Args:
        candidates: The candidates of each row that were scored, in order; none for a row that was dropped.
        dropped: What is said of a row without a teacher.
        scores (`(N, T)`): The teacher's scores of all candidates, row by row.
        reference: The reference's, where it was asked.
    """

    candidates: list[list[HintedRow]]
    dropped: list[HintedRow]
    scores: TeacherScores
    reference: ReferenceScores | None


@dataclass(frozen=True)
class Lesson:
    """What the teacher knows of a generation batch, before anything is chosen.

    Args:
        candidates: The candidates of each row that were scored, in order; none for a row that was dropped.
        dropped: What is said of a row without a teacher.
        taught: Which rows have one.
        batch: What the loss must know of the teacher. Until it is compared ([`~.comparison.Comparison`]):
            `candidate_logps` `(B, M, T)`, NaN where a candidate cannot be chosen, and where they are needed
            `candidate_topk_ids` `(B, M, T, k)`, `candidate_hidden` `(B, M, T, H)`, `reference_logps` `(B, T)` and
            `reference_hidden` `(B, T, H)`. To stay: `teacher_mask` `(B, T)`, the tokens that some candidate has a score
            for, `hint_mask` `(B,)`, the rows with such a token, and `row_index` `(B,)`, where a row belongs.
        heads: Of the hidden states.
    """

    candidates: list[list[HintedRow]]
    dropped: list[HintedRow]
    taught: list[bool]
    batch: dict[str, torch.Tensor]
    heads: Heads

    def rows(self, choice: Sequence[int]) -> list[HintedRow]:
        """The candidate that each row is taught with, of the number that was chosen, or why there is none."""
        return [
            rows[m] if taught else drop
            for taught, drop, rows, m in zip(self.taught, self.dropped, self.candidates, choice, strict=True)
        ]


@dataclass(frozen=True)
class TeacherPass:
    """Has every hint candidate scored, and the plain prompts where G-OPD has a reference.

    Args:
        trainer: Gives configuration and collectives.
        teacher: The teacher.
        objective: The objective, or `None` for the sampled token.
        reference: Of G-OPD. Where it is the teacher, both are asked at once.
        trl_reference: Whether TRL's own reference pass (`beta`) gives the reference's log-probs.
        several_hints: Whether a row may have more than one candidate to choose among.
    """

    trainer: SeamGRPOTrainer
    teacher: Teacher
    objective: Objective | None
    reference: Teacher | None
    trl_reference: bool = False
    several_hints: bool = True

    @property
    def max_length(self) -> int | None:
        """The longest row, in tokens, that teacher and reference can read; `None` if unknown."""
        windows = (getattr(model, "max_length", None) for model in (self.teacher, self.reference))
        return min((window for window in windows if window is not None), default=None)

    @property
    def uses_student(self) -> bool:
        """Whether the student's best tokens must be known before anything can be compared."""
        args = self.trainer.args
        by_overlap = self.several_hints and args.hint_selection in OVERLAP_RULES and args.max_hints > 1
        return by_overlap or (self.objective is not None and self.objective.uses_support)

    @property
    def has_reference_apart(self) -> bool:
        """Whether the reference has to be asked, in a pass that is not the teacher's."""
        return self.reference is not None and self.reference is not self.teacher and not self.trl_reference

    @torch.no_grad()
    def ask(
        self,
        rollout: Rollout,
        candidates: Sequence[Sequence[HintedRow]],
        reference: ReferenceScores | None = None,
    ) -> Answers:
        """Ask the teacher, and the reference unless it has been asked. A collective.

        Args:
            rollout: What was sampled, and the prompts it was sampled from.
            candidates: What the teacher may read instead, for each row; at least one entry, perhaps a dropped one.
            reference: What the reference has said of all rows with candidates already.
        """
        fitting = [[row for row in rows if row.prompt_ids is not None] for rows in candidates]
        completions = rollout.completion_ids
        rows = [TeacherRow(row.prompt_ids or (), completions[i]) for i, found in enumerate(fitting) for row in found]
        owners = [i for i, found in enumerate(fitting) if found]
        wanted: dict[str, Any] = {"topk": self.trainer.args.topk} if self.uses_student else {}
        if self.reference is self.teacher and not self.trl_reference:
            scores = self._score(self.teacher, [*rows, *_plain_rows(rollout, owners)], **wanted)
            reference = ReferenceScores(owners, _part(scores, slice(len(rows), None)))
            scores = _part(scores, slice(len(rows)))
        else:
            scores = self._score(self.teacher, rows, **wanted)
            if reference is None and self.has_reference_apart:
                reference = self.ask_reference(rollout, owners)
        return Answers(fitting, [_dropped(rows) for rows in candidates], scores, reference)

    @torch.no_grad()
    def ask_reference(self, rollout: Rollout, places: list[int]) -> ReferenceScores:
        """Have the reference score some rows of a batch, under the prompts they were sampled from. A collective."""
        assert self.reference is not None, "asked for where there is one"
        return ReferenceScores(places, self._score(self.reference, _plain_rows(rollout, places)))

    @torch.no_grad()
    def __call__(self, answers: Answers, batch: dict[str, Any]) -> Lesson:
        """Put the answers where the tokens of a batch are.

        Args:
            answers: What teacher and reference said.
            batch: The generation batch, for its shape, and for what TRL's reference gave.
        """
        fitting, scores, reference = answers.candidates, answers.scores, answers.reference
        device = self.trainer.accelerator.device
        height, width = batch["completion_ids"].shape
        shape = (height, max([1, *map(len, fitting)]), width)
        asked = [(i, m) for i, rows in enumerate(fitting) for m in range(len(rows))]
        at = tuple(torch.tensor([entry[axis] for entry in asked], dtype=torch.long, device=device) for axis in (0, 1))
        logps = scores.per_token_logps.masked_fill(~scores.mask, float("nan"))
        found = {"candidate_logps": _scatter(logps, at, shape, float("nan"))}
        if self.trainer.args.hint_selection == "sequence":  # one for all tokens, so they have to know the same tokens
            unlike = ~alike(found["candidate_logps"].isfinite())
            found["candidate_logps"].masked_fill_(unlike.unsqueeze(-1), float("nan"))
        if self.uses_student:
            found["candidate_topk_ids"] = _scatter(scores.best_at(slice(None)), at, shape, 0)
        if scores.states is not None:
            found["candidate_hidden"] = _scatter(scores.states.hidden, at, shape, 0.0)
        if self.trl_reference:
            found["reference_logps"] = batch["ref_per_token_logps"]
        if reference is not None:
            place = (torch.tensor(reference.places, dtype=torch.long, device=device),)
            found["reference_logps"] = _scatter(reference.scores.per_token_logps, place, (height, width), float("nan"))
            if reference.scores.states is not None:
                found["reference_hidden"] = _scatter(reference.scores.states.hidden, place, (height, width), 0.0)
        found["teacher_mask"] = found["candidate_logps"].isfinite().any(dim=1)
        found["hint_mask"] = found["teacher_mask"].any(dim=1)
        found["row_index"] = torch.arange(height, device=device)
        both = scores, reference.scores if reference else None
        heads = Heads(*(other.states.head if other and other.states else None for other in both))
        return Lesson(fitting, answers.dropped, found["hint_mask"].tolist(), found, heads)

    def _score(self, teacher: Teacher, rows: Sequence[TeacherRow], **wanted: Any) -> TeacherScores:
        """The scores of a teacher, with its states where an objective compares them."""
        states = {"keep_states": True} if self.objective is not None else {}
        return ask_teacher(teacher, rows, self.trainer.accelerator, **wanted, **states)


def _plain_rows(rollout: Rollout, places: Sequence[int]) -> list[TeacherRow]:
    """Rows of a batch, as they were sampled."""
    return [TeacherRow(rollout.prompt_ids[i], rollout.completion_ids[i]) for i in places]


def _dropped(candidates: Sequence[HintedRow]) -> HintedRow:
    """The entry of a row that is not taught: why its first candidate was dropped, or that nobody scored it."""
    return candidates[0] if candidates[0].drop else HintedRow(drop="no_teacher_score")


def _part(scores: TeacherScores, rows: slice) -> TeacherScores:
    """A teacher's answer for some of its rows."""
    ids, states = scores.topk_ids, scores.states
    return TeacherScores(
        scores.per_token_logps[rows],
        scores.mask[rows],
        None if ids is None else ids[rows],
        None if states is None else states[rows],
    )


def _scatter(
    values: torch.Tensor, index: tuple[torch.Tensor, ...], shape: tuple[int, ...], missing: float
) -> torch.Tensor:
    """Put the rows of `values` `(N, t, ...)` where `index` says into a tensor `(*shape, ...)` that ends in `T >= t`."""
    placed = torch.full((*shape, *values.shape[2:]), missing, dtype=values.dtype, device=values.device)
    placed[(*index, slice(values.size(1)))] = values
    return placed
