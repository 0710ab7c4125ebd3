"""Turns and chats for tests of what is recorded of live traffic."""

import uuid
from dataclasses import replace
from typing import Any

from trl_openclaw import Verdict, Vote
from trl_openclaw.live.canonical import turn_hashes
from trl_openclaw.live.records import NewTurn, StoredTurn
from trl_openclaw.live.sessions import Match, attach, match
from trl_openclaw.live.side_traffic import side_reason
from trl_openclaw.live.store import Store
from trl_openclaw.live.store_turns import is_held_out


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def turn_ids(held_out: bool = False):
    """Endless ids, of turns that are kept for checks or of others."""
    while True:
        turn_id = f"chatcmpl-{uuid.uuid4().hex}"
        if is_held_out(turn_id) is held_out:
            yield turn_id


def new_turn(**changes: Any) -> NewTurn:
    """A main turn that can be trained on, not held out."""
    turn_id = changes.pop("turn_id", None) or next(turn_ids())
    turn = NewTurn(
        turn_id=turn_id,
        user="default",
        session_id=turn_id,
        parent=None,
        kind="main",
        side_reason=None,
        messages=[user("What keeps herbs fresh?")],
        tools=None,
        reply=assistant("Water."),
        finish_reason="stop",
        prompt_ids=(5, 6, 7),
        completion_ids=(8, 9),
        logprobs=(-0.5, -0.25),
        sampling={"temperature": 0.7},
        model="model",
        model_version="base",
    )
    return replace(turn, **changes)


def record(store: Store, turn: NewTurn | None = None, **changes: Any) -> NewTurn:
    """Record a turn as it is, without looking at its history."""
    turn = new_turn(**changes) if turn is None else turn
    assert store.record_turn(turn, turn_hashes(turn.messages, turn.reply))
    return turn


def ready_turn(store: Store, hint: str | None = "Be brief.", score: int | None = -1, **changes: Any) -> NewTurn:
    """Record a turn that something followed and that was judged."""
    turn = record(store, **changes)
    assert store.add_next_state(turn.turn_id, [user("Shorter, please.")])
    store.add_verdict(turn.turn_id, Verdict.from_votes([Vote(score=score, hint=hint)]))
    return turn


def chat(
    store: Store,
    messages: list[dict[str, Any]],
    reply: dict[str, Any] | str,
    *,
    owner: str = "default",
    session_id: str | None = None,
    header: str | None = None,
    **changes: Any,
) -> tuple[str, Match]:
    """A request and its reply as the gateway records them; the turn's id, and what its history said."""
    reply = assistant(reply) if isinstance(reply, str) else reply
    turn_id = changes.pop("turn_id", None) or next(turn_ids())
    side = side_reason(messages, header=header)
    found = match(store, owner, messages, session_id, side=side is not None)
    attach(store, found, turn_id)
    turn = new_turn(
        turn_id=turn_id,
        user=owner,
        session_id=found.session_id or turn_id,
        parent=found.parent,
        kind="main" if side is None else "side",
        side_reason=side,
        messages=messages,
        reply=reply,
        **changes,
    )
    assert store.record_turn(turn, turn_hashes(messages, reply, found.history))
    return turn_id, found


def next_text(turn: StoredTurn) -> list[Any] | None:
    """The contents of what followed a turn."""
    return None if turn.next_state is None else [message["content"] for message in turn.next_state]
