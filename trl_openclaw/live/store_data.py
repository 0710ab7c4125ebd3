"""People's say over what the store holds: reading it, correcting hints, opting out, deleting."""

import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from ..errors import StoreError, UnknownTurnError
from ..types import valid_text
from . import exports
from .database import Database, hashed, to_json
from .records import Deletion, StoredTurn, TurnState
from .store_deletions import delete_turns, what_goes
from .store_turns import find_turn, load_turns

_CHUNK = 200  # turns in memory at once


class People(Database):
    """The part of the store that people use.

    Wherever a method takes a `user`, `None` stands for all of them, which only who runs the gateway may ask for.
    """

    def turns(
        self,
        user: str | None = None,
        session_id: str | None = None,
        state: TurnState | None = None,
        limit: int = 50,
        before: int | None = None,
    ) -> list[StoredTurn]:
        """Turns, the newest first.

        Args:
            user: Only those of this user.
            session_id: Only those of this session.
            state: Only those in this state.
            limit: How many at most.
            before: Only those with a lower number.
        """
        with self._read() as connection:
            numbers = _select(connection, user, session_id, None, state, "t.number < ?", before, f"DESC LIMIT {limit}")
            return load_turns(connection, numbers)[::-1]

    def all_turns(
        self, user: str | None = None, session_id: str | None = None, turn_id: str | None = None
    ) -> Iterator[StoredTurn]:
        """All turns with these, oldest first, few of them in memory at once. Not one transaction."""
        after = 0
        while True:
            with self._read() as connection:
                numbers = _select(connection, user, session_id, turn_id, None, "t.number > ?", after, f"LIMIT {_CHUNK}")
                found = load_turns(connection, numbers)
            yield from found
            if len(found) < _CHUNK:
                return
            after = found[-1].number

    def show(self, user: str | None, turn_id: str) -> StoredTurn:
        """One turn with all that is known of it.

        Raises:
            UnknownTurnError: When there is no such turn, or it is not this user's.
        """
        with self._read() as connection:
            return load_turns(connection, [find_turn(connection, turn_id, user)])[0]

    def export(
        self,
        user: str | None = None,
        *,
        session_id: str | None = None,
        turn_id: str | None = None,
        form: exports.ExportFormat = "jsonl",
    ) -> tuple[Path, int]:
        """Write turns into the folder `exports` beside the store, from where deleting them also removes the export.

        Args:
            user: Whose.
            session_id: Only those of this session.
            turn_id: Only this one.
            form: `"jsonl"` for all, one in a line, or `"dataset"` for a `datasets` folder to train on, without side
                traffic, users who opted out, and turns that are kept for checks.

        Returns:
            The file or folder, and how many turns are in it.

        Raises:
            UnknownTurnError: When there are none.
        """
        with exports.exclusively(self.path.parent):
            turns = self.all_turns(user, session_id, turn_id)
            path, count = exports.write(self.path.parent, turns, form, self._opted_out())
            if not count:
                shutil.rmtree(path.parent)
                raise UnknownTurnError("There are no such turns to export.")
            return path, count

    def complete(self, what: Literal["turn", "session"], start: str, user: str | None = None) -> str:
        """The id that begins like this, as people shorten them; what was given, where there is none.

        Raises:
            UnknownTurnError: When several do.
        """
        column = f"{what}_id"
        pattern = "".join(f"\\{char}" if char in "%_\\" else char for char in start) + "%"
        with self._read() as connection:
            rows = connection.execute(
                f"SELECT DISTINCT {column} FROM turns WHERE {column} LIKE ? ESCAPE '\\' AND user = coalesce(?, user) "
                f"ORDER BY {column} <> ? LIMIT 2",
                (pattern, user, start),
            ).fetchall()
        if len(rows) > 1 and rows[0][column] != start:
            raise UnknownTurnError(f"Several {what}s begin with {start!r}: give more of it.")
        return rows[0][column] if rows else start

    def users(self) -> list[str]:
        """Everyone who has turns."""
        with self._read() as connection:
            return [row["user"] for row in connection.execute("SELECT DISTINCT user FROM turns ORDER BY user")]

    def counts(self, user: str | None = None) -> dict[str, int]:
        """How many turns are in each state. States without turns are missing."""
        with self._read() as connection:
            of_user, whose = ("", ()) if user is None else ("WHERE user = ?", (user,))
            rows = connection.execute(f"SELECT state FROM turn_states {of_user}", whose)
            return dict(Counter(row["state"] for row in rows))  # SQLite would find each state twice to group by it

    def edit_hint(self, user: str | None, turn_id: str, hints: Sequence[str]) -> None:
        """Put hints in place of a turn's, or none. They count from now on, whatever a judge says later.

        Args:
            user: Whose turn.
            turn_id: The turn.
            hints: What the reply should have been like. Blank ones are left out.

        Raises:
            UnknownTurnError: When there is no such turn, or it is not this user's.
        """
        kept = [text for text in (valid_text(hint).strip() for hint in hints) if text]
        with self._write() as connection:
            number = find_turn(connection, turn_id, user)
            connection.execute(
                "INSERT INTO verdicts (turn, outcome, source, created, hints, votes) "
                "VALUES (?, 'unasked', 'edit', ?, ?, '[]')",
                (number, self.clock(), to_json(kept)),
            )

    def opt_out(self, user: str, on: bool = True) -> None:
        """Keep a user's turns from being judged and trained, or no longer. What was trained already stays so."""
        with self._write() as connection:
            connection.execute(
                "INSERT INTO opt_outs (user, opted_out, created) VALUES (?, ?, ?)", (user, on, self.clock())
            )

    def opted_out(self, user: str) -> bool:
        """Whether a user has opted out."""
        with self._read() as connection:
            row = connection.execute(
                "SELECT opted_out FROM opt_outs WHERE user = ? ORDER BY number DESC LIMIT 1", (user,)
            ).fetchone()
        return row is not None and bool(row["opted_out"])

    def _opted_out(self) -> set[str]:
        with self._read() as connection:
            rows = connection.execute(
                "SELECT user FROM opt_outs "
                "WHERE number IN (SELECT max(number) FROM opt_outs GROUP BY user) AND opted_out"
            )
            return {row["user"] for row in rows}

    def delete(
        self,
        user: str | None = None,
        *,
        session_id: str | None = None,
        turn_id: str | None = None,
        missing_ok: bool = False,
    ) -> Deletion:
        """Delete turns with all that hangs on them, and their text wherever it lies.

        With a turn go all turns whose history holds its reply, also one that was cut or edited since, or a long one
        that stands there word for word after another message than it answered; retries and regenerations of it, unless
        something goes on from them or their client named another session; the next states of earlier turns that no
        request tells any more, with what a judge made of them; and side traffic that quotes any of it. Exports that
        hold any of it are removed. The file is written anew without it, and its log emptied. That and finding what
        goes take the longer the larger the file is. A reply that this user waits for meanwhile is not recorded,
        since its request may hold some of it. What was learned from a turn stays in the adapters.

        Args:
            user: Whose. All of a user's turns, unless a session or a turn is named.
            session_id: A session.
            turn_id: A turn.
            missing_ok: Whether a user of whom nothing is recorded is no mistake. What they wait for is not recorded.

        Returns:
            What was deleted. What was deleted before counts as nothing, and its traces are removed once more.

        Raises:
            UnknownTurnError: When there is no such user, session or turn.
            StoreError: When nothing is named, or a session of this name belongs to several users.
            StoreBusyError: Also when everything is deleted, but another process keeps traces of it from being removed.
                Delete it again.
        """
        what = "turn" if turn_id is not None else "session" if session_id is not None else "user"
        named = turn_id or session_id or user
        if not named:
            raise StoreError("Say what to delete: a user, a session or a turn.")
        with exports.exclusively(self.path.parent):
            with self._write() as connection:
                gone, told = what_goes(connection, user, session_id, turn_id)
                owner = gone[0]["user"] if gone else _deleted_from(connection, user, what, named)
                if owner is None and missing_ok and what == "user":
                    owner = user
                if owner is None:
                    raise UnknownTurnError(f"There is no {what} {named!r}{_of(user, what)}.")
                ids = {*(row["turn_id"] for row in gone), *(turn.turn_id for turn in told.values())}
                removed = exports.remove(self.path.parent, ids)
                numbers = [row["number"] for row in gone]
                sessions = delete_turns(connection, numbers, told)
                connection.execute(
                    "INSERT INTO deletions (user, what, id, turns, created) VALUES (?, ?, ?, ?, ?)",
                    (owner, what, hashed(named), len(gone), self.clock()),
                )
            try:
                self._scrub()
            except StoreError as error:
                raise type(error)(f"All is deleted, but traces of it are left: delete it again. {error}") from error
        return Deletion(len(gone), sessions, tuple(removed))


def _select(
    connection: sqlite3.Connection,
    user: str | None,
    session_id: str | None,
    turn_id: str | None,
    state: str | None,
    beyond: str,
    edge: int | None,
    order: str,
) -> list[int]:
    """The numbers of turns that fit, in an order."""
    wanted: dict[str, Any] = {"t.user = ?": user, "t.session_id = ?": session_id, "t.turn_id = ?": turn_id}
    wanted |= {"s.state = ?": state, beyond: edge}
    wanted = {condition: value for condition, value in wanted.items() if value is not None}
    source = "turns t" if state is None else "turns t JOIN turn_states s USING (number)"
    rows = connection.execute(
        f"SELECT t.number FROM {source} WHERE {' AND '.join(wanted) or 'true'} ORDER BY t.number {order}",
        list(wanted.values()),
    )
    return [row["number"] for row in rows]


def _deleted_from(connection: sqlite3.Connection, user: str | None, what: str, named: str) -> str | None:
    """Whose it was, if it was deleted before."""
    row = connection.execute(
        "SELECT user FROM deletions WHERE user = coalesce(?, user) AND what = ? AND id = ?", (user, what, hashed(named))
    ).fetchone()
    return None if row is None else row["user"]


def _of(user: str | None, what: str) -> str:
    return "" if user is None or what == "user" else f" of user {user!r}"
