"""Notices when an engine leaves out what training needs, which no client would miss."""

MANY = 3
"""So many replies in a row are no accident."""


class IdsWatch:
    """Counts replies in a row whose ids or log-probs cannot be used."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._last: str | None = None

    def note(self, problem: str | None) -> None:
        """A whole reply, with `Reply.problem`."""
        self._in_a_row = 0 if problem is None else self._in_a_row + 1
        self._last = problem

    @property
    def problem(self) -> str | None:
        """What is wrong and what to do, or `None`."""
        if self._in_a_row < MANY:
            return None
        return (
            f"the last {self._in_a_row} cannot be trained on ({self._last}). The engine must send the ids of prompt "
            "and reply, and a log-prob for each token: update vLLM to a release that knows `return_token_ids`, and let "
            "`--engine-url` be the server itself, not one in between that leaves them out."
        )
