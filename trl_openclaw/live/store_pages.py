"""What only the status page reads of the store: conversations by the page, and satisfaction over time."""

import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .database import Database, from_json
from .records import StoredTurn

_OUTCOMES_SHOWN = 12
_VERDICTS_COUNTED = 20_000


@dataclass(frozen=True)
class SessionLine:
    """A conversation in a list.

    Args:
        session_id: The conversation.
        number: That of its newest turn; conversations are ordered by it.
        turns: How many it has.
        created: When its first turn was recorded.
        updated: When its newest was.
        messages: The messages of its first request.
        outcomes: What the verdicts of its newest main turns came to, oldest first; `None` where there is none.
    """

    session_id: str
    number: int
    turns: int
    created: float
    updated: float
    messages: Sequence[dict[str, Any]] = field(repr=False)
    outcomes: Sequence[str | None] = ()


@dataclass(frozen=True)
class Share:
    """How many of the turns with a score were good ones, for one version or one day (UTC, `YYYY-MM-DD`)."""

    name: str
    positive: int
    scored: int


class Pages(Database):
    """The part of the store that the status page reads."""

    def session_page(self, user: str, limit: int, before: int | None = None, side: bool = False) -> list[SessionLine]:
        """This user's conversations, the one with the newest turn first.

        Args:
            user: Whose.
            limit: How many at most.
            before: Only those whose newest turn has a lower number.
            side: Also those that are side traffic alone.
        """
        with self._read() as connection:
            rows = connection.execute(
                "SELECT session_id, max(number) AS newest, min(number) AS oldest, count(*) AS turns "
                "FROM turns WHERE user = ? GROUP BY session_id HAVING newest < coalesce(?, newest + 1) "
                "AND (? OR sum(kind = 'main')) ORDER BY newest DESC LIMIT ?",
                (user, before, side, limit),
            ).fetchall()
            return [_session_line(connection, user, row) for row in rows]

    def scored_batches(self, turns: Sequence[StoredTurn]) -> dict[str, str]:
        """By `turn_id`, the batch whose token scores `token_scores` gives, for those of the turns that have any."""
        found = {}
        with self._read() as connection:
            for turn in turns:
                row = connection.execute(
                    "SELECT batch_id FROM token_scores WHERE turn = ? ORDER BY number DESC LIMIT 1", (turn.number,)
                ).fetchone()
                if row is not None:
                    found[turn.turn_id] = row["batch_id"]
        return found

    def satisfaction(self, user: str) -> dict[str, list[Share]]:
        """The share of good verdicts per `"version"` and per `"day"`, oldest first, of the newest 20,000 main turns."""
        with self._read() as connection:
            rows = connection.execute(
                "SELECT t.model_version AS version, date(t.created, 'unixepoch') AS day, sum(v.score = 1) AS positive, "
                "count(*) AS scored, min(t.number) AS first FROM "
                "(SELECT number, model_version, created FROM turns WHERE user = ? AND kind = 'main' "
                "ORDER BY number DESC LIMIT ?) t "
                "JOIN current_verdicts v ON v.turn = t.number WHERE v.score IS NOT NULL "
                "GROUP BY version, day ORDER BY first",
                (user, _VERDICTS_COUNTED),
            ).fetchall()
        return {per: _shares(rows, per) for per in ("version", "day")}


def _session_line(connection: sqlite3.Connection, user: str, row: sqlite3.Row) -> SessionLine:
    first, last = (
        connection.execute("SELECT created, messages FROM turns WHERE number = ?", (row[name],)).fetchone()
        for name in ("oldest", "newest")
    )
    outcomes = connection.execute(
        "SELECT v.source, v.outcome FROM turns t JOIN current_verdicts v ON v.turn = t.number "
        "WHERE t.user = ? AND t.session_id = ? AND t.kind = 'main' ORDER BY t.number DESC LIMIT ?",
        (user, row["session_id"], _OUTCOMES_SHOWN),
    ).fetchall()
    return SessionLine(
        row["session_id"],
        row["newest"],
        row["turns"],
        first["created"],
        last["created"],
        from_json(first["messages"]),
        tuple(each["outcome"] if each["source"] else None for each in reversed(outcomes)),
    )


def _shares(rows: Sequence[sqlite3.Row], per: str) -> list[Share]:
    counts: dict[str, list[int]] = {}
    for row in rows:
        count = counts.setdefault(row[per], [0, 0])
        count[0] += row["positive"]
        count[1] += row["scored"]
    return [Share(name, *count) for name, count in counts.items()]


class Changes:
    """Tells whether a store has changed, for any number of threads, at the cost of one look at a counter.

    Args:
        store: The store. Changes of all processes and threads count.
    """

    def __init__(self, store: Database):
        self._store = store
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def number(self) -> int:
        """A number that is another one after every change."""
        with self._lock, self._store._errors():
            if self._connection is None:  # it never writes, so that what others write always counts
                self._connection = sqlite3.connect(self._store.path, isolation_level=None, check_same_thread=False)
            return self._connection.execute("PRAGMA data_version").fetchone()[0]
