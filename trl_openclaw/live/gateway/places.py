"""A bound on what is done at once, of which no user takes all."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from .api_errors import ApiError

_RESERVE = 8
"""Where there are several users, one of so many places is kept from each for the others."""


class Places:
    """Counts what is being done for each user.

    Args:
        most: How much may be done at once.
        users: How many users there are.
    """

    def __init__(self, most: int, users: int):
        self.most = most
        self.most_of_one = most if users < 2 else max(1, most - max(1, most // _RESERVE))
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """How much is being done."""
        return self._taken.total()

    def check(self, user: str) -> None:
        """See whether there is a place for a user.

        Raises:
            ApiError: 429 when there is none.
        """
        if self.taken >= self.most:
            said = "Too many requests are being answered."
        elif self._taken[user] >= self.most_of_one:
            said = f"{self.most_of_one} of your requests are being answered; the other places are for other users."
        else:
            return
        raise ApiError(429, f"{said} Try again in a moment.", code="too_many_requests")

    @contextmanager
    def taken_by(self, user: str) -> Iterator[None]:
        """Counts one for as long as the context lasts, whether or not there is a place."""
        self._taken[user] += 1
        try:
            yield
        finally:
            self._taken[user] -= 1
