"""The part of the page that it asks for every two seconds, and what keeps that cheap."""

import json
import secrets
import threading
import time
from typing import Any

from ..store import Store
from ..store_pages import Changes
from .views import queue_view, share_view, turns_of_last_update, version_views

REST = 10
"""A count that took `t` seconds is repeated `REST * t` later at the earliest."""


class Overviews:
    """The overview of each user, counted anew when the store has changed, and never for most of the time.

    A store with many turns takes a while to count. Someone who looks at the page while others talk must not keep the
    machine busy with it.

    Args:
        store: The store.
        turns_per_step: Turns in one update of the learner, until the first one says how many it had.
        max_version_lag: How old they may be, in versions.
    """

    def __init__(self, store: Store, turns_per_step: int, max_version_lag: int):
        self._store, self._turns_per_step, self._max_version_lag = store, turns_per_step, max_version_lag
        self._changes = Changes(store)
        self._this_process = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._counted: dict[str, tuple[str, float, dict[str, Any]]] = {}

    def of(self, user: str, now: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The overview and its entity tag, which is another one when anything has changed.

        Args:
            user: Whose.
            now: More of it, which is known without the store.
        """
        tag = f"{self._this_process}-{self._changes.number()}"
        with self._lock:
            found = self._counted.get(user)
        if found is None or (found[0] != tag and time.monotonic() > found[1]):
            start = time.monotonic()
            data = self._count(user)
            end = time.monotonic()
            found = (tag, end + REST * (end - start), data)
            with self._lock:
                self._counted[user] = found
        tag, _, data = found
        return f'"{tag}-{hash(json.dumps(now)) & 0xFFFFFFFF:x}"', {**data, **now}

    def forget(self, user: str) -> None:
        """Count anew when asked next, because this user has changed something and wants to see it."""
        with self._lock:
            self._counted.pop(user, None)

    def _count(self, user: str) -> dict[str, Any]:
        store = self._store
        turns = store.counts(user)
        published, versions = store.published_version(user), store.versions(user)
        ready = store.ready_count(user, self._max_version_lag)
        wanted = turns_of_last_update(versions) or self._turns_per_step
        return {
            "user": user,
            "published": published,
            "opted_out": store.opted_out(user),
            "turns": turns,
            "queue": queue_view(ready, turns.get("claimed", 0), wanted),
            "versions": version_views(versions, published),
            "satisfaction": {
                per: [share_view(share) for share in shares] for per, shares in store.satisfaction(user).items()
            },
        }
