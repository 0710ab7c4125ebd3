"""A judge for next states that know themselves how it went: scripted personas, test runners, environments."""

from ..types import Turn, Verdict, Vote


class OutcomeJudge:
    """Takes the score from `NextState.satisfied`, and the next state's own words as the hint when it was not.

    Where the provider says which of its words state the wish (`info["wish"]`, as scripted personas do), those alone are
    the hint. No model is asked, so it is exact and free. A next state that does not know (`satisfied=None`) gets no
    score and no hint.
    """

    async def __call__(self, turn: Turn) -> Verdict:
        """Judge the turn by its next state, which must be there."""
        if turn.next_state is None:
            raise ValueError("`OutcomeJudge` needs a turn with a next state.")
        satisfied, text = turn.next_state.satisfied, turn.next_state.text.strip()
        if satisfied is None:
            return Verdict.from_votes([Vote()])
        wish = str(turn.next_state.info.get("wish") or text)
        hint = wish if wish and not satisfied else None
        return Verdict.from_votes([Vote(score=1 if satisfied else -1, hint=hint, raw=text)])
