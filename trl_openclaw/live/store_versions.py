"""Adapter versions in the store, and which of them answers requests."""

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import StoreError, UnknownTurnError
from .database import Database, from_json, to_json
from .records import BASE_VERSION, VersionEvent, VersionEventName, VersionInfo


class Versions(Database):
    """The part of the store that learners publish in and the gateway reads.

    The version that answers requests is the one that was published last, of those that were not rolled back and not
    found impossible to load since.
    """

    def published_version(self, user: str) -> str:
        """The version that answers this user's requests, `"base"` while there is none."""
        with self._read() as connection:
            return _published(connection, user)

    def next_version(self, user: str) -> str:
        """A name for this user's next version, such as `"v000008"`."""
        with self._read() as connection:
            names = connection.execute("SELECT version FROM versions WHERE user = ?", (user,)).fetchall()
        numbers = [int(name["version"][1:]) for name in names if name["version"][1:].isdecimal()]
        return f"v{max(numbers, default=0) + 1:06d}"

    def add_version(self, user: str, version: str, parent: str, path: str) -> None:
        """Add a version that was written to `path`. Adding it again changes nothing.

        Raises:
            StoreError: When there is one of this name that lies elsewhere.
        """
        with self._write() as connection:
            row = connection.execute(
                "SELECT parent, path FROM versions WHERE user = ? AND version = ?", (user, version)
            ).fetchone()
            if row is not None and tuple(row) != (parent, path):
                raise StoreError(f"User {user!r} has another version {version!r}, at {row['path']}.")
            if row is None:
                connection.execute(
                    "INSERT INTO versions (user, version, parent, path, created) VALUES (?, ?, ?, ?, ?)",
                    (user, version, parent, path, self.clock()),
                )

    def add_version_event(
        self, user: str, version: str, event: VersionEventName, detail: Mapping[str, Any] | None = None
    ) -> None:
        """Say that something happened to a version. Publishing and rolling back have methods of their own.

        A version that cannot be loaded (`"load_failed"`) is published no longer.

        Raises:
            UnknownTurnError: When there is no such version.
        """
        with self._write() as connection:
            self._add_event(connection, user, version, event, detail)

    def publish(
        self, user: str, version: str, detail: Mapping[str, Any] | None = None, *, if_published: str | None = None
    ) -> bool:
        """Let a version answer this user's requests from now on.

        Args:
            user: Whose version.
            version: The version.
            detail: What to keep with the event.
            if_published: Do so only if this one is what answers now.

        Returns:
            Whether it was done: not if it answers already.

        Raises:
            UnknownTurnError: When there is no such version.
        """
        with self._write() as connection:
            present = _published(connection, user)
            if version == present or if_published not in (None, present):
                return False
            self._add_event(connection, user, version, "published", detail)
            return True

    def roll_back(self, user: str, to: str | None = None) -> str:
        """Let an earlier version answer this user's requests, because the present one is bad.

        Args:
            user: Whose version.
            to: The version to go back to, by default the nearest that the present one was trained from, that answered,
                and whose adapter is still there.

        Returns:
            The version that answers now.

        Raises:
            UnknownTurnError: When there is no such version.
            StoreError: When there is nothing to go back from or to, or the adapter was removed.
        """
        with self._write() as connection:
            present = _published(connection, user)
            if present == BASE_VERSION:
                raise StoreError(f"User {user!r} has no published version, so there is nothing to roll back.")
            target = _ancestor(connection, user, present) if to is None else to
            if target == present:
                raise StoreError(f"Version {present!r} of user {user!r} answers already.")
            _check_version(connection, user, target)
            _check_folder(connection, user, target)
            self._add_event(connection, user, present, "rolled_back", {"to": target})
            self._add_event(connection, user, target, "published", {"rolled_back_from": present})
            return target

    def versions(self, user: str) -> list[VersionInfo]:
        """This user's versions, oldest first. The base model is none of them."""
        with self._read() as connection:
            published = _published(connection, user)
            rows = connection.execute("SELECT * FROM versions WHERE user = ? ORDER BY number", (user,)).fetchall()
            events: dict[str, list[VersionEvent]] = {row["version"]: [] for row in rows}
            for row in connection.execute("SELECT * FROM version_events WHERE user = ? ORDER BY number", (user,)):
                event = VersionEvent(row["event"], from_json(row["detail"]), row["created"])
                events.setdefault(row["version"], []).append(event)
        return [
            VersionInfo(
                user,
                row["version"],
                row["parent"],
                row["path"],
                row["created"],
                row["version"] == published,
                tuple(events[row["version"]]),
            )
            for row in rows
        ]

    def _add_event(
        self,
        connection: sqlite3.Connection,
        user: str,
        version: str,
        event: VersionEventName,
        detail: Mapping[str, Any] | None,
    ) -> None:
        _check_version(connection, user, version)
        connection.execute(
            "INSERT INTO version_events (user, version, event, detail, created) VALUES (?, ?, ?, ?, ?)",
            (user, version, event, to_json(dict(detail or {})), self.clock()),
        )


def _published(connection: sqlite3.Connection, user: str) -> str:
    row = connection.execute(
        "SELECT version FROM publications WHERE user = ? ORDER BY number DESC LIMIT 1", (user,)
    ).fetchone()
    return BASE_VERSION if row is None else row["version"]


def _check_version(connection: sqlite3.Connection, user: str, version: str) -> None:
    found = connection.execute("SELECT 1 FROM versions WHERE user = ? AND version = ?", (user, version)).fetchone()
    if found is None and version != BASE_VERSION:
        raise UnknownTurnError(f"User {user!r} has no version {version!r}.")


def _check_folder(connection: sqlite3.Connection, user: str, version: str) -> None:
    row = connection.execute("SELECT path FROM versions WHERE user = ? AND version = ?", (user, version)).fetchone()
    if row is not None and not Path(row["path"]).is_dir():
        raise StoreError(f"The adapter of version {version!r} was removed: {row['path']} is not there.")


def _ancestor(connection: sqlite3.Connection, user: str, version: str) -> str:
    """The nearest version that this one was trained from, that answered and is there, else the base model."""
    while version != BASE_VERSION:
        row = connection.execute(
            "SELECT p.version, p.path, (SELECT e.event FROM version_events e "
            "WHERE e.user = p.user AND e.version = p.version AND e.event IN ('published', 'load_failed') "
            "ORDER BY e.number DESC LIMIT 1) AS last "
            "FROM versions v JOIN versions p ON p.user = v.user AND p.version = v.parent "
            "WHERE v.user = ? AND v.version = ?",
            (user, version),
        ).fetchone()
        version = BASE_VERSION if row is None else row["version"]
        if row is not None and row["last"] == "published" and Path(row["path"]).is_dir():
            break
    return version
