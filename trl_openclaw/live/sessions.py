"""Which turn a request goes on from, and what it says of earlier replies: found in the request's own history alone.

Clients send no ids of conversations. They do send the whole conversation each time, so a reply that was recorded stands
in the history of the request that follows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..types import Message, Messages
from .canonical import NO_HISTORY, canonical, extended, is_system, reply_hash, tail_hash
from .records import HistoryHit
from .side_traffic import automatic

_LOOK_BACK = 8  # replies of a history that are looked for by themselves
_TELLING_BYTES = 60  # of a message and a reply with their roles; "Thanks!" and "You're welcome!" have 39


class TurnFinder(Protocol):
    """What matching needs of the store."""

    def find_by_history(self, user: str, hashes: Sequence[bytes], limit: int = ...) -> list[HistoryHit]:
        """Turns whose history has the first of these hashes that any has, the newest first."""
        ...

    def find_by_tail(self, user: str, tail_hash: bytes, limit: int = ...) -> list[HistoryHit]:
        """Turns with this tail, the newest first."""
        ...

    def find_by_reply(self, user: str, reply_hash: bytes, limit: int = ...) -> list[HistoryHit]:
        """Turns with this reply, the newest first."""
        ...


class NextStateTaker(Protocol):
    """What attaching needs of the store."""

    def add_next_state(
        self,
        turn_id: str,
        messages: list[dict[str, Any]],
        source: str = ...,
        told_by: str | None = ...,
        asked_after: int | None = ...,
    ) -> bool:
        """Say what followed a turn."""
        ...


@dataclass(frozen=True)
class Match:
    """What a request's history says.

    Args:
        parent: The turn whose reply is the last of the history that is known, though others may follow it.
        session_id: The session that the request gives or goes on with; `None` where it begins one.
        answered: The turn that was found, if the request is the first to say what followed it.
        next_state: What followed it.
        unmatched: Whether the history ends with a reply that was not found.
        ambiguous: Whether several turns fit that reply, in a history that was cut or edited.
        alternate: Whether something else followed the turn the first time, as after an edit or in a branch.
        history: The hash of the request's messages, for `turn_hashes`.
    """

    parent: str | None = None
    session_id: str | None = None
    answered: str | None = None
    next_state: tuple[dict[str, Any], ...] = ()
    unmatched: bool = False
    ambiguous: bool = False
    alternate: bool = False
    history: bytes | None = None


def match(
    store: TurnFinder, user: str, messages: Messages, session_id: str | None = None, *, side: bool = False
) -> Match:
    """Find the turn whose reply ends the longest part of a request's history that is known. Reads only.

    What stands before that reply was matched when its own request came. Where the known part does not reach to the last
    reply, because the client has cut or edited what came before, that one is looked for by itself and the message
    before it, and taken if only one turn fits: of the session that the request names, or else one that shares more with
    it than a few words. Where none is taken so, since some clients add what they looked up, or a
    reminder, to the live request alone, the last reply is looked for that is long enough to be known by itself, and
    that one turn alone has.

    Of several turns with the same history (a conversation that was begun twice) the one is meant that was followed by
    the same messages, else the newest that nothing has followed yet.

    Args:
        store: Where to look.
        user: Whose turns.
        messages: The request's messages.
        session_id: The session that the request names, if it does. Its turns are preferred, and others may be gone on
            from, but nothing followed them.
        side: Whether the request is side traffic, which says nothing about earlier replies.
    """
    chain = NO_HISTORY
    replies: list[tuple[int, bytes]] = []
    for place, message in enumerate(messages):
        chain = extended(chain, [message])
        if message.get("role") == "assistant":
            replies.append((place, chain))
    if not replies:
        return Match(session_id=session_id, history=chain)
    last = replies[-1][0]

    found = store.find_by_history(user, [digest for _, digest in reversed(replies)])
    place = replies[-1 - found[0].index][0] if found else last
    ambiguous = retold = False
    if not found or place < last:
        tails = _by_tail(store, user, messages[: last + 1], session_id, following(messages, last))
        ambiguous = len(tails) > 1
        if len(tails) == 1 and (session_id is not None or _telling(store, user, messages[: last + 1], tails[0])):
            found, place = tails, last
        else:
            unknown = [at for at, _ in replies if not found or at > place]
            hit, at, several = _by_reply(store, user, messages, unknown, session_id)
            ambiguous = ambiguous or several
            if hit is not None:
                found, place, retold = [hit], at, at < last
    if not found:
        return Match(session_id=session_id, unmatched=True, ambiguous=ambiguous, history=chain)

    said = following(messages, place)
    hit = _meant(found, said, session_id)
    says = bool(said) and not side and hit.kind != "side"
    # Another session may begin with what was said in this one. What follows there is its own.
    news = says and not hit.has_next_state and session_id in (None, hit.session_id)
    return Match(
        parent=hit.turn_id,
        session_id=session_id or hit.session_id,
        answered=hit.turn_id if news else None,
        next_state=tuple(said) if news else (),
        unmatched=place < last,
        ambiguous=ambiguous,
        alternate=says and not retold and hit.has_next_state and hit.next_state_hash != extended(NO_HISTORY, said),
        history=chain,
    )


def attach(
    store: NextStateTaker, found: Match, told_by: str, source: str = "request", asked_after: int | None = None
) -> bool:
    """Write down the next state of a match.

    Args:
        store: Where to.
        found: The match.
        told_by: The `turn_id` that the request's own reply will have.
        source: How it is known.
        asked_after: The store's `last_deletion` when the request came.

    Returns:
        Whether there was one, and it was news: another request may have been faster.
    """
    if found.answered is None:
        return False
    return store.add_next_state(found.answered, list(found.next_state), source, told_by, asked_after)


def following(messages: Messages, place: int) -> list[dict[str, Any]]:
    """What people and tools said after a reply, up to the next one."""
    said: list[Message] = []
    for message in messages[place + 1 :]:
        if message.get("role") == "assistant":
            break
        if not is_system(message) and automatic(message) is None:
            said.append(message)
    return [dict(message) for message in said]


def _meant(hits: Sequence[HistoryHit], said: Messages, session_id: str | None) -> HistoryHit:
    """Which of several turns with the same history a request goes on from."""
    hits = [hit for hit in hits if hit.session_id == session_id] or hits
    digest = extended(NO_HISTORY, said) if said else None
    repeated = [hit for hit in hits if hit.has_next_state and hit.next_state_hash == digest]
    still_open = [hit for hit in hits if not hit.has_next_state]
    return (repeated or still_open or list(hits))[0]


def _by_tail(
    store: TurnFinder, user: str, messages: Messages, session_id: str | None, said: Messages
) -> list[HistoryHit]:
    """The turns that may be the last reply of a history that was cut or edited further up."""
    found = store.find_by_tail(user, tail_hash(messages[:-1], messages[-1]))
    if session_id is not None:
        found = [hit for hit in found if hit.session_id == session_id]
    digest = extended(NO_HISTORY, said)
    repeated = [hit for hit in found if hit.next_state_hash == digest]
    return repeated[:1] or found


def _by_reply(
    store: TurnFinder, user: str, messages: Messages, places: Sequence[int], session_id: str | None
) -> tuple[HistoryHit | None, int, bool]:
    """The last reply of some that one turn alone has, its place, and whether several have the last of all."""
    ambiguous = False
    for place in reversed(places[-_LOOK_BACK:]):
        digest = reply_hash(messages[place])
        found = [] if digest is None else store.find_by_reply(user, digest)
        found = [hit for hit in found if session_id in (None, hit.session_id)]
        if len(found) == 1:
            return found[0], place, ambiguous
        ambiguous = ambiguous or (place == places[-1] and len(found) > 1)
    return None, 0, ambiguous


def _telling(store: TurnFinder, user: str, messages: Messages, hit: HistoryHit) -> bool:
    """Whether the last exchange of a history is more than anyone may say, or the one before is of the hit's session."""
    asked = next((message for message in reversed(messages[:-1]) if not is_system(message)), None)
    if sum(len(canonical(message)) for message in (asked, messages[-1]) if message is not None) >= _TELLING_BYTES:
        return True
    before = next((p for p in range(len(messages) - 2, -1, -1) if messages[p].get("role") == "assistant"), None)
    if before is None:
        return False
    tail = tail_hash(messages[:before], messages[before])
    return hit.session_id in {other.session_id for other in store.find_by_tail(user, tail)}
