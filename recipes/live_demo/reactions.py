"""How the demo's judge reads what its user says: thanks are praise, all else is a complaint with a wish in it."""

import re

from trl_openclaw import PERSONAS, Turn

_PRAISE = re.compile(r"\s*(?:perfect|great|thank|nice|yes)\b", re.IGNORECASE)
_WISHES = tuple(wish for persona in PERSONAS.values() for wish in persona.wishes)


def read_reaction(turn: Turn) -> int | tuple[int, str]:
    """The score of a reply by the first word of what the user said next, and for a complaint the wish in it as hint.

    The rest of a complaint is about this one reply ("that was three sentences"): a teacher who read it, too, would
    answer it, with an apology. It knows the handful of ways in which the demo's personas say thanks and what they want,
    and costs nothing; for people use a model as judge (`trl-openclaw serve --judge llm`), which is asked for the same.
    """
    assert turn.next_state is not None, "a turn is judged when its next state is known"
    said = turn.next_state.text
    return 1 if _PRAISE.match(said) else (-1, next((wish for wish in _WISHES if wish in said), said))
