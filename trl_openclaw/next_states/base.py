"""What a next-state provider is."""

from collections.abc import Mapping
from typing import Any, Protocol

from ..types import NextState, Turn


class NextStateProvider(Protocol):
    """Anything that says what followed a reply.

    It is asked while other replies are still being sampled, unless it has an attribute `runs_in_process = True`, as for
    a [`~trl_openclaw.judges.Judge`].
    """

    async def __call__(self, turn: Turn, row: Mapping[str, Any]) -> NextState | None:
        """Give the next state of `turn`.

        Args:
            turn: The sampled reply with its prompt.
            row: The turn's row of the dataset, columns by name.

        Returns:
            What followed, or `None` when nothing did. May raise; the turn is then counted as failed, others go on.
        """
        ...


def as_next_state(value: Any, source: str) -> NextState | None:
    """Turn a text, a `NextState` or `None` into a next state.

    Args:
        value: What a provider gave.
        source: Where it came from, for the error.

    Raises:
        TypeError: When it is anything else.
    """
    if value is None or isinstance(value, NextState):
        return value
    if isinstance(value, str):
        return NextState(value)
    raise TypeError(f"{source} must give a str, a NextState or None, got {type(value).__name__}.")
