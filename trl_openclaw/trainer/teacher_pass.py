"""The teacher's pass over a generation batch: hint candidates in, what the teacher knows of each out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._trl import SeamGRPOTrainer
from ..hint_selection import OVERLAP_RULES, alike
from ..objectives import Objective
from ..scoring import TeacherRow, TeacherScores
from ..teachers import Teacher
from .ask_teacher import ask_teacher
from .comparison import Heads
from .hint_rows import HintedRow


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

    @torch.no_grad()
    def __call__(
        self,
        plain_prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        candidates: Sequence[Sequence[HintedRow]],
        batch: dict[str, Any],
    ) -> Lesson:
        """Run the pass. A collective.

        Args:
            plain_prompts: The ids that each row was sampled from.
            completions: The ids that were sampled.
            candidates: What the teacher may read instead, for each row; at least one entry, perhaps a dropped one.
            batch: The generation batch, for its shape, and for what TRL's reference gave.
        """
        fitting = [[row for row in rows if row.prompt_ids is not None] for rows in candidates]
        asked = [(i, m, row) for i, rows in enumerate(fitting) for m, row in enumerate(rows)]
        rows = [TeacherRow(row.prompt_ids or (), completions[i]) for i, _, row in asked]
        owners = [i for i, found in enumerate(fitting) if found]
        plain = [TeacherRow(plain_prompts[i], completions[i]) for i in owners]
        scores, reference = self._ask(rows, plain)

        device = self.trainer.accelerator.device
        height, width = batch["completion_ids"].shape
        shape = (height, max([1, *map(len, fitting)]), width)
        at = tuple(torch.tensor([entry[axis] for entry in asked], dtype=torch.long, device=device) for axis in (0, 1))
        logps = scores.per_token_logps.masked_fill(~scores.mask, float("nan"))
        found = {"candidate_logps": _place(logps, at, shape, float("nan"))}
        if self.trainer.args.hint_selection == "sequence":  # one for all tokens, so they have to know the same tokens
            unlike = ~alike(found["candidate_logps"].isfinite())
            found["candidate_logps"].masked_fill_(unlike.unsqueeze(-1), float("nan"))
        if self.uses_student:
            found["candidate_topk_ids"] = _place(scores.best_at(slice(None)), at, shape, 0)
        if scores.states is not None:
            found["candidate_hidden"] = _place(scores.states.hidden, at, shape, 0.0)
        if self.trl_reference:
            found["reference_logps"] = batch["ref_per_token_logps"]
        if reference is not None:
            place = (torch.tensor(owners, dtype=torch.long, device=device),)
            found["reference_logps"] = _place(reference.per_token_logps, place, (height, width), float("nan"))
            if reference.states is not None:
                found["reference_hidden"] = _place(reference.states.hidden, place, (height, width), 0.0)
        found["teacher_mask"] = found["candidate_logps"].isfinite().any(dim=1)
        found["hint_mask"] = found["teacher_mask"].any(dim=1)
        found["row_index"] = torch.arange(height, device=device)
        heads = Heads(*(other.states.head if other and other.states else None for other in (scores, reference)))
        return Lesson(fitting, [_dropped(rows) for rows in candidates], found["hint_mask"].tolist(), found, heads)

    def _ask(
        self, rows: Sequence[TeacherRow], plain: Sequence[TeacherRow]
    ) -> tuple[TeacherScores, TeacherScores | None]:
        """The teacher's scores of `rows`, and the reference's of `plain` where it has to be asked."""
        states = {"keep_states": True} if self.objective is not None else {}
        wanted: dict[str, Any] = {"topk": self.trainer.args.topk} if self.uses_student else {}
        accelerator, reference = self.trainer.accelerator, None if self.trl_reference else self.reference
        if reference is not None and reference is self.teacher:
            scores = ask_teacher(self.teacher, [*rows, *plain], accelerator, **wanted, **states)
            return _part(scores, slice(len(rows))), _part(scores, slice(len(rows), None))
        scores = ask_teacher(self.teacher, rows, accelerator, **wanted, **states)
        return scores, None if reference is None else ask_teacher(reference, plain, accelerator, **states)


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


def _place(
    values: torch.Tensor, index: tuple[torch.Tensor, ...], shape: tuple[int, ...], missing: float
) -> torch.Tensor:
    """Put the rows of `values` `(N, t, ...)` where `index` says into a tensor `(*shape, ...)` that ends in `T >= t`."""
    placed = torch.full((*shape, *values.shape[2:]), missing, dtype=values.dtype, device=values.device)
    placed[(*index, slice(values.size(1)))] = values
    return placed
