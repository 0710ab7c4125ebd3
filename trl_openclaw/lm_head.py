"""A model's LM head as tensors: log-probs of chosen tokens, never the logits of all positions at once."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ._trl import ChunkedDivergenceFunction, gathered

_ELEMENTS = 2**24
"""Numbers in one temporary tensor: 64 MiB in float32."""


@dataclass(frozen=True)
class LMHead:
    """Turns hidden states `h` into logits `softcap(scale * (W h + b)) / temperature`, for all tokens or for a few.

    Args:
        weight (`(V, H)`): Of the output embedding.
        bias (`(V,)`, *optional*): Of the output embedding.
        temperature: What logits are divided by.
        scale: What logits are multiplied with, in the families that do.
        softcap: Bound of the logits, in the families that have one.
        dtype: Precision of the projection; sums are float32 or wider.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, model: nn.Module, hidden: torch.Tensor, temperature: float, *, in_float32: bool = False) -> "LMHead":
        """The head of `model` as it is now, at the precision in which it would project `hidden`.

        Args:
            model: A causal language model, not wrapped.
            hidden: Hidden states that will be projected.
            temperature: What logits are divided by.
            in_float32: Whether the head runs in float32 whatever the rest does (`cast_lm_head_to_fp32`).
        """
        head = model.get_output_embeddings()
        weight, bias = _full(head.weight), _full(getattr(head, "bias", None))
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        scale, softcap = _logit_transform(model.config.get_text_config())
        return cls(weight, bias, temperature, scale, softcap, torch.float32 if in_float32 else dtype)

    def kept(self, model: nn.Module) -> "LMHead":
        """The head to use after the forward of `model` in which it was taken: FSDP2 frees the weights it had there."""
        if not any(isinstance(module, FSDPModule) for module in model.modules()):
            return self
        bias = None if self.bias is None else self.bias.detach().clone()
        return replace(self, weight=self.weight.detach().clone(), bias=bias)

    def logits_at(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Logits of a few tokens each, with gradients to `hidden`, weight and bias.

        Args:
            hidden (`(N, H)`): Hidden states.
            ids (`(N, k)`): Tokens, each position its own.

        Returns:
            Logits `(N, k)`.
        """
        raw = _ProjectionAt.apply(hidden, self.weight, self.bias, ids, self.dtype)
        return self._transform(raw)

    @torch.no_grad()
    def topk(self, hidden: torch.Tensor, k: int) -> torch.Tensor:
        """The k most likely tokens `(N, k)` of each position, best first.

        Args:
            hidden (`(N, H)`): Hidden states.
            k: At most the size of the vocabulary.
        """
        found = torch.empty((len(hidden), k), dtype=torch.long, device=hidden.device)
        with gathered(self.weight, self.bias), torch.autocast(hidden.device.type, enabled=False):
            for part in _parts(len(hidden), self.weight.size(0)):
                logits = hidden[part].to(self.dtype) @ self.weight.to(self.dtype).T
                logits = logits if self.bias is None else logits + self.bias.to(self.dtype)
                found[part] = logits.topk(k).indices  # scale, soft cap and temperature keep the order
        return found

    def _transform(self, raw: torch.Tensor) -> torch.Tensor:
        logits = raw * self.scale if self.scale != 1.0 else raw
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature if self.temperature != 1.0 else logits


@dataclass(frozen=True)
class TokenStates:
    """What a forward pass knows of some positions: enough for the log-prob of any token there.

    Args:
        hidden (`(..., H)`): Last hidden states.
        token_ids (`(...)`): The token that came next at each position.
        per_token_logps (`(...)`): Its log-prob in nats.
        head: The head that made `per_token_logps` of `hidden`.
    """

    hidden: torch.Tensor
    token_ids: torch.Tensor
    per_token_logps: torch.Tensor
    head: LMHead

    def __getitem__(self, index: Any) -> "TokenStates":
        """The states of some positions."""
        return TokenStates(self.hidden[index], self.token_ids[index], self.per_token_logps[index], self.head)

    def log_probs_at(self, ids: torch.Tensor) -> torch.Tensor:
        """Log-probs in nats, over the whole vocabulary, of any tokens.

        `log p(v) = z_v - z_a + log p(a)` for the token `a` whose log-prob is known: the normaliser over the vocabulary
        is not computed again, and neither is its gradient.

        Args:
            ids (`(..., k)`): Tokens, each position its own.

        Returns:
            Log-probs `(..., k)`.
        """
        both = torch.cat([ids, self.token_ids.unsqueeze(-1)], dim=-1)
        logits = self.head.logits_at(self.hidden.flatten(0, -2), both.flatten(0, -2)).view(both.shape)
        return logits[..., :-1] - logits[..., -1:] + self.per_token_logps.unsqueeze(-1)


def full_divergence(
    student: TokenStates, teacher_hidden: torch.Tensor, teacher_head: LMHead, beta: float
) -> torch.Tensor:
    """Divergence over the whole vocabulary `(N,)`, in nats, by TRL's kernel; gradients flow to the student only.

    The kernel works on tiles of positions and vocabulary, so neither model's logits exist in full.

    Args:
        student: The student's states of N positions.
        teacher_hidden (`(N, H_t)`): The teacher's last hidden states there.
        teacher_head: The teacher's head.
        beta: 0 for `KL(teacher || student)`, 1 for `KL(student || teacher)`, between them the generalised
            Jensen-Shannon divergence with the mixture `(1 - beta) student + beta teacher`.

    Raises:
        ValueError: If the two heads do not sample at one temperature.
    """
    head = student.head
    if head.temperature != teacher_head.temperature:
        raise ValueError(
            f"Student and teacher must be compared at one temperature, got {head.temperature} and "
            f"{teacher_head.temperature}."
        )
    # The kernel computes at the precision of its inputs, or of autocast where that is on.
    with torch.autocast(student.hidden.device.type, enabled=False):
        divergence, _entropy = ChunkedDivergenceFunction.apply(
            student.hidden.to(head.dtype),
            head.weight,
            head.bias,
            teacher_hidden.to(teacher_head.dtype),
            teacher_head.weight,
            teacher_head.bias,
            beta,
            head.temperature,
            head.scale,
            head.softcap,
            teacher_head.scale,
            teacher_head.softcap,
        )
    return divergence


class _ProjectionAt(torch.autograd.Function):
    """`hidden[n] . weight[ids[n, j]] + bias[ids[n, j]]`, a bounded number of rows at a time in both directions.

    Sums are wide, and the result is rounded to the head's precision once, as TRL's fused head does: the log-prob of a
    token comes out as TRL would give it. Autocast, which would narrow the sums again, is off.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, ids, dtype):
        ctx.save_for_backward(hidden, weight, bias, ids)
        ctx.dtype = dtype
        wide = torch.promote_types(dtype, torch.float32)
        out = torch.empty(ids.shape, dtype=wide, device=hidden.device)
        with gathered(weight, bias), torch.autocast(hidden.device.type, enabled=False):
            for part in _parts(len(ids), ids.size(1) * hidden.size(1)):
                rows = weight[ids[part]].to(dtype).to(wide)
                raw = (rows @ hidden[part].to(dtype).to(wide).unsqueeze(-1)).squeeze(-1).to(dtype)
                out[part] = raw if bias is None else raw + bias[ids[part]].to(dtype)
        return out

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, bias, ids = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty(hidden.shape, dtype=grad.dtype, device=grad.device) if needs_hidden else None
        grad_weight = grad_bias = None
        with gathered(weight, bias), torch.autocast(hidden.device.type, enabled=False):
            if needs_weight:
                grad_weight = torch.zeros(weight.shape, dtype=grad.dtype, device=grad.device)
            if needs_bias:
                grad_bias = torch.zeros(bias.shape, dtype=grad.dtype, device=grad.device)
                grad_bias.index_add_(0, ids.flatten(), grad.flatten())
            for part in _parts(len(ids), ids.size(1) * hidden.size(1)):
                g = grad[part]
                if grad_hidden is not None:
                    rows = weight[ids[part]].to(ctx.dtype).to(g.dtype)
                    grad_hidden[part] = (g.unsqueeze(1) @ rows).squeeze(1)
                if grad_weight is not None:
                    outer = g.unsqueeze(-1) * hidden[part].to(ctx.dtype).to(g.dtype).unsqueeze(1)
                    grad_weight.index_add_(0, ids[part].flatten(), outer.flatten(0, 1))
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _parts(rows: int, width: int) -> Iterator[slice]:
    """Slices of `rows` that keep `rows x width` numbers bounded."""
    step = max(1, _ELEMENTS // max(width, 1))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _full(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _logit_transform(config) -> tuple[float, float | None]:
    """Scale and soft cap of the logits, under the names that the model families give them."""
    scale = next(
        (
            value
            for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")
            if (value := getattr(config, name, None)) is not None
        ),
        None,
    )
    if scale is None and getattr(config, "logits_scaling", None) is not None:
        scale = config.logits_scaling if config.model_type == "hyperclovax" else 1 / config.logits_scaling
    return (1.0 if scale is None else scale), getattr(config, "final_logit_softcapping", None)
