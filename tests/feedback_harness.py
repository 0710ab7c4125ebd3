"""Turns, and a judge and a next state that always answer, for the tests of feedback."""

from trl_openclaw.types import NextState, Turn, Verdict, Vote

GOOD = Verdict.from_votes([Vote(1)])


def turns(n):
    """`n` turns, whose replies are their numbers."""
    return [Turn("p", str(i)) for i in range(n)]


async def good_judge(turn):
    """Is pleased with everything."""
    return GOOD


async def echo(turn, row):
    """A next state that tells which reply it follows."""
    return NextState(f"re {turn.completion}")
