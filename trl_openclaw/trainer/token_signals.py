"""What reward and teacher say of each token of a micro-batch, as advantages and as losses of its own."""

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._trl import SeamGRPOTrainer
from ..format_tokens import cap_format_tokens, format_token_ids
from ..lm_head import TokenStates
from ..losses import combine_advantages, gap_statistics, opd_advantages, token_gap
from ..objectives import Objective, Positions
from .comparison import Comparison
from .records import record_gap, record_token_losses
from .turns import at_tokens

if TYPE_CHECKING:
    from .teaching import Teaching


class TokenSignals(SeamGRPOTrainer if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixin for a trainer whose loss gets an advantage for each token, or a loss of its own from an objective."""

    rl_weight: float
    opd_weight: float
    objective: Objective | None = None
    _teaching: "Teaching | None"

    def token_advantages(self, inputs: dict[str, Any], old_per_token_logps: torch.Tensor) -> torch.Tensor:
        if self._teaching is not None:
            self._teaching.record_choice()
            self._record_gap(inputs, old_per_token_logps)
        if self.objective is None:
            return self.sampled_token_advantages(inputs, old_per_token_logps)
        record_token_losses(self, inputs["objective_losses"])
        return self.rl_weight * at_tokens(inputs["step_advantages"], inputs["turn_index"], 0.0)

    def sampled_token_advantages(self, inputs: dict[str, Any], old_per_token_logps: torch.Tensor) -> torch.Tensor:
        """What rewards and teacher say of the tokens that were sampled, `(B, T)`, whichever objective is trained.

        Args:
            inputs: The micro-batch.
            old_per_token_logps: Of the policy that sampled, `(B, T)`.
        """
        rewards = at_tokens(inputs["step_advantages"], inputs["turn_index"], 0.0)
        if self._teaching is None:
            return self.rl_weight * rewards
        teacher, mask, clip = inputs["teacher_per_token_logps"], self._taught(inputs), self.args.logp_gap_clip
        if self.args.control == "negative_advantage":
            advantages = -clip * mask.to(teacher.dtype)
        else:
            advantages = opd_advantages(teacher, old_per_token_logps, mask, clip, inputs.get("extrapolation"))
            advantages = self._bound_gap_at_format_tokens(advantages, inputs["completion_ids"])
        return combine_advantages(rewards, advantages, self.rl_weight, self.opd_weight)

    def _record_gap(self, inputs: dict[str, Any], old_per_token_logps: torch.Tensor) -> None:
        teacher, mask = inputs["teacher_per_token_logps"], self._taught(inputs)
        bounded = teacher + inputs["extrapolation"] if "extrapolation" in inputs else teacher
        gap, bounded = (token_gap(scored, old_per_token_logps, mask) for scored in (teacher, bounded))
        clip = self.args.logp_gap_clip if self.objective is None else None  # of the sampled tokens
        record_gap(self, gap_statistics(gap, bounded, mask, clip))

    def token_losses(
        self, inputs: dict[str, Any], per_token_logps: torch.Tensor, hidden: torch.Tensor, model: nn.Module
    ) -> torch.Tensor | None:
        assert self._teaching is not None, "without a teacher nothing is added"
        is_due = Comparison.is_due(inputs)
        if self.objective is None and not is_due:
            return None
        head = self._teaching.head_of(model, hidden)
        states = TokenStates(hidden, inputs["completion_ids"], per_token_logps, head)
        if is_due:
            self._teaching.compare_in_loss(inputs, states)
        if self.objective is None:
            return None
        taught = self._taught(inputs)
        data = {name: inputs[name][taught] for name in self.objective.inputs}
        losses = self.objective.token_losses(Positions(states[taught], data, self._teaching.heads.teacher))
        inputs["objective_losses"] = losses.detach()
        placed = torch.zeros(taught.shape, dtype=losses.dtype, device=losses.device)
        return placed.masked_scatter(taught, self.opd_weight * losses)

    def _bound_gap_at_format_tokens(self, gap: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Gaps of the tokens `ids` with the tighter bound where a token is only markup."""
        cap = self.args.format_gap_clip
        return gap if cap is None else cap_format_tokens(gap, ids, self._format_tokens, cap)

    @cached_property
    def _format_tokens(self) -> torch.Tensor:
        return format_token_ids(self.tokenizer).to(self.accelerator.device)

    def _taught(self, inputs: dict[str, Any]) -> torch.Tensor:
        """The tokens `(B, T)` that have a teacher and belong to the policy."""
        return (inputs["completion_mask"] * inputs["tool_mask"]).bool() & inputs["teacher_mask"]
