"""Lends the engine that samples in this process to whoever asks the policy through it."""

from typing import Any

from .._trl import SeamGRPOTrainer
from ..engine_chat import EngineChat


def lend_engine(trainer: SeamGRPOTrainer, *parts: Any) -> None:
    """Give the trainer's engine to those of its judge and next states that chat with it.

    Raises:
        ValueError: If there is no engine in this process that answers whenever it is asked.
    """
    for part in parts:
        client = getattr(part, "client", None)
        if not isinstance(client, EngineChat):
            continue
        if trainer.own_engine is None:
            raise ValueError(
                f"`{type(part).__name__}` asks the engine that samples in this process. Set `use_vllm=True` and "
                "`vllm_mode='colocate'`, and leave `vllm_tensor_parallel_size` at 1 and `vllm_enable_sleep_mode` off: "
                "an engine of several processes answers when all of them ask, and one that sleeps has no weights. Or "
                "serve the model, and use `LLMJudge`."
            )
        client.engine = trainer.own_engine
