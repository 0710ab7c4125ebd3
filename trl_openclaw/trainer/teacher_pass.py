"""The teacher's pass over a generation batch: hint candidates in, what the loss must know of the teacher out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from .._trl import SeamGRPOTrainer
from ..hint_selection import OVERLAP_RULES, select_by_overlap, support, topk_overlap
from ..lm_head import LMHead
from ..losses import extrapolation
from ..objectives import Objective
from ..scoring import TeacherRow, TeacherScores, TokenScorer
from ..teachers import Teacher
from .ask_teacher import ask_teacher
from .hint_rows import HintedRow
from .inputs import shared_vocabulary


@dataclass(frozen=True)
class Lesson:
    """What came of a pass.

    Args:
        rows: The candidate that each row is taught with, or why there is none. Where tokens have candidates of their
            own, the one that most of them have.
        candidates: How many candidates of each row were scored.
        batch: For the loss: `teacher_per_token_logps` `(B, T)`, NaN where there is none, `hint_mask` `(B,)`, and what
            the objective asks for.
        overlap (`(B, T)`, *optional*): Share of the student's best tokens that are the teacher's too; NaN where there
            is no teacher.
        teacher_head: The head of the teacher's hidden states, where the objective asks for them.
    """

    rows: list[HintedRow]
    candidates: list[int]
    batch: dict[str, torch.Tensor]
    overlap: torch.Tensor | None = None
    teacher_head: LMHead | None = None


@dataclass(frozen=True)
class _At:
    """P positions that have a teacher: where they are in the batch, in the teacher's answer and in the student's.

    Args:
        batch: Row and token in the batch, `(P,)` each.
        teacher: Row and token in the teacher's answer.
        student: Row and token in the student's and the reference's answer.
        shape: Of the batch, `(B, T)`.
    """

    batch: tuple[torch.Tensor, torch.Tensor]
    teacher: tuple[torch.Tensor, torch.Tensor]
    student: tuple[torch.Tensor, torch.Tensor]
    shape: torch.Size

    def place(self, values: torch.Tensor, missing: float) -> torch.Tensor:
        """Put `values` `(P, ...)` where they belong in the batch: `(B, T, ...)`."""
        placed = torch.full((*self.shape, *values.shape[1:]), missing, dtype=values.dtype, device=values.device)
        placed[self.batch] = values
        return placed


def _index(owners: Sequence[int], rows: int, device: torch.device) -> torch.Tensor:
    """Where the candidates of each row are in the teacher's answer: `(B, M)`, -1 where there are fewer than M."""
    places = [[a for a, owner in enumerate(owners) if owner == i] for i in range(rows)]
    most = max([1, *map(len, places)])
    return torch.tensor([[*found, *[-1] * (most - len(found))] for found in places], device=device)


def _dropped(candidates: Sequence[HintedRow]) -> HintedRow:
    """The entry of a row that is not taught: why its first candidate was dropped, or that nobody scored it."""
    return candidates[0] if candidates[0].drop else HintedRow(drop="no_teacher_score")


@dataclass(frozen=True)
class TeacherPass:
    """Scores every hint candidate, chooses among them, and looks up what the objective compares.

    Where candidates are chosen by overlap, or an objective compares k tokens, the student scores the batch as well,
    without gradient: its best tokens must be known, and its log-probs before the first update.

    Args:
        trainer: Holds the policy.
        scorer: Runs the student's forward passes.
        teacher: The teacher.
        objective: The objective, or `None` for the sampled token.
        reference: For G-OPD: scores the plain prompts.
        bound_gap: Bounds the gaps `(P, k)` of the tokens `(P, k)` of a support, beyond what the objective does.
        several_hints: Whether a row may have more than one candidate to choose among.
    """

    trainer: SeamGRPOTrainer
    scorer: TokenScorer
    teacher: Teacher
    objective: Objective | None
    reference: Teacher | None
    bound_gap: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    several_hints: bool = True

    @property
    def max_length(self) -> int | None:
        """The longest row, in tokens, that teacher and reference can read; `None` if unknown."""
        windows = (getattr(model, "max_length", None) for model in (self.teacher, self.reference))
        return min((window for window in windows if window is not None), default=None)

    @property
    def uses_student(self) -> bool:
        """Whether the student has to score the batch, too."""
        args = self.trainer.args
        by_overlap = self.several_hints and args.hint_selection in OVERLAP_RULES and args.max_hints > 1
        return by_overlap or (self.objective is not None and self.objective.uses_support)

    @torch.no_grad()
    def __call__(
        self,
        plain_prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        candidates: Sequence[Sequence[HintedRow]],
        width: int,
    ) -> Lesson:
        """Run the pass. A collective.

        Args:
            plain_prompts: The ids that each row was sampled from.
            completions: The ids that were sampled.
            candidates: What the teacher may read instead, for each row; at least one entry, perhaps a dropped one.
            width: Columns T of the batch.
        """
        asked = [(i, row) for i, rows in enumerate(candidates) for row in rows if row.prompt_ids is not None]
        rows = [TeacherRow(row.prompt_ids or (), completions[i]) for i, row in asked]
        owners = sorted({i for i, _ in asked})
        plain = [TeacherRow(plain_prompts[i], completions[i]) for i in owners]
        accelerator, wanted = self.trainer.accelerator, self._wanted()
        scores = ask_teacher(self.teacher, rows, accelerator, **wanted)
        student = self.scorer.score(self.trainer.model, plain, **wanted) if self.uses_student else None
        reference = None
        if self.reference is not None:
            keep = {"keep_states": True} if self.objective is not None else {}
            reference = ask_teacher(self.reference, plain, accelerator, **keep)

        device = accelerator.device
        owner_rows = torch.tensor([owners.index(i) for i, _ in asked], dtype=torch.long, device=device)
        overlap = None
        if student is not None:
            overlap = topk_overlap(student.best_at(owner_rows), scores.best_at(slice(None)))
        index = _index([i for i, _ in asked], len(candidates), device)
        choice, valid = self._choose(index, scores.mask, overlap, width)
        row, token = valid.nonzero(as_tuple=True)
        chosen = index[row, choice[row, token]]
        at = _At((row, token), (chosen, token), (owner_rows[chosen], token), valid.shape)

        batch = {"teacher_per_token_logps": at.place(scores.per_token_logps[at.teacher], float("nan"))}
        batch["hint_mask"] = valid.any(dim=1)
        if self.objective is None and reference is not None:
            batch["extrapolation"] = at.place(self._beyond(scores.per_token_logps[at.teacher], reference, at), 0.0)
        if self.objective is not None and self.objective.uses_support:
            assert student is not None
            batch |= self._support(at, scores, student, reference)
        if self.objective is not None and self.objective.uses_teacher_states:
            batch["teacher_hidden"] = at.place(scores.states_at(at.teacher).hidden, 0.0)
        counts = F.one_hot(choice, index.size(1)).masked_fill(~valid.unsqueeze(-1), 0).sum(dim=1)
        most_used = index.gather(1, counts.argmax(dim=1, keepdim=True)).squeeze(1)
        return Lesson(
            rows=[
                asked[a][1] if taught else _dropped(rows)
                for a, taught, rows in zip(most_used.tolist(), batch["hint_mask"].tolist(), candidates, strict=True)
            ],
            candidates=(index >= 0).sum(dim=1).tolist(),
            batch=batch,
            overlap=None if overlap is None else at.place(overlap[at.teacher], float("nan")),
            teacher_head=scores.states.head if scores.states is not None else None,
        )

    def _choose(
        self, index: torch.Tensor, mask: torch.Tensor, overlap: torch.Tensor | None, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The candidate of each token `(B, T)`, and where it has a score `(B, T)`."""
        padding = (0, width - mask.size(1), 0, 1)  # one row more: the answer to -1
        masks = F.pad(mask, padding)[index]
        if overlap is None:
            choice = torch.zeros_like(masks[:, 0], dtype=torch.long)
        else:
            rule = self.trainer.args.hint_selection
            choice = select_by_overlap(
                F.pad(overlap, padding)[index], masks, rule if rule in OVERLAP_RULES else "token"
            )
        return choice, masks.gather(1, choice.unsqueeze(1)).squeeze(1)

    def _support(
        self, at: "_At", scores: TeacherScores, student: TeacherScores, reference: TeacherScores | None
    ) -> dict[str, torch.Tensor]:
        """The tokens to compare at each position `(B, T, k)`, and their log-probs."""
        ids, inside = support(student.best_at(at.student), scores.best_at(at.teacher), self.trainer.args.topk_support)
        # Models of one family may pad their embeddings differently; what one of them does not have is not compared.
        known = ids < shared_vocabulary(self.trainer, self.teacher, self.reference)
        ids, inside = ids.masked_fill(~known, 0), inside & known
        old = student.states_at(at.student).log_probs_at(ids)
        target = scores.states_at(at.teacher).log_probs_at(ids)
        if reference is not None:
            beyond = reference.states_at(at.student).log_probs_at(ids)
            target = target + extrapolation(target, beyond, self.trainer.args.reward_scale)
        target = old + self.bound_gap(target - old, ids)
        inside = inside & old.isfinite() & target.isfinite()
        found = {
            "support_ids": at.place(ids, 0),
            "support_mask": at.place(inside, False),
            "old_support_logps": at.place(old.masked_fill(~inside, 0.0), 0.0),
            "target_support_logps": at.place(target.masked_fill(~inside, 0.0), 0.0),
        }
        assert self.objective is not None, "only an objective compares a support"
        return {name: tensor for name, tensor in found.items() if name in self.objective.inputs}

    def _beyond(self, teacher_logps: torch.Tensor, reference: TeacherScores, at: "_At") -> torch.Tensor:
        """What G-OPD adds for the sampled tokens; nothing where the reference has no score."""
        found = extrapolation(teacher_logps, reference.per_token_logps[at.student], self.trainer.args.reward_scale)
        return torch.where(found.isfinite(), found, 0.0)

    def _wanted(self) -> dict[str, Any]:
        """What is asked of a score beyond the sampled token's log-prob."""
        wanted: dict[str, Any] = {"topk": self.trainer.args.topk} if self.uses_student else {}
        if self.objective is not None:
            wanted["keep_states"] = True
        return wanted
