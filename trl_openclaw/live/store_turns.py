"""Turns in the store: recording them, finding them, what followed them, and what is thought of them."""

import dataclasses
import hashlib
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import UnknownTurnError
from ..types import Verdict, Vote, valid_text
from .canonical import NO_HISTORY, extended
from .database import Database, from_json, pack, to_json, unpack
from .records import HistoryHit, NewTurn, StoredTurn, StoredVerdict, TurnHashes, Use, VerdictSource

HELD_OUT_ONE_IN = 8

_TURNS = """
SELECT t.*, s.state, s.lag, n.messages AS next_state, n.source AS next_state_source,
    n.told_by AS next_state_told_by,
    v.score, v.outcome, v.votes, v.hints, v.source, v.hint_source, v.created AS judged,
    u.batch_id, coalesce(e.outcome, 'open') AS use_outcome, e.version
FROM turns t
JOIN turn_states s USING (number)
JOIN current_verdicts v ON v.turn = t.number
LEFT JOIN next_states n ON n.turn = t.number
LEFT JOIN uses u ON u.turn = t.number AND u.batch_id = (SELECT batch_id FROM current_uses WHERE turn = t.number)
LEFT JOIN batch_ends e ON e.number = (SELECT max(number) FROM batch_ends WHERE batch_id = u.batch_id)
WHERE t.number IN ({}) ORDER BY t.number
"""

_AS_STORED = (
    *("turn_id", "user", "session_id", "parent", "kind", "side_reason", "finish_reason", "model", "model_version"),
    *("number", "created", "state", "lag", "next_state_source", "next_state_told_by"),
)
# Never where the number is NULL.
_DELETED_SINCE = "EXISTS (SELECT 1 FROM deletions d WHERE d.user = {} AND d.number > ?)"
_OUTCOMES = {1: "positive", -1: "negative", 0: "neutral"}


def is_held_out(turn_id: str) -> bool:
    """Whether a turn is one of those, one in eight, that are kept for checks."""
    return hashlib.sha256(turn_id.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def load_turns(connection: sqlite3.Connection, numbers: Iterable[int]) -> list[StoredTurn]:
    """The turns with these numbers, oldest first."""
    wanted = list(numbers)
    found: list[StoredTurn] = []
    for start in range(0, len(wanted), 1000):
        some = wanted[start : start + 1000]
        rows = connection.execute(_TURNS.format(", ".join("?" * len(some))), some)
        found += map(_stored_turn, rows)
    return sorted(found, key=lambda turn: turn.number)


def _stored_turn(row: sqlite3.Row) -> StoredTurn:
    verdict = use = None
    if row["source"] is not None:
        votes = tuple(Vote(**vote) for vote in from_json(row["votes"]))
        hints = tuple(from_json(row["hints"]))
        verdict = StoredVerdict(
            row["score"], row["outcome"], hints, votes, row["source"], row["hint_source"], row["judged"]
        )
    if row["batch_id"] is not None:
        use = Use(row["batch_id"], row["use_outcome"], row["version"])
    return StoredTurn(
        messages=from_json(row["messages"]),
        tools=from_json(row["tools"]),
        reply=from_json(row["reply"]),
        sampling=from_json(row["sampling"]),
        prompt_ids=unpack("i", row["prompt_ids"]),
        completion_ids=unpack("i", row["completion_ids"]),
        logprobs=unpack("f", row["logprobs"]),
        next_state=from_json(row["next_state"]),
        verdict=verdict,
        use=use,
        **{name: row[name] for name in _AS_STORED},
    )


class Turns(Database):
    """The part of the store that serving and judging need."""

    def last_deletion(self) -> int:
        """The number of the latest deletion, whoever's. Cheap."""
        with self._errors():
            return self._connection.execute("SELECT coalesce(max(number), 0) FROM deletions").fetchone()[0]

    def record_turn(
        self, turn: NewTurn, hashes: TurnHashes, *, created: float | None = None, asked_after: int | None = None
    ) -> bool:
        """Record a turn.

        Args:
            turn: The turn.
            hashes: By what later requests find it.
            created: When it was, by default now.
            asked_after: The `last_deletion` when its request came. If its user has deleted anything since, the turn
                may quote it, and is not recorded.

        Returns:
            Whether it was recorded. A `turn_id` that is known already changes nothing.
        """
        values = {
            "turn_id": turn.turn_id,
            "user": turn.user,
            "session_id": turn.session_id,
            "parent": turn.parent,
            "kind": turn.kind,
            "side_reason": turn.side_reason,
            "finish_reason": turn.finish_reason,
            "model": turn.model,
            "model_version": turn.model_version,
            "held_out": is_held_out(turn.turn_id),
            "created": self.clock() if created is None else created,
            "history_hash": hashes.history,
            "tail_hash": hashes.tail,
            "sampling": to_json(turn.sampling),
            "prompt_ids": pack("i", turn.prompt_ids),
            "completion_ids": pack("i", turn.completion_ids),
            "logprobs": pack("f", turn.logprobs),
            "reply": to_json(turn.reply),
            "tools": None if turn.tools is None else to_json(turn.tools),
            "messages": to_json(turn.messages),
        }
        with self._write() as connection:
            done = connection.execute(
                f"INSERT INTO turns ({', '.join(values)}) SELECT {', '.join('?' * len(values))} "
                f"WHERE NOT {_DELETED_SINCE.format('?')} ON CONFLICT (turn_id) DO NOTHING",
                [*values.values(), turn.user, asked_after],
            )
            if done.rowcount == 1 and hashes.reply is not None:
                connection.execute("INSERT INTO replies VALUES (?, ?, ?)", (done.lastrowid, turn.user, hashes.reply))
            return done.rowcount == 1

    def add_next_state(
        self,
        turn_id: str,
        messages: list[dict[str, Any]],
        source: str = "request",
        told_by: str | None = None,
        asked_after: int | None = None,
    ) -> bool:
        """Say what followed a turn's reply.

        Args:
            turn_id: The turn.
            messages: All that followed, up to the next reply.
            source: How it is known.
            told_by: The `turn_id` of the request it was found in, with which it is deleted.
            asked_after: The `last_deletion` when that request came, as in `record_turn`.

        Returns:
            Whether this was news. The first next state stays, and a turn that was deleted gets none.
        """
        digest = extended(NO_HISTORY, messages)
        values = (digest, source, told_by, self.clock(), to_json(messages), turn_id, asked_after)
        with self._write() as connection:
            done = connection.execute(
                "INSERT INTO next_states (turn, hash, source, told_by, created, messages) "
                "SELECT t.number, ?, ?, ?, ?, ? FROM turns t WHERE t.turn_id = ? "
                f"AND NOT {_DELETED_SINCE.format('t.user')} ON CONFLICT (turn) DO NOTHING",
                values,
            )
            return done.rowcount == 1

    def add_feedback(self, user: str, turn_id: str, thumb: int, correction: str | None, key: str) -> bool:
        """Take what a person says of a reply. It outranks the judge: the thumb is the score, the correction the hint.

        The latest alone counts: a correction is withdrawn by saying something else without one.

        Args:
            user: Who says so.
            turn_id: The reply.
            thumb: 1, -1 or 0.
            correction: What the reply should have been like.
            key: Names this piece of feedback, so that sending it twice counts once.

        Returns:
            Whether this was news.

        Raises:
            UnknownTurnError: When this user has no such turn.
            ValueError: When `thumb` is something else.
        """
        if thumb not in _OUTCOMES:
            raise ValueError(f"`thumb` must be 1, -1 or 0, got {thumb!r}.")
        correction = valid_text(correction).strip() if correction else None
        hints = [correction] if correction else []
        with self._write() as connection:
            number = find_turn(connection, turn_id, user)
            done = connection.execute(
                "INSERT INTO feedback (turn, user, key, thumb, correction, created) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (user, key) DO NOTHING",
                (number, user, key, thumb, correction, self.clock()),
            )
            if done.rowcount != 1:
                return False
            self._add_verdict(connection, number, thumb, _OUTCOMES[thumb], hints, (), "feedback")
            return True

    def find_by_history(self, user: str, hashes: Sequence[bytes], limit: int = 100) -> list[HistoryHit]:
        """This user's turns whose history has the first of these hashes that any has, the newest first.

        Args:
            user: Whose turns.
            hashes: What to look for, the most wanted first.
            limit: How many at most.
        """
        with self._read() as connection:
            for index, digest in enumerate(hashes):
                if found := _find(connection, "history_hash", user, digest, limit, index):
                    return found
        return []

    def find_by_tail(self, user: str, tail_hash: bytes, limit: int = 100) -> list[HistoryHit]:
        """This user's turns with this tail, the newest first, at most `limit`."""
        with self._read() as connection:
            return _find(connection, "tail_hash", user, tail_hash, limit)

    def find_by_reply(self, user: str, reply_hash: bytes, limit: int = 100) -> list[HistoryHit]:
        """This user's turns with this reply, the newest first, at most `limit`."""
        with self._read() as connection:
            rows = connection.execute(
                "SELECT t.number, t.turn_id, t.session_id, t.kind, n.hash FROM replies r "
                "JOIN turns t ON t.number = r.turn LEFT JOIN next_states n ON n.turn = t.number "
                "WHERE r.user = ? AND r.hash = ? ORDER BY r.turn DESC LIMIT ?",
                (user, reply_hash, limit),
            )
            return [HistoryHit(0, *row) for row in rows]

    def unjudged(self, limit: int) -> list[StoredTurn]:
        """Turns that wait for a judge, oldest answer first.

        They are the main turns that something followed, of users who did not opt out, and that could be trained or are
        held out. A thumb without a correction leaves a turn waiting too: the judge may find a hint.
        """
        with self._read() as connection:
            rows = connection.execute(
                "SELECT n.turn FROM next_states n JOIN turn_states s ON s.number = n.turn "
                "WHERE NOT EXISTS (SELECT 1 FROM verdicts v WHERE v.turn = n.turn AND v.source IN ('judge', 'edit')) "
                "AND coalesce((SELECT v.hints FROM verdicts v WHERE v.turn = n.turn AND v.source = 'feedback' "
                "ORDER BY v.number DESC LIMIT 1), '[]') = '[]' "
                "AND s.state IN ('answered', 'ready', 'held_out') ORDER BY n.number LIMIT ?",
                (limit,),
            ).fetchall()
            order = [row["turn"] for row in rows]
            return sorted(load_turns(connection, order), key=lambda turn: order.index(turn.number))

    def add_verdict(
        self,
        turn_id: str,
        verdict: Verdict,
        source: VerdictSource = "judge",
        *,
        on: Sequence[dict[str, Any]] | None = None,
    ) -> bool:
        """Keep a verdict. Which one counts says `VerdictSource`.

        Args:
            turn_id: The turn.
            verdict: The verdict, whose hints may quote what followed the turn.
            source: Who gave it.
            on: What followed the turn when it was judged; `None` if that does not matter.

        Returns:
            Whether it was kept. A turn that was deleted takes none, nor does one whose next state was meanwhile.
        """
        votes = [dataclasses.asdict(vote) for vote in verdict.votes]
        with self._write() as connection:
            row = connection.execute(
                "SELECT t.number FROM turns t LEFT JOIN next_states n ON n.turn = t.number "
                "WHERE t.turn_id = ? AND (? IS NULL OR n.hash = ?)",
                (turn_id, *2 * (None if on is None else extended(NO_HISTORY, on),)),
            ).fetchone()
            if row is not None:
                self._add_verdict(
                    connection, row["number"], verdict.score, verdict.outcome, verdict.hints, votes, source
                )
            return row is not None

    def _add_verdict(
        self,
        connection: sqlite3.Connection,
        number: int,
        score: int | None,
        outcome: str,
        hints: Sequence[str],
        votes: Sequence[dict[str, Any]],
        source: VerdictSource,
    ) -> None:
        connection.execute(
            "INSERT INTO verdicts (turn, score, outcome, source, created, hints, votes) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (number, score, outcome, source, self.clock(), to_json(list(hints)), to_json(list(votes))),
        )


def find_turn(connection: sqlite3.Connection, turn_id: str, user: str | None = None) -> int:
    """The number of a turn.

    Raises:
        UnknownTurnError: When there is none with this id, or it is not this user's.
    """
    row = connection.execute(
        "SELECT number FROM turns WHERE turn_id = ? AND user = coalesce(?, user)", (turn_id, user)
    ).fetchone()
    if row is None:
        raise UnknownTurnError(f"There is no turn {turn_id!r}{f' of user {user!r}' if user is not None else ''}.")
    return row["number"]


def _find(
    connection: sqlite3.Connection, column: str, user: str, digest: bytes, limit: int, index: int = 0
) -> list[HistoryHit]:
    rows = connection.execute(
        "SELECT t.number, t.turn_id, t.session_id, t.kind, n.hash FROM turns t "
        f"LEFT JOIN next_states n ON n.turn = t.number WHERE t.user = ? AND t.{column} = ? "
        "ORDER BY t.number DESC LIMIT ?",
        (user, digest, limit),
    )
    return [HistoryHit(index, *row) for row in rows]
