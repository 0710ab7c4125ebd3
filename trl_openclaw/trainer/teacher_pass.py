"""The teacher's pass over a generation batch: hint candidates in, what the teacher knows of each out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .._trl import Rollout, SeamGRPOTrainer
from ..hint_selection import OVERLAP_RULES, alike
from ..objectives import Objective
from ..scoring import TeacherRow, TeacherScores
from ..teachers import Teacher
from .ask_teacher import ask_teacher
from .comparison import Heads
from .hint_rows import HintedTurn
from .turns import BatchTurn, turn_masks


@dataclass(frozen=True)
class ReferenceScores:
    """What the reference of G-OPD says of plain prompts.

    Args:
        places: The rows of the batch that were scored.
        scores (`(n, T)`): Their scores, up to the end of the last turn that may be taught.
    """

    places: list[int]
    scores: TeacherScores


@dataclass(frozen=True)
class Candidate:
    """One candidate of one turn, and where its scores are.

    Args:
        turn: The turn.
        number: Its place among the candidates of the turn.
        scored_row: The row that the teacher scored.
        offset: Where the turn begins among the tokens of that row.
    """

    turn: BatchTurn
    number: int
    scored_row: int
    offset: int


@dataclass(frozen=True)
class Answers:
    """What teacher and reference say of a generation batch.

    Args:
        candidates: The candidates of each turn that were scored, in order; none for a turn that was dropped.
        dropped: What is said of a turn without a teacher.
        places: All candidates, turn by turn.
        scores (`(N, T)`): The teacher's scores of the rows it was given.
        reference: The reference's, where it was asked.
    """

    candidates: list[list[HintedTurn]]
    dropped: list[HintedTurn]
    places: list[Candidate]
    scores: TeacherScores
    reference: ReferenceScores | None


@dataclass(frozen=True)
class Lesson:
    """What the teacher knows of a generation batch, before anything is chosen.

    Args:
        candidates: The candidates of each turn that were scored, in order; none for a turn that was dropped.
        dropped: What is said of a turn without a teacher.
        taught: Which turns have one.
        batch: What the loss must know of the teacher. Until it is compared ([`~.comparison.Comparison`]):
            `candidate_logps` `(B, M, T)`, NaN where a candidate cannot be chosen, and where they are needed
            `candidate_topk_ids` `(B, M, T, k)`, `candidate_hidden` `(B, M, T, H)`, `reference_logps` `(B, T)` and
            `reference_hidden` `(B, T, H)`; candidate m of a token is that of its own turn. To stay: `teacher_mask`
            `(B, T)`, the tokens that some candidate has a score for, `hint_mask` `(B,)`, the rows with such a token,
            and `row_index` `(B,)`, where a row belongs.
        heads: Of the hidden states.
    """

    candidates: list[list[HintedTurn]]
    dropped: list[HintedTurn]
    taught: list[bool]
    batch: dict[str, torch.Tensor]
    heads: Heads

    def chosen(self, choice: Sequence[int]) -> list[HintedTurn]:
        """The candidate that each turn is taught with, of the number that was chosen, or why there is none."""
        return [
            found[m] if taught else drop
            for taught, drop, found, m in zip(self.taught, self.dropped, self.candidates, choice, strict=True)
        ]

    def certain(self) -> list[HintedTurn]:
        """The same before a choice is made: nothing for a turn with several candidates."""
        first = self.chosen([0] * len(self.candidates))
        return [one if len(found) < 2 else HintedTurn() for one, found in zip(first, self.candidates, strict=True)]


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
        turns: Sequence[BatchTurn],
        candidates: Sequence[Sequence[HintedTurn]],
        reference: ReferenceScores | None = None,
    ) -> Answers:
        """Ask the teacher, and the reference unless it has been asked. A collective.

        Args:
            rollout: What was sampled, and the prompts it was sampled from.
            turns: The turns of the batch.
            candidates: What the teacher may read before each turn; at least one entry, perhaps a dropped one.
            reference: What the reference has said of all rows with candidates already.
        """
        fitting = [[one for one in found if one.context_ids is not None] for found in candidates]
        rows, places = _teacher_rows(rollout, turns, fitting)
        ends = last_ends([turn for turn, found in zip(turns, fitting, strict=True) if found])
        wanted: dict[str, Any] = {"topk": self.trainer.args.topk} if self.uses_student else {}
        if self.reference is self.teacher and not self.trl_reference:
            scores = self._score(self.teacher, [*rows, *_plain_rows(rollout, ends)], **wanted)
            reference = ReferenceScores(list(ends), _part(scores, slice(len(rows), None)))
            scores = _part(scores, slice(len(rows)))
        else:
            scores = self._score(self.teacher, rows, **wanted)
            if reference is None and self.has_reference_apart:
                reference = self.ask_reference(rollout, ends)
        return Answers(fitting, [_dropped(found) for found in candidates], places, scores, reference)

    @torch.no_grad()
    def ask_reference(self, rollout: Rollout, ends: Mapping[int, int]) -> ReferenceScores:
        """Have the reference score some rows of a batch, under the prompts they were sampled from. A collective.

        Args:
            rollout: What was sampled.
            ends: The rows, and how many tokens of each completion.
        """
        assert self.reference is not None, "asked for where there is one"
        return ReferenceScores(list(ends), self._score(self.reference, _plain_rows(rollout, ends)))

    @torch.no_grad()
    def __call__(self, answers: Answers, batch: dict[str, Any]) -> Lesson:
        """Put the answers where the tokens of a batch are.

        Args:
            answers: What teacher and reference said.
            batch: The generation batch, for its shape, and for what TRL's reference gave.
        """
        scores, reference = answers.scores, answers.reference
        steps, num_steps = batch["turn_index"], batch["step_advantages"].size(1)
        height, width = steps.shape
        shape = (height, max([1, *map(len, answers.candidates)]), width)
        at = answers.places
        logps = scores.per_token_logps.masked_fill(~scores.mask, float("nan"))
        found = {"candidate_logps": _placed_turns(logps, at, shape, float("nan"))}
        if self.trainer.args.hint_selection == "sequence":  # one for all of a turn, so they must know the same tokens
            unlike = _unlike_others(found["candidate_logps"].isfinite(), turn_masks(steps, num_steps))
            found["candidate_logps"].masked_fill_(unlike, float("nan"))
        if self.uses_student:
            found["candidate_topk_ids"] = _placed_turns(scores.best_at(slice(None)), at, shape, 0)
        if scores.states is not None:
            found["candidate_hidden"] = _placed_turns(scores.states.hidden, at, shape, 0.0)
        if self.trl_reference:
            found["reference_logps"] = batch["ref_per_token_logps"]
        if reference is not None:
            rows, known = reference.places, reference.scores
            found["reference_logps"] = _placed_rows(known.per_token_logps, rows, (height, width), float("nan"))
            if known.states is not None:
                found["reference_hidden"] = _placed_rows(known.states.hidden, rows, (height, width), 0.0)
        found["teacher_mask"] = found["candidate_logps"].isfinite().any(dim=1)
        found["hint_mask"] = found["teacher_mask"].any(dim=1)
        found["row_index"] = torch.arange(height, device=steps.device)
        both = scores, reference.scores if reference else None
        heads = Heads(*(other.states.head if other and other.states else None for other in both))
        by_turn = (turn_masks(steps, num_steps) & found["teacher_mask"].unsqueeze(1)).any(dim=2).tolist()
        taught = [by_turn[turn.row][turn.step] for turn in self.trainer.turns.turns]
        return Lesson(answers.candidates, answers.dropped, taught, found, heads)

    def _score(self, teacher: Teacher, rows: Sequence[TeacherRow], **wanted: Any) -> TeacherScores:
        """The scores of a teacher, with its states where an objective compares them."""
        states = {"keep_states": True} if self.objective is not None else {}
        return ask_teacher(teacher, rows, self.trainer.accelerator, **wanted, **states)


def last_ends(turns: Sequence[BatchTurn]) -> dict[int, int]:
    """For each row of some turns, where the last of them ends."""
    return {turn.row: turn.stop for turn in sorted(turns, key=lambda turn: (turn.row, turn.stop))}


def _plain_rows(rollout: Rollout, ends: Mapping[int, int]) -> list[TeacherRow]:
    """Rows of a batch, as they were sampled, up to the token where each ends."""
    return [
        TeacherRow(rollout.prompt_ids[i], rollout.completion_ids[i][:end], rollout.temperature(i))
        for i, end in ends.items()
    ]


def _teacher_rows(
    rollout: Rollout, turns: Sequence[BatchTurn], candidates: Sequence[Sequence[HintedTurn]]
) -> tuple[list[TeacherRow], list[Candidate]]:
    """What the teacher has to score, and which part of it belongs to which candidate.

    Turns of a row that are read under the same hint in the same place, such as a privileged context, are one row that
    the teacher reads once.
    """
    rows: list[TeacherRow] = []
    places: list[Candidate] = []
    begun: dict[tuple[int, int], tuple[int, int]] = {}  # of a batch's row and a number: the scored row, and its start
    for turn, found in zip(turns, candidates, strict=True):
        sampled = rollout.completion_ids[turn.row]
        for number, one in enumerate(found):
            assert one.context_ids is not None, "only what fits is scored"
            at, start = begun.get((turn.row, number), (-1, 0))
            if at < 0 or one.context_ids != [*rows[at].prompt_ids, *sampled[start : turn.start]]:
                at, start = len(rows), turn.start
                begun[turn.row, number] = at, start
                row = TeacherRow(one.context_ids, sampled[turn.start : turn.stop], rollout.temperature(turn.row))
                rows.append(row)
            else:
                rows[at] = replace(rows[at], completion_ids=sampled[start : turn.stop])
            places.append(Candidate(turn, number, at, turn.start - start))
    return rows, places


def _dropped(candidates: Sequence[HintedTurn]) -> HintedTurn:
    """The entry of a turn that is not taught: why its first candidate was dropped, or that nobody scored it."""
    return candidates[0] if candidates[0].drop else HintedTurn(drop="no_teacher_score")


def _unlike_others(scored: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Tokens of candidates `(B, M, T)` that cannot stand for their turn as a whole, since others know more of it.

    Args:
        scored (`(B, M, T)`): Where a candidate has a score.
        turns (`(B, S, T)`): The tokens of each turn.
    """
    usable = alike(scored.unsqueeze(1) & turns.unsqueeze(2))  # (B, S, M)
    return (~usable.unsqueeze(-1) & turns.unsqueeze(2)).any(dim=1)


def _part(scores: TeacherScores, rows: slice) -> TeacherScores:
    """A teacher's answer for some of its rows."""
    ids, states = scores.topk_ids, scores.states
    return TeacherScores(
        scores.per_token_logps[rows],
        scores.mask[rows],
        None if ids is None else ids[rows],
        None if states is None else states[rows],
    )


def _placed_turns(
    values: torch.Tensor, places: Sequence[Candidate], shape: tuple[int, int, int], missing: float
) -> torch.Tensor:
    """The candidates' part of what a teacher said `(N, t, ...)`, at the tokens of their turns `(B, M, T, ...)`."""
    placed = torch.full((*shape, *values.shape[2:]), missing, dtype=values.dtype, device=values.device)
    for one in places:
        turn, stop = one.turn, one.offset + one.turn.stop - one.turn.start
        placed[turn.row, one.number, turn.start : turn.stop] = values[one.scored_row, one.offset : stop]
    return placed


def _placed_rows(values: torch.Tensor, rows: Sequence[int], shape: tuple[int, int], missing: float) -> torch.Tensor:
    """What was said of some rows `(n, t, ...)`, in their places `(B, T, ...)` with `T >= t`."""
    placed = torch.full((*shape, *values.shape[2:]), missing, dtype=values.dtype, device=values.device)
    placed[list(rows), : values.size(1)] = values
    return placed
