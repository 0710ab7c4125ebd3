"""Which turn a request goes on from, and what it says of earlier replies: found in the request's own history alone.

Clients send no ids of conversations. They do send the whole conversation each time, so a reply that was recorded stands
in the history of the request that follows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..types import Message, Messages
from .canonical import NO_HISTORY, extended, is_system, tail_hash
from .records import HistoryHit
from .side_traffic import automatic


class TurnFinder(Protocol):
    """What matching needs of the store."""

    def find_by_history(self, user: str, hashes: Sequence[bytes]) -> list[HistoryHit]:
        """Turns whose history has one of these hashes, the newest first for each."""
        ...

    def find_by_tail(self, user: str, tail_hash: bytes, limit: int = ...) -> list[HistoryHit]:
        """Turns with this tail, the newest first."""
        ...


class NextStateTaker(Protocol):
    """What attaching needs of the store."""

    def add_next_state(
        self, turn_id: str, messages: list[dict[str, Any]], source: str = ..., told_by: str | None = ...
    ) -> bool:
        """Say what followed a turn."""
        ...


@dataclass(frozen=True)
class Match:
    """What a request's history says.

    Args:
        parent: The turn whose reply is the last assistant message of the history.
        session_id: The session that the request gives or goes on with; `None` where it begins one.
        next_states: By `turn_id`, what followed replies of which that was not known.
        unmatched: Whether the history has a reply at its end that was not found.
        ambiguous: Whether that is because several turns fit a history that was cut or edited.
        alternates: How many replies were followed by something else the first time: edits and branches.
    """

    parent: str | None = None
    session_id: str | None = None
    next_states: tuple[tuple[str, list[dict[str, Any]]], ...] = ()
    unmatched: bool = False
    ambiguous: bool = False
    alternates: int = 0


def match(
    store: TurnFinder, user: str, messages: Messages, session_id: str | None = None, *, side: bool = False
) -> Match:
    """Find the turns whose replies stand in a request's history. Reads only.

    Each assistant message is looked for by all that comes before it and itself. Where the last one is not found so,
    because the client has cut or edited what came before, it is looked for by itself and the message before it, and
    taken if only one turn fits. Of several turns with the same history (a conversation that was begun twice) the one
    is meant that was followed by the same messages, else the newest that nothing has followed yet.

    Args:
        store: Where to look.
        user: Whose turns.
        messages: The request's messages.
        session_id: The session that the request names, if it does. Its turns are preferred.
        side: Whether the request is side traffic, which says nothing about earlier replies.
    """
    chain = NO_HISTORY
    replies: list[tuple[int, bytes]] = []
    for place, message in enumerate(messages):
        chain = extended(chain, [message])
        if message.get("role") == "assistant":
            replies.append((place, chain))
    if not replies:
        return Match(session_id=session_id)
    replies.reverse()

    hits: dict[int, list[HistoryHit]] = {}
    for hit in store.find_by_history(user, [digest for _, digest in replies]):
        hits.setdefault(hit.index, []).append(hit)
    last = replies[0][0]
    ambiguous = False
    if 0 not in hits:
        found = _by_tail(store, user, messages[: last + 1], session_id, _following(messages, last))
        ambiguous = len(found) > 1
        if len(found) == 1:
            hits[0] = found

    next_states: list[tuple[str, list[dict[str, Any]]]] = []
    alternates = 0
    meant: dict[int, HistoryHit] = {}
    for index in sorted(hits):
        following = _following(messages, replies[index][0])
        hit = meant[index] = _meant(hits[index], following, session_id)
        if side or not following or hit.kind == "side":
            continue
        if not hit.has_next_state:
            next_states.append((hit.turn_id, following))
        elif hit.next_state_hash != extended(NO_HISTORY, following):
            alternates += 1
    nearest = meant[min(meant)] if meant else None
    return Match(
        parent=meant[0].turn_id if 0 in meant else None,
        session_id=session_id or (nearest.session_id if nearest else None),
        next_states=tuple(next_states),
        unmatched=0 not in meant,
        ambiguous=ambiguous,
        alternates=alternates,
    )


def attach(store: NextStateTaker, found: Match, told_by: str, source: str = "request") -> int:
    """Write down the next states of a match.

    Args:
        store: Where to.
        found: The match.
        told_by: The `turn_id` that the request's own reply will have.
        source: How it is known.

    Returns:
        How many were news: another request may have been faster.
    """
    return sum(store.add_next_state(turn_id, messages, source, told_by) for turn_id, messages in found.next_states)


def _following(messages: Messages, place: int) -> list[dict[str, Any]]:
    """What people and tools said after a reply, up to the next one."""
    following: list[Message] = []
    for message in messages[place + 1 :]:
        if message.get("role") == "assistant":
            break
        if not is_system(message) and automatic(message) is None:
            following.append(message)
    return [dict(message) for message in following]


def _meant(hits: Sequence[HistoryHit], following: Messages, session_id: str | None) -> HistoryHit:
    """Which of several turns with the same history a request goes on from."""
    hits = [hit for hit in hits if hit.session_id == session_id] or hits
    digest = extended(NO_HISTORY, following) if following else None
    repeated = [hit for hit in hits if hit.has_next_state and hit.next_state_hash == digest]
    still_open = [hit for hit in hits if not hit.has_next_state]
    return (repeated or still_open or list(hits))[0]


def _by_tail(
    store: TurnFinder, user: str, messages: Messages, session_id: str | None, following: Messages
) -> list[HistoryHit]:
    """The turns that may be the last reply of a history that was cut or edited further up."""
    found = store.find_by_tail(user, tail_hash(messages[:-1], messages[-1]))
    found = [hit for hit in found if hit.session_id == session_id] or found
    digest = extended(NO_HISTORY, following)
    repeated = [hit for hit in found if hit.next_state_hash == digest]
    return repeated[:1] or found
