"""What a judge is."""

from typing import Protocol

from ..types import Turn, Verdict


class Judge(Protocol):
    """Anything that turns what followed a reply into a verdict on the reply."""

    async def __call__(self, turn: Turn) -> Verdict:
        """Judge `turn`, whose next state is known."""
        ...
