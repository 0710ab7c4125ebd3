"""A turn as text for a judge: every part under a heading that carries the marker, so that no part can forge one."""

import json
from collections.abc import Sequence
from typing import Any

from ..types import Message, NextState, Turn, message_text

_ROLES = ("system", "developer", "user", "assistant", "tool")


def render_transcript(turn: Turn, next_state: NextState, marker: str, max_chars: int) -> str:
    """What came before the reply, the reply, and what followed it.

    Args:
        turn: The turn to judge.
        next_state: What followed it.
        marker: Goes into every heading.
        max_chars: Longest transcript, headings of the last two parts aside. Whichever of the three parts is too long
            loses its middle, and says how many characters it lost.
    """
    before = _render(turn.prompt, marker, "before the reply", "prompt")
    reply = _render(turn.completion, marker, "the reply to judge", "assistant")
    followed = next_state.text.strip() or "(empty)"
    shares = _shares([len(before), len(reply), len(followed)], max_chars)
    parts = [_clip(text, share, marker) for text, share in zip((before, reply, followed), shares, strict=True)]
    if turn.truncated:
        parts[1] += "\n" + _heading(marker, "the reply was cut off here by its length limit")
    parts[2] = _heading(marker, f"what followed ({next_state.role})") + "\n" + parts[2]
    return "\n\n".join(part for part in parts if part)


def is_readable(next_state: NextState) -> bool:
    """Whether a judge can read anything here. Content of other kinds without any text is not the same as nothing."""
    if isinstance(next_state.content, str):
        return True
    texts = [part.get("text") or "" for part in next_state.content if part.get("type") == "text"]
    return len(texts) == len(next_state.content) or any(text.strip() for text in texts)


def _render(messages: str | Sequence[Message], marker: str, title: str, role: str) -> str:
    if isinstance(messages, str):
        messages = [{"role": role, "content": messages}]
    blocks = []
    for message in messages:
        name = message.get("role")
        name = name if name in (*_ROLES, role) else "other"
        blocks.append(f"{_heading(marker, f'{title} ({name})')}\n{_body(message)}")
    return "\n\n".join(blocks)


def _body(message: Message) -> str:
    lines = [message_text(message).strip()]
    lines += [f"[calls {_call(call)}]" for call in message.get("tool_calls") or ()]
    return "\n".join(line for line in lines if line) or "(empty)"


def _call(call: Any) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, default=str)
    return f"{function.get('name')} {arguments}".strip()


def _heading(marker: str, text: str) -> str:
    return f"--- {marker}: {text} ---"


def _shares(lengths: Sequence[int], total: int) -> list[int]:
    """Divide `total` so that short parts stay whole and long ones share what is left."""
    shares = list(lengths)
    left = total
    for done, index in enumerate(sorted(range(len(lengths)), key=lambda i: lengths[i])):
        shares[index] = min(lengths[index], left // (len(lengths) - done))
        left -= shares[index]
    return shares


def _clip(text: str, limit: int, marker: str) -> str:
    if len(text) <= limit:
        return text
    head = text[: limit - limit // 2]
    tail = text[len(text) - limit // 2 :]
    return f"{head}\n{_heading(marker, f'{len(text) - limit} characters left out here')}\n{tail}"
