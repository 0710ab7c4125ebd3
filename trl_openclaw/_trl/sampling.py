"""One more turn for conversations that a `rollout_func` leads, sampled by the trainer as TRL samples its own.

TRL calls a `rollout_func` instead of sampling. It may have the trainer sample as often as it likes, but where several
processes share a model, or a server, all of them must do so equally often.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ..types import Message
from .forward import replaced
from .in_step import rows_in_step
from .parsing import parse_turn


@dataclass(frozen=True)
class SampledTurn:
    """What the policy sampled in one turn.

    Args:
        ids: The sampled ids, as they are; the token that ends the turn is the last one, unless it was cut.
        logprobs: Their log-probs under the sampler, where it tells them.
        message: The same as a message.
        cut: Whether the turn stopped without an end token, so that nothing can follow it.
    """

    ids: list[int]
    logprobs: list[float | None] | None
    message: Message
    cut: bool


def sample_turns(trainer: Any, contexts: Sequence[list[int]], room: Sequence[int]) -> list[SampledTurn] | None:
    """Sample one turn after each context. A collective: every process calls it, with as many contexts as it has.

    Args:
        trainer: A `SeamGRPOTrainer` inside its `rollout_func`.
        contexts: The ids to go on from, which end with the generation prompt.
        room: For each, how many ids the turn may have, at least 1. What is sampled beyond is cut off.

    Returns:
        One turn per context, or `None` on every process when none had any.
    """
    wanted = rows_in_step(trainer, len(contexts))
    if wanted is None:
        return None
    fillers = [[trainer.eos_token_ids[0]]] * (wanted - len(contexts))
    # TRL reads the last id of a first turn, and an empty one is filled up; here an empty turn is one that was cut.
    with replaced(trainer, "empty_rows", []), _at_most(trainer, max(room, default=1)):
        ids, logprobs = trainer._generate_single_turn([*contexts, *fillers], None, {}, 1)
    ids = [list(row)[:most] for row, most in zip(ids, room, strict=False)]
    messages = _as_messages(trainer, contexts, ids)
    return [
        SampledTurn(
            ids=row,
            logprobs=None if logprobs is None else list(logprobs[i])[: len(row)],
            message=messages[i],
            cut=not row or row[-1] not in trainer.eos_token_ids,
        )
        for i, row in enumerate(ids)
    ]


def context_window(trainer: Any) -> float:
    """How many ids the policy, or the engine that samples for it, can take in; infinite where it names no limit."""
    if trainer.use_vllm and trainer.vllm_mode == "colocate":
        return trainer.vllm_generation.llm.llm_engine.model_config.max_model_len
    found = getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None)
    return float("inf") if found is None else found


def _at_most(trainer: Any, ids: int) -> AbstractContextManager[None]:
    """While this is open, transformers samples no more than `ids` ids for each row."""
    if trainer.use_vllm:  # which knows one limit for all calls
        return nullcontext()
    config = trainer.generation_config
    return replaced(config, "max_new_tokens", min(ids, config.max_new_tokens or ids))


def _as_messages(trainer: Any, contexts: Sequence[list[int]], ids: Sequence[list[int]]) -> list[Message]:
    """The turns as messages, read as TRL reads its completions."""
    tokenizer = trainer.tokenizer
    if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
        return [
            parse_turn(tokenizer, row, prefix=context) if row else {"role": "assistant", "content": ""}
            for row, context in zip(ids, contexts, strict=True)
        ]
    texts = trainer.processing_class.batch_decode(list(ids), skip_special_tokens=True) if ids else []
    return [{"role": "assistant", "content": text} for text in texts]
