"""Scores of given tokens under given prompts: the one place where a local teacher's forward pass happens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ._trl import completion_positions_only, pad
from .lm_head import LMHead, TokenStates
from .prefix_plan import fill_batches, make_batches
from .shared_prefix import PrefixSharing, evaluating

TOKEN_BUDGET = 16_384
"""Tokens in one of a teacher's forward passes, unless its configuration says something else."""


@dataclass(frozen=True)
class TeacherRow:
    """What a teacher scores: the sampled ids, never re-encoded, after the ids of a (hinted) prompt.

    Args:
        prompt_ids: The ids of the prompt.
        completion_ids: The ids that were sampled.
        temperature: What this row's logits are divided by, beyond what all logits are.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    temperature: float = 1.0

    @property
    def length(self) -> int:
        """Tokens of both."""
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True)
class TeacherScores:
    """A teacher's answer for N rows.

    Args:
        per_token_logps (`(N, T)`): Log-probs in nats, float32; NaN where there is no token.
        mask (`(N, T)`): Which entries are real and finite. A log-prob that is not finite is missing, not a number.
        topk_ids (`(N, T, k)`, *optional*): The k most likely tokens, where they were asked for.
        states (`(N, T)`, *optional*): Where they were asked for: log-probs of any other tokens. Real where `mask` is.
    """

    per_token_logps: torch.Tensor
    mask: torch.Tensor
    topk_ids: torch.Tensor | None = None
    states: TokenStates | None = None

    def best_at(self, index: Any) -> torch.Tensor:
        """The k most likely tokens of some positions, of an answer that names them."""
        assert self.topk_ids is not None, "asked for with `topk`"
        return self.topk_ids[index]

    def states_at(self, index: Any) -> TokenStates:
        """What is known of some positions, in an answer that keeps it."""
        assert self.states is not None, "asked for with `keep_states`"
        return self.states[index]


class TokenScorer:
    """Scores rows in micro-batches, the same number of them on every rank.

    Args:
        accelerator: Device, autocast and collectives, the student's own.
        pad_token_id: Filler outside the masks; its value changes no number.
        token_budget: Tokens in one forward pass: rows times the longest of them. `None` for 16,384, or one row where
            that is longer.
        temperature: What the fused LM heads divide their logits by.
        head_in_float32: Whether they run in float32 whatever the rest does.
        sharing: Runs the beginnings that rows have in common once; `None` to run every row in full.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        pad_token_id: int,
        token_budget: int | None = None,
        temperature: float = 1.0,
        head_in_float32: bool = False,
        sharing: PrefixSharing | None = None,
    ):
        self.accelerator = accelerator
        self.pad_token_id = pad_token_id
        self.token_budget = token_budget
        self.temperature = temperature
        self.head_in_float32 = head_in_float32
        self.sharing = sharing

    @torch.no_grad()
    def score(
        self, model: nn.Module, rows: Sequence[TeacherRow], *, topk: int = 0, keep_states: bool = False
    ) -> TeacherScores:
        """Score `rows` with `model`, whose LM head TRL has fused. A collective: every rank must call it.

        A rank with fewer rows than another runs the missing forwards on a filler row, since a sharded model answers
        only when all ranks ask. So does a batch without rows of which more than log-probs is asked.

        Args:
            topk: How many of the most likely tokens to name at each position; 0 for none.
            keep_states: Whether to keep the last hidden states, for log-probs of tokens that are chosen later.

        Raises:
            ValueError: On every rank, when a row of one of them is longer than the token budget.
        """
        width = max((len(row.completion_ids) for row in rows), default=0)
        answer = _Answer(len(rows), width, self.accelerator.device)
        batches = self._batches(model, rows, at_least=int(bool(topk or keep_states)))
        filler = [TeacherRow([self.pad_token_id], [self.pad_token_id])]
        with evaluating(model):
            for chosen in batches:
                lengths = [len(rows[i].completion_ids) for i in chosen]
                scored = self._score_batch(model, [rows[i] for i in chosen] or filler, topk, keep_states)
                answer.add(chosen, lengths, scored)
        return answer.scores()

    def _batches(self, model: nn.Module, rows: Sequence[TeacherRow], at_least: int) -> list[list[int]]:
        """Which rows go together, and empty batches where another rank has more."""
        lengths = [row.length for row in rows]
        longest = max(lengths, default=0)
        budget = self.token_budget or max(TOKEN_BUDGET, longest)
        if self.sharing is not None and self.sharing.works_for(model):
            tokens = [[*row.prompt_ids, *row.completion_ids] for row in rows]
            batches = make_batches(tokens, self.sharing.pass_cost, budget)
        else:
            batches = fill_batches(lengths, budget)
        local = torch.tensor([len(batches), longest], device=self.accelerator.device)
        most, longest = self.accelerator.gather(local).view(-1, 2).amax(0).tolist()
        if self.token_budget is not None and longest > self.token_budget:
            raise ValueError(
                f"`teacher_token_budget={self.token_budget}` is smaller than one row: a hinted prompt and its "
                f"completion have {longest} tokens. Raise it, or leave it out."
            )
        return batches + [[] for _ in range(max(most, at_least) - len(batches))]

    def _score_batch(
        self, model: nn.Module, rows: Sequence[TeacherRow], topk: int, keep_states: bool
    ) -> dict[str, Any]:
        prompts = [torch.tensor(row.prompt_ids, dtype=torch.long) for row in rows]
        completions = [torch.tensor(row.completion_ids, dtype=torch.long) for row in rows]
        device = self.accelerator.device
        prompt_mask = pad([torch.ones_like(ids) for ids in prompts], 0, padding_side="left")
        completion_mask = pad([torch.ones_like(ids) for ids in completions], 0, padding_side="right")
        input_ids = torch.cat(
            [
                pad(prompts, self.pad_token_id, padding_side="left"),
                pad(completions, self.pad_token_id, padding_side="right"),
            ],
            dim=1,
        ).to(device)
        attention_mask = torch.cat([prompt_mask, completion_mask], dim=1).to(device)
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        labels[:, : prompt_mask.size(1)] = -100
        kwargs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        keep = completion_mask.size(1)
        scored: dict[str, Any] = {}

        def read(_outputs: Any, hidden: torch.Tensor, bare: nn.Module) -> None:
            head = LMHead.of(bare, hidden, self.temperature, in_float32=self.head_in_float32)
            if topk:
                scored["topk_ids"] = head.topk(hidden.flatten(0, 1), topk).view(*hidden.shape[:2], topk)
            if keep_states:
                scored.update(hidden=hidden, token_ids=input_ids[:, -keep:], head=head.kept(bare))

        unwrapped = self.accelerator.unwrap_model(model)
        reader = read if topk or keep_states else None
        temperatures = None
        if any(row.temperature != 1 for row in rows):
            temperatures = torch.tensor([row.temperature for row in rows], device=device)
        with (
            self.accelerator.autocast(),
            completion_positions_only(unwrapped, kwargs, keep, reader, self.sharing, temperatures),
        ):
            outputs = model(**kwargs, fused_lm_head=True)
        return scored | {"per_token_logps": outputs.log_probs[:, -keep:].float()}


@dataclass
class _Answer:
    """Collects the micro-batches' results `(n, t, ...)` into tensors `(N, T, ...)`."""

    rows: int
    width: int
    device: torch.device
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    head: LMHead | None = None

    def add(self, chosen: Sequence[int], lengths: Sequence[int], scored: dict[str, Any]) -> None:
        """Put the results of the rows `chosen` in their places, as far as their completions reach."""
        self.head = scored.pop("head", None)
        found = torch.arange(max(lengths, default=0)) < torch.tensor(lengths).unsqueeze(1)
        row, token = (index.to(self.device) for index in found.nonzero(as_tuple=True))
        place = torch.tensor(chosen, dtype=torch.long, device=self.device)[row]
        for name, values in scored.items():
            if name not in self.tensors:
                shape = (self.rows, self.width, *values.shape[2:])
                missing = float("nan") if name == "per_token_logps" else 0
                self.tensors[name] = torch.full(shape, missing, dtype=values.dtype, device=self.device)
            self.tensors[name][place, token] = values[row, token]

    def scores(self) -> TeacherScores:
        """What was collected."""
        found = self.tensors
        logps = found.get("per_token_logps", torch.full((self.rows, self.width), float("nan"), device=self.device))
        states = None
        if self.head is not None:
            states = TokenStates(found["hidden"], found["token_ids"], logps, self.head)
        return TeacherScores(logps, logps.isfinite(), found.get("topk_ids"), states)
