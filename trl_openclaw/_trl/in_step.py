"""How processes sample in step, whatever rows each of them has left."""

from typing import Any

from accelerate.utils import gather_object


def rows_in_step(trainer: Any, rows: int) -> int | None:
    """How many rows a process with `rows` of its own has to sample; `None` when none has any. A collective.

    Processes that share a model, or an engine, have to sample equally often, so one without rows samples one for
    nothing. An engine that they share deals out what it sampled by each one's number of rows, so that all must have as
    many.
    """
    counts = gather_object([rows])
    if not any(counts):
        return None
    return max(counts) if shares_engine(trainer) else max(rows, 1)


def shares_engine(trainer: Any) -> bool:
    """Whether vLLM samples for several processes at once: on a server, or with its tensors split over them."""
    return trainer.use_vllm and (trainer.vllm_mode == "server" or trainer.args.vllm_tensor_parallel_size > 1)
