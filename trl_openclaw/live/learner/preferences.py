"""Which token teacher and student would have liked best, for people who look at a reply token by token."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ...lm_head import TokenStates
from ...scoring import TeacherRow, TeacherScores
from ...teachers import LocalTeacher

if TYPE_CHECKING:
    from .trainer import LiveTrainer

DIGITS = 4

Preferences = list[list[list[Any]]]
"""For each token one or two `[text, p_teacher, p_student]`: the teacher's first choice, then the student's if another.
Without a teacher there is the student's, and `p_teacher` is `None`."""


@torch.no_grad()
def preferences(
    trainer: "LiveTrainer",
    replies: Sequence[TeacherRow],
    student: TeacherScores,
    hinted_ids: Sequence[Sequence[int] | None],
    text: Callable[[int], str],
) -> list[Preferences]:
    """The preferences at each token of some replies. One pass of the teacher; a collective.

    Args:
        trainer: Gives the teacher.
        replies: This process's N replies.
        student: What the policy has said of them, with its states.
        hinted_ids: What the teacher reads before each; `None` where none scored it.
        text: A token's text.
    """
    hinted = [i for i, ids in enumerate(hinted_ids) if ids is not None]
    places = {i: place for place, i in enumerate(hinted)}
    teacher = None
    if isinstance(trainer.teacher, LocalTeacher):
        rows = [replace(replies[i], prompt_ids=hinted_ids[i] or ()) for i in hinted]
        teacher = trainer.teacher.score(rows, keep_states=True)
    found = []
    for i, reply in enumerate(replies):
        states = None
        if teacher is not None and i in places:
            states = teacher.states_at((places[i], slice(len(reply.completion_ids))))
        found.append(_of_reply(student.states_at((i, slice(len(reply.completion_ids)))), states, text))
    return found


def _of_reply(own: TokenStates, other: TokenStates | None, text: Callable[[int], str]) -> Preferences:
    """The preferences of a student with states `own` `(T,)` and a teacher with states `other`."""
    first = own.head.topk(own.hidden, 1)
    if other is None:
        return [
            [[text(token), None, round(p, DIGITS)]]
            for token, p in zip(first[:, 0].tolist(), own.log_probs_at(first).exp()[:, 0].tolist(), strict=True)
        ]
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
