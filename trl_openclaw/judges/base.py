"""What a judge is."""

from typing import Protocol

from ..types import Turn, Verdict


class Judge(Protocol):
    """Anything that turns what followed a reply into a verdict on the reply.

    Turns are judged while others are still being sampled, in the order in which they end. A judge that runs a model in
    this process, the policy say, or that draws from torch's random state, says so by an attribute
    `runs_in_process = True`; it is asked when sampling is over.
    """

    async def __call__(self, turn: Turn) -> Verdict:
        """Judge `turn`, whose next state is known."""
        ...
