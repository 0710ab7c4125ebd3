"""Batches in the store: which turns a learner has taken, and what became of them."""

import sqlite3
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import StoreError, UnknownTurnError
from .canonical import NO_HISTORY, extended
from .database import Database, from_json, pack, to_json, unpack
from .records import Batch, BatchOutcome, TokenScores
from .store_turns import find_turn, load_turns

_SETTLED = "('side', 'trained', 'rejected', 'expired', 'unusable', 'held_out')"  # states that no turn leaves
_CAN_EXPIRE = "('open', 'answered', 'judged', 'ready')"
# A turn's lag is more than `max_lag` if its version was last published before the publication so many from the end.
_EDGE = "SELECT number FROM publications WHERE user = ? ORDER BY number DESC LIMIT 1 OFFSET ?"
_READY = "FROM turn_states WHERE user = ? AND number > ? AND published >= ? AND state = 'ready'"
_STALE = f"FROM turn_states WHERE user = ? AND number > ? AND published < ? AND state IN {_CAN_EXPIRE}"
_THIS = "AND number = ?"


class Batches(Database):
    """The part of the store that keeps training to exactly once.

    A turn is in at most one batch that is not released. What was trained is what the learner's checkpoint says;
    `reconcile` brings the store in line with it.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._settled: dict[str, int] = {}

    def ready_count(self, user: str, max_lag: int) -> int:
        """How many of this user's turns could be claimed. Cheap while nothing is written to the store."""
        connection, version = self._connection, self.data_version()
        now = (connection, version, connection.total_changes)
        if getattr(self._local, "counted_at", None) != now:
            self._local.counted_at, self._local.counts = now, {}
        counts: dict[tuple[str, int], int] = self._local.counts
        if (user, max_lag) not in counts:
            with self._read() as connection:
                where = self._where(connection, user, max_lag)
                counts[user, max_lag] = connection.execute(f"SELECT count(*) {_READY}", where).fetchone()[0]
        return counts[user, max_lag]

    def claim(self, user: str, count: int, max_lag: int) -> Batch | None:
        """Take turns for one optimizer step. Turns that are too old by now expire, for good.

        Which they are is found before others have to wait, and looked at again one by one while they do.

        Args:
            user: Whose turns.
            count: How many, exactly.
            max_lag: How many versions may have been published since the one that sampled a turn.

        Returns:
            The batch, its turns oldest first, or `None` when fewer are ready.
        """
        while True:
            with self._read() as connection:
                where = self._where(connection, user, max_lag)
                stale = connection.execute(f"SELECT number {_STALE}", where).fetchall() if where[-1] else []
                ready = connection.execute(
                    f"SELECT number {_READY} ORDER BY number LIMIT ?", (*where, count)
                ).fetchall()
            if not stale and len(ready) < count:  # most of the time there is nothing to do
                return None
            now = self.clock()
            with self._write() as connection:
                where = self._where(connection, user, max_lag)
                connection.executemany(
                    f"INSERT INTO expiries (turn, created) SELECT number, ? {_STALE} {_THIS}",
                    [(now, *where, row["number"]) for row in stale],
                )
                if len(ready) < count:
                    return None
                still = [
                    connection.execute(f"SELECT number {_READY} {_THIS}", (*where, row["number"])) for row in ready
                ]
                if all(rows.fetchone() for rows in still):
                    return self._add_batch(connection, user, [row["number"] for row in ready])
            # Somebody else was faster.

    def _add_batch(self, connection: sqlite3.Connection, user: str, numbers: Sequence[int]) -> Batch:
        batch_id = uuid.uuid4().hex
        values = (batch_id, user, self.clock())
        connection.execute("INSERT INTO batches (batch_id, user, created) VALUES (?, ?, ?)", values)
        connection.executemany("INSERT INTO uses VALUES (?, ?)", [(number, batch_id) for number in numbers])
        return _batch(connection, batch_id)

    def _where(self, connection: sqlite3.Connection, user: str, max_lag: int) -> tuple[str, int, int]:
        """What `_READY` and `_STALE` ask for; the last is 0 where nothing is stale."""
        edge = connection.execute(_EDGE, (user, max_lag)).fetchone()
        return user, self._settled_to(connection, user), edge["number"] if edge else 0

    def _settled_to(self, connection: sqlite3.Connection, user: str) -> int:
        """The number up to which all of a user's turns are settled: trained ones need no second look."""
        known = self._settled.get(user, 0)
        (unsettled,) = connection.execute(
            f"SELECT min(number) FROM (SELECT number FROM turn_states WHERE user = ? AND number > ? "
            f"AND state NOT IN {_SETTLED} ORDER BY number LIMIT 1)",
            (user, known),
        ).fetchone()
        (last,) = connection.execute("SELECT max(number) FROM turns WHERE user = ?", (user,)).fetchone()
        self._settled[user] = max(known, (last or 0) if unsettled is None else unsettled - 1)
        return self._settled[user]

    def open_batches(self, user: str) -> list[Batch]:
        """This user's batches that have not ended, oldest first."""
        with self._read() as connection:
            return [_batch(connection, batch_id) for batch_id in _open_ids(connection, user)]

    def end_batch(self, batch_id: str, outcome: BatchOutcome, version: str | None = None) -> None:
        """Say what became of a batch. Saying it again changes nothing.

        Args:
            batch_id: The batch.
            outcome: `"released"` frees its turns. A trained batch may be `"rejected"` later, and nothing else.
            version: The version that came of it.

        Raises:
            UnknownTurnError: When there is no such batch.
            StoreError: When it has ended in another way.
        """
        with self._write() as connection:
            self._end(connection, batch_id, outcome, version)

    def reconcile(self, user: str, finished: Mapping[str, str]) -> int:
        """End the batches that a learner left open when it stopped.

        Args:
            user: Whose batches.
            finished: The batches whose step is in the learner's weights, each with its version.

        Returns:
            How many batches were released because they are not in the weights.
        """
        released = 0
        with self._write() as connection:
            for batch_id in _open_ids(connection, user):
                trained = batch_id in finished
                self._end(connection, batch_id, "trained" if trained else "released", finished.get(batch_id))
                released += not trained
        return released

    def _end(self, connection: sqlite3.Connection, batch_id: str, outcome: BatchOutcome, version: str | None) -> None:
        row = connection.execute(
            "SELECT (SELECT outcome FROM batch_ends e WHERE e.batch_id = b.batch_id ORDER BY number DESC LIMIT 1) "
            "AS outcome FROM batches b WHERE batch_id = ?",
            (batch_id,),
        ).fetchone()
        if row is None:
            raise UnknownTurnError(f"There is no batch {batch_id!r}.")
        before = row["outcome"]
        if before == outcome:
            return
        if before is not None and (before, outcome) != ("trained", "rejected"):
            raise StoreError(f"Batch {batch_id} was {before}, so it cannot be {outcome} now.")
        connection.execute(
            "INSERT INTO batch_ends (batch_id, outcome, version, created) VALUES (?, ?, ?, ?)",
            (batch_id, outcome, version, self.clock()),
        )

    def set_aside(self, turn_ids: Sequence[str], reason: str) -> None:
        """Say that turns cannot be trained, and why in a word. They are unusable from now on and wait for no judge."""
        with self._write() as connection:
            connection.executemany(
                "INSERT INTO set_aside (turn, reason, created) SELECT number, ?, ? FROM turns WHERE turn_id = ? "
                "ON CONFLICT (turn) DO NOTHING",
                [(reason, self.clock(), turn_id) for turn_id in turn_ids],
            )

    def set_aside_counts(self, user: str | None = None) -> dict[str, int]:
        """How many of this user's turns were set aside, or of all users' (`None`), by the reason."""
        with self._read() as connection:
            rows = connection.execute(
                "SELECT reason, count(*) AS turns FROM set_aside a JOIN turns t ON t.number = a.turn "
                "WHERE t.user = coalesce(?, t.user) GROUP BY reason ORDER BY reason",
                (user,),
            ).fetchall()
        return {row["reason"]: row["turns"] for row in rows}

    def add_token_scores(
        self,
        batch_id: str,
        scores: Mapping[str, TokenScores],
        *,
        on: Mapping[str, Sequence[dict[str, Any]] | None] | None = None,
    ) -> None:
        """Keep what a step computed for the tokens of its turns.

        Args:
            batch_id: The step's batch.
            scores: By `turn_id`. Turns deleted by now are left out.
            on: By `turn_id`, what followed the turns that were trained. Those of which that was deleted by now are left
                out, too.
        """
        with self._write() as connection:
            for turn_id, found in scores.items():
                followed = None if on is None else on[turn_id]
                digest = None if followed is None else extended(NO_HISTORY, followed)
                connection.execute(
                    "INSERT INTO token_scores (turn, batch_id, student, teacher, advantages, prefers, tokens) "
                    "SELECT t.number, ?, ?, ?, ?, ?, ? FROM turns t LEFT JOIN next_states n ON n.turn = t.number "
                    "WHERE t.turn_id = ? AND (? IS NULL OR n.hash = ?) ON CONFLICT (turn, batch_id) DO NOTHING",
                    (
                        batch_id,
                        pack("f", found.student),
                        pack("f", found.teacher),
                        pack("f", found.advantages),
                        None if found.prefers is None else to_json(found.prefers),
                        None if found.tokens is None else to_json(list(found.tokens)),
                        turn_id,
                        digest,
                        digest,
                    ),
                )

    def token_scores(self, turn_id: str, user: str | None = None) -> TokenScores | None:
        """The token scores of the step that trained a turn last, or `None`.

        Raises:
            UnknownTurnError: When there is no such turn, or it is not this user's.
        """
        with self._read() as connection:
            row = connection.execute(
                "SELECT * FROM token_scores WHERE turn = ? ORDER BY number DESC LIMIT 1",
                (find_turn(connection, turn_id, user),),
            ).fetchone()
        if row is None:
            return None
        student, teacher, advantages = (unpack("f", row[name]) for name in ("student", "teacher", "advantages"))
        return TokenScores(student, teacher, advantages, from_json(row["prefers"]), from_json(row["tokens"]))


def _open_ids(connection: sqlite3.Connection, user: str) -> list[str]:
    rows = connection.execute(
        "SELECT batch_id FROM batches b WHERE user = ? AND NOT EXISTS "
        "(SELECT 1 FROM batch_ends e WHERE e.batch_id = b.batch_id) ORDER BY number",
        (user,),
    )
    return [row["batch_id"] for row in rows]


def _batch(connection: sqlite3.Connection, batch_id: str) -> Batch:
    row = connection.execute("SELECT user, created FROM batches WHERE batch_id = ?", (batch_id,)).fetchone()
    numbers = connection.execute("SELECT turn FROM uses WHERE batch_id = ?", (batch_id,)).fetchall()
    return Batch(
        batch_id, row["user"], row["created"], tuple(load_turns(connection, (number["turn"] for number in numbers)))
    )
