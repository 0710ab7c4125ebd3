"""Which token teacher and student would have liked best, for people who look at a reply token by token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...scoring import TeacherRow, TeacherScores
from ...teachers import LocalTeacher

if TYPE_CHECKING:
    from .trainer import LiveTrainer

DIGITS = 4

Preferences = list[list[list[Any]]]
"""For each token one or two `[text, p_teacher, p_student]`: the teacher's first choice, then the student's if another.
Without a teacher there is the student's, and `p_teacher` is `None`."""


@dataclass(frozen=True)
class Reading:
    """A reply, its temperature, and what student and teacher read before it (`None` where no teacher scored it)."""

    prompt_ids: Sequence[int]
    hinted_ids: Sequence[int] | None
    completion_ids: Sequence[int]
    temperature: float = 1.0


@torch.no_grad()
def preferences(trainer: "LiveTrainer", readings: Sequence[Reading], text: Callable[[int], str]) -> list[Preferences]:
    """The preferences at each token of some replies. One pass of the student and one of the teacher; a collective.

    Args:
        trainer: Gives both.
        readings: This process's replies, as many as every other process has.
        text: A token's text.
    """
    found: list[Preferences] = []
    size = trainer.args.per_device_train_batch_size
    for start in range(0, len(readings), size):
        part = readings[start : start + size]
        plain = [TeacherRow(one.prompt_ids, one.completion_ids, one.temperature) for one in part]
        student = trainer.scorer.score(trainer.model, plain, keep_states=True)
        hinted = [i for i, one in enumerate(part) if one.hinted_ids is not None]
        teacher = None
        if isinstance(trainer.teacher, LocalTeacher):
            rows = [TeacherRow(part[i].hinted_ids or (), part[i].completion_ids, part[i].temperature) for i in hinted]
            teacher = trainer.teacher.score(rows, keep_states=True)
        for i, one in enumerate(part):
            place = hinted.index(i) if i in hinted and teacher is not None else None
            found.append(_of_reply(student, i, teacher, place, len(one.completion_ids), text))
    return found


def _of_reply(
    student: TeacherScores,
    row: int,
    teacher: TeacherScores | None,
    place: int | None,
    length: int,
    text: Callable[[int], str],
) -> Preferences:
    own = student.states_at((row, slice(length)))
    first = own.head.topk(own.hidden, 1)
    if teacher is None or place is None:
        return [
            [[text(token), None, round(p, DIGITS)]]
            for token, p in zip(first[:, 0].tolist(), own.log_probs_at(first).exp()[:, 0].tolist(), strict=True)
        ]
    other = teacher.states_at((place, slice(length)))
    ids = torch.cat([other.head.topk(other.hidden, 1), first], dim=1)
    by_teacher, by_student = (states.log_probs_at(ids).exp().tolist() for states in (other, own))
    entries = []
    for tokens, p_teacher, p_student in zip(ids.tolist(), by_teacher, by_student, strict=True):
        both = [
            [text(token), round(t, DIGITS), round(s, DIGITS)]
            for token, t, s in zip(tokens, p_teacher, p_student, strict=True)
        ]
        entries.append(both[:1] if tokens[0] == tokens[1] else both)
    return entries
