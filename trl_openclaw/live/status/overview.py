"""The part of the page that it asks for every two seconds, and what keeps that cheap."""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..store import Store
from ..store_pages import Changes
from .views import queue_view, share_view, version_views

Problems = Callable[[str], Sequence[str]]

REST = 10
"""A count that took `t` seconds is repeated `REST * t` later at the earliest."""


class Overviews:
    """The overview of each user, counted anew when the store has changed, and never for most of the time.

    A store with many turns takes a while to count. Someone who looks at the page while others talk must not keep the
    machine busy with it.

    Args:
        store: The store.
        model: The model's name.
        problems: What is wrong now, for a user.
        turns_per_step: Turns in one update of the learner.
        max_version_lag: How old they may be, in versions.
    """

    def __init__(self, store: Store, model: str, problems: Problems, turns_per_step: int, max_version_lag: int):
        self._store, self._model, self._problems = store, model, problems
        self._wanted, self._lag = turns_per_step, max_version_lag
        self._changes = Changes(store)
        self._this_process = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._counted: dict[str, tuple[str, float, dict[str, Any]]] = {}

    def of(self, user: str) -> tuple[str, dict[str, Any]]:
        """The overview and its entity tag, which is another one when anything has changed."""
        problems = list(self._problems(user))
        tag = f"{self._this_process}-{self._changes.number()}"
        with self._lock:
            found = self._counted.get(user)
        if found is None or (found[0] != tag and time.monotonic() > found[1]):
            start = time.monotonic()
            data = self._count(user)
            now = time.monotonic()
            found = (tag, now + REST * (now - start), data)
            with self._lock:
                self._counted[user] = found
        tag, _, data = found
        return f'"{tag}-{hash(tuple(problems)) & 0xFFFFFFFF:x}"', {**data, "problems": problems}

    def forget(self, user: str) -> None:
        """Count anew when asked next, because this user has changed something and wants to see it."""
        with self._lock:
            self._counted.pop(user, None)

    def _count(self, user: str) -> dict[str, Any]:
        store = self._store
        counts = store.counts(user)
        published = store.published_version(user)
        satisfaction = store.satisfaction(user)
        return {
            "user": user,
            "model": self._model,
            "published": published,
            "opted_out": store.opted_out(user),
            "turns": counts,
            "queue": queue_view(store.ready_count(user, self._lag), counts.get("claimed", 0), self._wanted),
            "versions": version_views(store.versions(user), published),
            "satisfaction": {per: [share_view(share) for share in shares] for per, shares in satisfaction.items()},
        }
