"""How the demo's judge reads what its user says: thanks are praise, and anything else is a complaint and the hint."""

import re

from trl_openclaw import Turn

_PRAISE = re.compile(r"\s*(?:perfect|great|thank|nice|yes)\b", re.IGNORECASE)


def read_reaction(turn: Turn) -> int | tuple[int, str]:
    """The score of a reply by the first word of what the user said next, and for a complaint the user's words as hint.

    It knows the handful of ways in which the demo's personas say thanks, and costs nothing; for people use a model as
    judge (`trl-openclaw serve --judge llm`).
    """
    assert turn.next_state is not None, "a turn is judged when its next state is known"
    said = turn.next_state.text
    return 1 if _PRAISE.match(said) else (-1, said)
