"""Once the student's states are known: the hint of each token, the tokens that are compared there, their targets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..hint_selection import select_by_overlap, support, topk_overlap
from ..lm_head import LMHead, TokenStates
from ..losses import extrapolation
from ..objectives import Objective
from .turns import turn_masks


@dataclass(frozen=True)
class Heads:
    """The heads that belong to the hidden states in a batch, where it holds some."""

    teacher: LMHead | None = None
    reference: LMHead | None = None


@dataclass(frozen=True)
class Student:
    """The policy that sampled, at the P tokens that have a teacher; without gradient.

    Args:
        states (`(P,)`): Its states.
        topk_ids (`(P, k)`): Its most likely tokens.
    """

    states: TokenStates
    topk_ids: torch.Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, states: TokenStates, mask: torch.Tensor, topk: int) -> "Student":
        """The student at the tokens `mask` `(B, T)`, inside a forward pass with `states` `(B, T)`."""
        found = states[mask]
        return cls(found, found.head.topk(found.hidden, topk))


class OldPolicy:
    """What TRL's own pass over a sampled batch tells of the policy, part by part; nothing where TRL makes none.

    Args:
        topk: How many of the most likely tokens to find at each position.
        head_of: The head of a model that made hidden states.
    """

    def __init__(self, topk: int, head_of: Callable[[nn.Module, torch.Tensor], LMHead]):
        self.topk, self.head_of = topk, head_of
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._head: LMHead | None = None

    def read(self, hidden: torch.Tensor, model: nn.Module) -> None:
        """Keep the hidden states `(n, T, H)` of the next rows. Inside the forward pass."""
        self._head = self.head_of(model, hidden)
        best = self._head.topk(hidden.flatten(0, 1), self.topk)
        self._parts.append((hidden, best.view(*hidden.shape[:2], -1)))

    def forget(self) -> None:
        """Drop what nobody took."""
        self._parts = []

    def take(self, batch: dict[str, Any]) -> Student | None:
        """The student of a batch `(B, T)`, once; `None` where its own forward in the loss is the first."""
        parts, self._parts = self._parts, []
        if not parts:
            return None
        assert self._head is not None
        hidden, best = (torch.cat(found) for found in zip(*parts, strict=True))
        mask = batch["teacher_mask"]
        states = TokenStates(hidden, batch["completion_ids"], batch["old_per_token_logps"], self._head)
        return Student(states[mask], best[mask])


@dataclass(frozen=True)
class Comparison:
    """Turns what the teacher knows of every candidate into what the loss reads. A batch is compared once.

    Args:
        args: The configuration.
        objective: The objective, or `None` for the sampled token.
        vocabulary: Tokens that all models have.
        bound_gap: Bounds the gaps `(P, k)` of the tokens `(P, k)` of a support, beyond what the objective does.
    """

    args: Any
    objective: Objective | None
    vocabulary: int
    bound_gap: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    @staticmethod
    def is_due(batch: dict[str, Any]) -> bool:
        """Whether a batch, or a part of one, still holds its candidates."""
        return "candidate_logps" in batch

    @torch.no_grad()
    def __call__(self, batch: dict[str, Any], student: Student | None, heads: Heads) -> None:
        """Choose among the candidates of a batch, and put in their place what the loss compares.

        Takes out what starts with `candidate_` and `reference_`; see [`~.teacher_pass.Lesson`]. Puts in
        `teacher_per_token_logps` `(B, T)`, NaN where there is none, `hint_choice` `(B, S)` (the candidate that most
        tokens of a turn have), `hint_overlap` `(B, T)` where the student's best tokens are known (the share of them
        that are the teacher's, too), what G-OPD adds, and what the objective asks for.

        Args:
            batch: Rows of a generation batch; changes.
            student: The policy that sampled them, unless nothing depends on it.
            heads: Of the teacher's and the reference's hidden states.
        """
        known = _take(batch, ("candidate_logps", "candidate_topk_ids", "candidate_hidden"))
        beyond = _take(batch, ("reference_logps", "reference_hidden"))
        logps, mask = known["candidate_logps"], batch["teacher_mask"]
        row, token = mask.nonzero(as_tuple=True)
        overlap = None
        if student is not None:
            overlap = topk_overlap(student.topk_ids.unsqueeze(1), known["candidate_topk_ids"][row, :, token])
        turns = turn_masks(batch["turn_index"], batch["step_advantages"].size(1))
        choice = self._choose(overlap, logps.isfinite(), mask, turns)
        chosen = choice[row, token]
        at = (row, chosen, token)
        chosen_by = F.one_hot(choice, logps.size(1)).masked_fill(~mask.unsqueeze(-1), 0)  # (B, T, M)
        batch["hint_choice"] = (turns.float() @ chosen_by.float()).argmax(dim=2)
        if overlap is not None:
            share = overlap.gather(1, chosen.unsqueeze(1)).squeeze(1)
            batch["hint_overlap"] = _place(share, mask, float("nan"))
        batch["teacher_per_token_logps"] = _place(logps[at], mask, float("nan"))
        if self.objective is None and "reference_logps" in beyond:
            batch["extrapolation"] = self._beyond(batch["teacher_per_token_logps"], beyond["reference_logps"])
        if self.objective is not None and self.objective.uses_support:
            assert student is not None, "a support needs the student's best tokens"
            assert heads.teacher is not None, "hidden states come with their head"
            ids = student.states.token_ids
            teacher = TokenStates(known["candidate_hidden"][at], ids, logps[at], heads.teacher)
            reference = None
            if heads.reference is not None:
                found = beyond["reference_hidden"][mask], ids, beyond["reference_logps"][mask]
                reference = TokenStates(*found, heads.reference)
            batch |= self._support(mask, student, teacher, known["candidate_topk_ids"][at], reference)
        if self.objective is not None and self.objective.uses_teacher_states:
            batch["teacher_hidden"] = _place(known["candidate_hidden"][at], mask, 0.0)

    def _choose(
        self, overlap: torch.Tensor | None, scored: torch.Tensor, mask: torch.Tensor, turns: torch.Tensor
    ) -> torch.Tensor:
        """The candidate of each token `(B, T)`.

        Args:
            overlap (`(P, M)`): Agreement of each candidate at the tokens that have a teacher.
            scored (`(B, M, T)`): Where a candidate has a score.
            mask (`(B, T)`): The tokens that have a teacher.
            turns (`(B, S, T)`): The tokens of each turn.
        """
        if overlap is None:
            return torch.zeros_like(mask, dtype=torch.long)
        rule = self.args.hint_selection
        shares = _place(overlap, mask, 0.0).transpose(1, 2)
        if rule != "sequence":
            return select_by_overlap(shares, scored, "token")
        by_turn = select_by_overlap(shares.unsqueeze(1), scored.unsqueeze(1) & turns.unsqueeze(2), rule)  # (B, S, T)
        return (by_turn * turns).sum(dim=1)

    def _support(
        self,
        mask: torch.Tensor,
        student: Student,
        teacher: TokenStates,
        teacher_topk_ids: torch.Tensor,
        reference: TokenStates | None,
    ) -> dict[str, torch.Tensor]:
        """The tokens to compare at each position `(B, T, k)`, and their log-probs; of states `(P,)`."""
        ids, inside = support(student.topk_ids, teacher_topk_ids, self.args.topk_support)
        # Models of one family may pad their embeddings differently; what one of them does not have is not compared.
        known = ids < self.vocabulary
        ids, inside = ids.masked_fill(~known, 0), inside & known
        old = student.states.log_probs_at(ids)
        target = teacher.log_probs_at(ids)
        if reference is not None:
            target = target + extrapolation(target, reference.log_probs_at(ids), self.args.reward_scale)
        target = old + self.bound_gap(target - old, ids)
        inside = inside & old.isfinite() & target.isfinite()
        found = {
            "support_ids": _place(ids, mask, 0),
            "support_mask": _place(inside, mask, False),
            "old_support_logps": _place(old.masked_fill(~inside, 0.0), mask, 0.0),
            "target_support_logps": _place(target.masked_fill(~inside, 0.0), mask, 0.0),
        }
        assert self.objective is not None, "only an objective compares a support"
        return {name: tensor for name, tensor in found.items() if name in self.objective.inputs}

    def _beyond(self, teacher_logps: torch.Tensor, reference_logps: torch.Tensor) -> torch.Tensor:
        """What G-OPD adds for the sampled tokens `(B, T)`; nothing where one of the two has no score."""
        found = extrapolation(teacher_logps, reference_logps, self.args.reward_scale)
        return torch.where(found.isfinite(), found, 0.0)


def _take(batch: dict[str, Any], names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Entries that a batch need not hold any longer, as far as it has them."""
    return {name: batch.pop(name) for name in names if name in batch}


def _place(values: torch.Tensor, mask: torch.Tensor, missing: float) -> torch.Tensor:
    """Put `values` `(P, ...)` where `mask` `(B, T)` is set: `(B, T, ...)`."""
    placed = torch.full((*mask.shape, *values.shape[1:]), missing, dtype=values.dtype, device=values.device)
    placed[mask] = values
    return placed
