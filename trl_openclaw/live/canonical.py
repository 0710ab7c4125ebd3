"""Messages reduced to what a client sends back unchanged, and hashes of them. No input or output."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..types import Message, message_text
from .records import TurnHashes

NO_HISTORY = b""
"""The hash of no messages."""

TELLING_BYTES = 90
"""Of a reply in canonical form: with this many, about 80 letters and its role, nobody says it twice by chance."""

_BETWEEN = "\x1f"  # white space to `split`, so no text has it
_SYSTEM_ROLES = ("system", "developer")
_THINKING = re.compile(r"^(?:\s*<think>)?.*?</think>", re.DOTALL)


def is_system(message: Message) -> bool:
    """Whether a message is an instruction that clients change at will, such as a prompt with the date."""
    return message.get("role") in _SYSTEM_ROLES


def canonical(message: Message) -> bytes:
    """A message as bytes that do not change with how a client writes it.

    White space, the ids of tool calls, the spelling of their arguments and reasoning do not count.
    """
    role = message.get("role")
    text = message_text(message)
    if role == "assistant" and "</think>" in text:
        text = _THINKING.sub("", text, count=1)
    kept = [str(role), str(message.get("name") or ""), " ".join(text.split())]
    if calls := _calls(message.get("tool_calls")):
        kept.append(json.dumps(calls, default=str))
    return _BETWEEN.join(kept).encode("utf-8", "surrogatepass")


def _calls(calls: Any) -> list[Any]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return []
    functions = [call.get("function") if isinstance(call, Mapping) else None for call in calls]
    return [
        [function.get("name"), _arguments(function.get("arguments"))] if isinstance(function, Mapping) else str(call)
        for function, call in zip(functions, calls, strict=True)
    ]


def _arguments(arguments: Any) -> str:
    """Arguments by their values. None may be written as nothing, as an empty text or as an empty object."""
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments) if arguments.strip() else {}
        return json.dumps(_values({} if arguments is None else arguments), sort_keys=True, default=str)
    except (ValueError, RecursionError):
        return str(arguments).strip()


def _values(value: Any) -> Any:
    """JSON in which 1.0 is 1, as clients in JavaScript write it."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: _values(item) for name, item in value.items()}
    return [_values(item) for item in value] if isinstance(value, list) else value


def extended(history: bytes, messages: Iterable[Message]) -> bytes:
    """The hash of a history that goes on with these messages. Instructions do not count."""
    for message in messages:
        if not is_system(message):
            history = hashlib.sha256(history + canonical(message)).digest()
    return history


def turn_hashes(messages: Sequence[Message], reply: Message, history: bytes | None = None) -> TurnHashes:
    """By what a later request finds the turn that answered these messages with this reply.

    Args:
        messages: The request's messages.
        reply: The assistant message.
        history: The hash of `messages`, where it is known already (see `Match.history`).
    """
    if history is None:
        history = extended(NO_HISTORY, messages)
    return TurnHashes(extended(history, [reply]), tail_hash(messages, reply), reply_hash(reply))


def tail_hash(messages: Sequence[Message], reply: Message) -> bytes:
    """The hash of the last message before a reply, and the reply."""
    last = next((message for message in reversed(messages) if not is_system(message)), None)
    return extended(NO_HISTORY, [reply] if last is None else [last, reply])


def reply_hash(reply: Message) -> bytes | None:
    """The hash of a reply alone; `None` where it is too short to be known again by itself."""
    form = canonical(reply)
    return hashlib.sha256(form).digest() if len(form) >= TELLING_BYTES else None
