"""Deleting turns from the store: what goes with them, and what is known of others through them."""

import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from ..errors import StoreError
from ..types import message_text
from .canonical import NO_HISTORY, extended, is_system, reply_hash
from .database import from_json, to_json
from .sessions import following
from .side_traffic import automatic

_QUOTED = 60  # characters of each end of a message that a quote has: clients shorten what they quote
_TELLING = 8  # characters below which it may be anyone's words
_WORD, _ESCAPE = re.compile(r"\w+"), re.compile(r"\\[nrt]")
_TURN = "SELECT number, turn_id, user, session_id, kind, parent, messages, reply FROM turns"
_NEXT_STATE = "SELECT t.number, t.turn_id, n.hash, n.told_by FROM next_states n JOIN turns t ON t.number = n.turn"


@dataclass(frozen=True)
class Told:
    """A turn that stays though what told its next state goes.

    Args:
        turn_id: The turn.
        teller: The `turn_id` of another request that tells the same and stays, and what it says; `None` without one.
    """

    turn_id: str
    teller: tuple[str, list[dict[str, Any]]] | None


def what_goes(
    connection: sqlite3.Connection, user: str | None, session_id: str | None, turn_id: str | None
) -> tuple[list[sqlite3.Row], dict[int, Told]]:
    """The turns to delete, and by their numbers the other turns whose next state one of them told."""
    wanted = {"user = ?": user, "session_id = ?": session_id, "turn_id = ?": turn_id}
    wanted = {condition: value for condition, value in wanted.items() if value is not None}
    chosen, values = " AND ".join(wanted), list(wanted.values())
    if chosen == "user = ?":
        return connection.execute("SELECT number, turn_id, user FROM turns WHERE user = ?", values).fetchall(), {}
    if user is None and session_id is not None:
        owners = connection.execute(f"SELECT DISTINCT user FROM turns WHERE {chosen}", values).fetchall()
        if len(owners) > 1:
            raise StoreError(f"Several users have a session {session_id!r}: say whose to delete.")
    gone = _with_what_holds_them(connection, connection.execute(f"{_TURN} WHERE {chosen}", values).fetchall())
    return gone, _told(connection, {row["number"]: row for row in gone})


def _with_what_holds_them(connection: sqlite3.Connection, turns: Iterable[sqlite3.Row]) -> list[sqlite3.Row]:
    """Turns of one user, and all others of the same user that hold what they say or quote it."""
    found: dict[int, sqlite3.Row] = {}
    new = list(turns)
    if not new:
        return []
    repeated = _Repeated(connection, new[0]["user"])
    while new:
        found |= {turn["number"]: turn for turn in new}
        holding = [row for turn in new for row in connection.execute(f"{_TURN} WHERE parent = ?", (turn["turn_id"],))]
        for parent in {turn["parent"] for turn in new}:
            holding += _beside(connection, parent, [turn for turn in new if turn["parent"] == parent])
        new = [row for row in holding if row["number"] not in found]
        if not new:  # it looks through all that the user has
            new = repeated.holding(found)
    return list(({row["number"]: row for row in _quoting(connection, list(found.values()))} | found).values())


def _beside(connection: sqlite3.Connection, parent: str | None, turns: Sequence[sqlite3.Row]) -> Iterator[sqlite3.Row]:
    """The turns that hold the requests of turns after one parent without holding their replies as they were recorded.

    They go on from them where the client has cut or edited the reply: with another one in its place the history is
    known as far as the turn's own was. Or they answer the same request, as after a retry or a regeneration. These stay
    where something goes on from them, and where their client named another session: then it was said twice.
    """
    asked: dict[bytes, int] = {}
    for turn in turns:
        digest = extended(NO_HISTORY, from_json(turn["messages"]))
        asked[digest] = min(turn["number"], asked.get(digest, turn["number"]))
    sessions = {turn["session_id"] for turn in turns}
    for row in connection.execute(f"{_TURN} WHERE user = ? AND parent IS ?", (turns[0]["user"], parent)):
        digest = NO_HISTORY
        for message in from_json(row["messages"]):
            if message.get("role") == "assistant" and asked.get(digest, row["number"]) < row["number"]:
                yield row
                break
            digest = extended(digest, [message])
        else:
            again = digest in asked and row["kind"] == "main" and row["session_id"] in {*sessions, row["turn_id"]}
            if again and not _children(connection, row["turn_id"]):
                yield row


class _Repeated:
    """The turns of a user that hold replies word for word without being known to go on from them.

    Their client has changed the message before the reply after sending it, or cut what came before, so that the reply
    was not found when they came. Short replies hold nobody: they were said more than once.

    Args:
        connection: The store's.
        user: The user.
    """

    def __init__(self, connection: sqlite3.Connection, user: str):
        self._connection, self._user = connection, user

    @cached_property
    def _holders(self) -> dict[bytes, list[int]]:
        """By the hash of a reply, the numbers of the turns in whose messages it stands."""
        holders: dict[bytes, list[int]] = {}
        of_text = cache(lambda text: reply_hash({"role": "assistant", "content": text}))  # sent again and again
        for number, messages in self._connection.execute(
            "SELECT number, messages FROM turns WHERE user = ?", (self._user,)
        ):
            for message in from_json(messages):
                if message.get("role") == "assistant":
                    text = message.get("content")
                    alone = isinstance(text, str) and len(message) == 2
                    digest = of_text(text) if alone else reply_hash(message)
                    if digest is not None:
                        holders.setdefault(digest, []).append(number)
        return holders

    def holding(self, found: Mapping[int, sqlite3.Row]) -> list[sqlite3.Row]:
        """Of the other turns, those that hold replies of these and were recorded after them."""
        numbers = {
            number
            for turn in found.values()
            if (digest := reply_hash(from_json(turn["reply"]))) is not None
            for number in self._holders.get(digest, ())
            if number > turn["number"] and number not in found and not self._goes_on_from_another(number, digest)
        }
        return [self._connection.execute(f"{_TURN} WHERE number = ?", (number,)).fetchone() for number in numbers]

    def _goes_on_from_another(self, number: int, reply: bytes) -> bool:
        """Whether a turn has the same reply from a turn that it goes on from: then it was said twice."""
        (known,) = self._connection.execute(
            "WITH RECURSIVE earlier (turn_id) AS (SELECT parent FROM turns WHERE number = ? "
            "UNION SELECT t.parent FROM turns t JOIN earlier e ON t.turn_id = e.turn_id) "
            "SELECT EXISTS (SELECT 1 FROM earlier JOIN turns t USING (turn_id) JOIN replies r ON r.turn = t.number "
            "WHERE r.hash = ?)",
            (number, reply),
        ).fetchone()
        return bool(known)


def _children(connection: sqlite3.Connection, turn_id: str) -> list[sqlite3.Row]:
    """The main turns that go on from a turn, oldest first."""
    return connection.execute(f"{_TURN} WHERE parent = ? AND kind = 'main' ORDER BY number", (turn_id,)).fetchall()


def _told(connection: sqlite3.Connection, gone: Mapping[int, sqlite3.Row]) -> dict[int, Told]:
    """The turns that stay and whose next state these told, by their numbers."""
    told = {}
    for row in gone.values():
        # A request whose reply was never recorded, as when the engine failed, told it for the one that tried again.
        for turn in connection.execute(
            f"{_NEXT_STATE} WHERE n.told_by = ? UNION {_NEXT_STATE} WHERE t.turn_id = ? "
            "AND NOT EXISTS (SELECT 1 FROM turns WHERE turn_id = n.told_by)",
            (row["turn_id"], row["parent"]),
        ).fetchall():
            itself = turn["told_by"] == row["turn_id"] or _tells(row, turn["hash"])
            if itself and turn["number"] not in gone and turn["number"] not in told:
                others = (other for other in _children(connection, turn["turn_id"]) if other["number"] not in gone)
                tellers = ((other["turn_id"], _tells(other, turn["hash"])) for other in others)
                told[turn["number"]] = Told(turn["turn_id"], next((each for each in tellers if each[1]), None))
    return told


def _tells(turn: sqlite3.Row, digest: bytes) -> list[dict[str, Any]]:
    """What a turn's request says after one of its replies, if it has this hash; nothing otherwise."""
    messages = from_json(turn["messages"])
    for place, message in enumerate(messages):
        if message.get("role") == "assistant" and extended(NO_HISTORY, said := following(messages, place)) == digest:
            return said
    return []


def _quoting(connection: sqlite3.Connection, turns: Sequence[sqlite3.Row]) -> Iterator[sqlite3.Row]:
    """Their user's side traffic that quotes what is said in turns: requests for titles, summaries and the like.

    What is never trained is rather deleted once too often. What others go on from stays with them.
    """
    said = [text for turn in turns if turn["kind"] == "main" for text in _texts(_news(turn)) if len(text) >= _TELLING]
    ends = {end for text in said for end in (text[:_QUOTED], text[-_QUOTED:])}
    for row in connection.execute(
        f"{_TURN} t WHERE user = ? AND kind = 'side' AND NOT EXISTS (SELECT 1 FROM turns WHERE parent = t.turn_id)",
        (turns[0]["user"] if turns else None,),
    ):
        whole = " ".join(_texts([*from_json(row["messages"]), from_json(row["reply"])]))
        if any(end in whole for end in ends):
            yield row


def _news(turn: sqlite3.Row) -> Iterator[dict[str, Any]]:
    """What a turn adds to its conversation."""
    messages = from_json(turn["messages"])
    replies = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    if replies and turn["parent"] is not None:
        del messages[: replies[-1] + 1]
    yield from (message for message in [*messages, from_json(turn["reply"])] if automatic(message) is None)


def _texts(messages: Iterable[dict[str, Any]]) -> Iterator[str]:
    """What people, tools and the model say, as words alone, however it is quoted."""
    for message in messages:
        if not is_system(message):
            yield " ".join(_WORD.findall(_ESCAPE.sub(" ", message_text(message)).lower()))


def delete_turns(connection: sqlite3.Connection, numbers: Iterable[int], told: Mapping[int, Told]) -> int:
    """Delete turns, and what is known of other turns through them alone.

    Returns:
        How many sessions lost turns.
    """
    sessions = set()
    for number in numbers:
        sessions.add(
            tuple(connection.execute("SELECT user, session_id FROM turns WHERE number = ?", (number,)).fetchone())
        )
        connection.execute("DELETE FROM turns WHERE number = ?", (number,))
    for number, turn in told.items():
        if turn.teller is not None:
            teller, messages = turn.teller
            connection.execute(
                "UPDATE next_states SET told_by = ?, messages = ? WHERE turn = ?", (teller, to_json(messages), number)
            )
            continue
        connection.execute("DELETE FROM next_states WHERE turn = ?", (number,))
        connection.execute("DELETE FROM verdicts WHERE turn = ? AND source <> 'feedback'", (number,))
        connection.execute("DELETE FROM token_scores WHERE turn = ?", (number,))  # a teacher saw hints made of it
    return len(sessions)
