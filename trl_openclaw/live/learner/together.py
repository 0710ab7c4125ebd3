"""What one process does for all of them: the main process alone talks to the store."""

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ...errors import LearnerError

Value = TypeVar("Value")


def on_main(accelerator: Accelerator, do: Callable[[], Value]) -> Value:
    """What `do` gives on the main process, on all of them. A collective.

    Raises:
        LearnerError: On the other processes, with the text of what `do` raised on the main one.
    """
    if accelerator.num_processes == 1:
        return do()
    answer: list[Any] = [None]
    problem: BaseException | None = None
    if accelerator.is_main_process:
        try:
            answer = [("done", do())]
        except BaseException as error:
            problem = error
            answer = [("failed", f"{type(error).__name__}: {error}")]
    broadcast_object_list(answer)
    if problem is not None:
        raise problem
    how, value = answer[0]
    if how == "failed":
        raise LearnerError(value)
    return value
