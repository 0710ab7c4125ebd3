"""What the trainer needs of an objective."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ..lm_head import LMHead, TokenStates


@dataclass(frozen=True)
class Positions:
    """N positions that have a teacher, with what the student is compared with there.

    Args:
        student: The student's states now, with gradient.
        data: Tensors of N entries, by the names in `Objective.inputs`. With a support: `support_ids`, `support_mask`,
            `old_support_logps` and `target_support_logps` `(N, k)`. With teacher states: `teacher_hidden` `(N, H)`.
        teacher_head: The head that belongs to `teacher_hidden`.
    """

    student: TokenStates
    data: Mapping[str, torch.Tensor]
    teacher_head: LMHead | None = None


class Objective(Protocol):
    """How far the student is from its teacher, per position."""

    uses_support: bool
    """Whether it compares the k tokens of a support set."""

    uses_teacher_states: bool
    """Whether it needs the teacher's last hidden states when the loss is computed."""

    inputs: tuple[str, ...]
    """The tensors `(B, T, ...)` of the batch that it reads."""

    def token_losses(self, positions: Positions) -> torch.Tensor:
        """The losses `(N,)`, with gradient to the student."""
        ...
