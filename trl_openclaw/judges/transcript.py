"""A turn as text for a judge: every part under a heading that carries the marker, so that no part can forge one."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from ..clipping import clip, divide, left_out
from ..types import Message, Messages, NextState, Turn, valid_text
from .images import IMAGE_TYPES, Images, UnreadableError, count_images

_ROLES = ("system", "developer", "user", "assistant", "tool")
_THINKING = ("reasoning_content", "reasoning", "thinking")
_MAX_NAME = 64


def render_transcript(
    turn: Turn, next_state: NextState, marker: str, max_chars: int, images: Images | None = None
) -> str:
    """What came before the reply, the reply, and what followed it.

    Tools' messages are headed by the tool's name, calls are shown as the assistant made them, and a next state of
    several messages (`info["messages"]`) is shown one by one. Of the assistant's thinking, where a message keeps it
    apart from its text, only that before the reply to judge is shown, under a heading of its own.

    Args:
        turn: The turn to judge.
        next_state: What followed it.
        marker: Goes into every heading.
        max_chars: Longest transcript, headings of the last two parts aside. Whichever of the three parts is too long
            loses its middle, and says how much it lost; of several messages that followed, each long one does.
        images: Takes the images, those that followed first, then those closest to the reply. Without it, and for those
            that do not fit or cannot be read, a line says that there is one.

    Raises:
        UnreadableError: When what followed holds no text and no image that is shown, or a part that cannot be read. An
            empty text is readable.
    """
    writer = _Writer(turn, marker, images)
    followed = writer.followed(next_state)
    reply = writer.render(turn.completion, "the reply to judge", "assistant", thinking=True)
    before = writer.render(turn.prompt, "before the reply", "prompt")
    room = divide([len(before), len(reply), sum(len(body) for _, body in followed)], max_chars)
    bodies = divide([len(body) for _, body in followed], room[2])
    parts = [writer.clip(before, room[0]), writer.clip(reply, room[1])]
    if turn.truncated:
        parts[1] += "\n" + writer.heading("the reply was cut off here by its length limit")
    for (heading, body), share in zip(followed, bodies, strict=True):
        parts.append(f"{heading}\n{writer.clip(body, share)}")
    return "\n\n".join(part for part in parts if part)


class _Writer:
    """Writes messages as text under headings."""

    def __init__(self, turn: Turn, marker: str, images: Images | None):
        self.marker, self.images = marker, images
        spoken = [part for part in (turn.prompt, turn.completion) if not isinstance(part, str)]
        self.called = _called_names(message for messages in spoken for message in messages)

    def heading(self, text: str) -> str:
        return f"--- {self.marker}: {text} ---"

    def clip(self, text: str, max_chars: int) -> str:
        def note(missing: str) -> str:
            images = count_images(missing)
            counted = f"{images} image{'s' * (images != 1)} and " if images else ""
            return self.heading(counted + left_out(missing))

        return clip(text, max_chars, note)

    def render(self, messages: str | Messages, title: str, role: str, *, thinking: bool = False) -> str:
        """Messages that no verdict depends on: what cannot be read is said to be there.

        Written from the last to the first, so that images close to the reply find room first.
        """
        if isinstance(messages, str):
            messages = [{"role": role, "content": messages}]
        blocks = []
        for message in reversed(messages):
            block = f"{self.heading(f'{title} ({self.who(message, role)})')}\n{self.body(message)}"
            if thinking and (thoughts := _thinking(message)):
                block = f"{self.heading('what the assistant thought before the reply')}\n{thoughts}\n\n{block}"
            blocks.append(block)
        return "\n\n".join(reversed(blocks))

    def followed(self, next_state: NextState) -> list[tuple[str, str]]:
        """Heading and body of everything that followed, the messages one by one."""
        messages = _messages_in(next_state)
        parts = [part for message in messages for part in _parts(message.get("content"))]
        bodies = [[self.part(part, needed=True) for part in _parts(message.get("content"))] for message in messages]
        shown = [text for body in bodies for text in body]
        says = [text for part, text in zip(parts, shown, strict=True) if _is_text(part) or count_images(text)]
        if len(says) < len(parts) and not any(text.strip() for text in says):
            kinds = ", ".join(sorted({_label(part.get("type")) for part in parts if not _is_text(part)}))
            why = "this judge is given text only" if self.images is None else "this judge is given text and images only"
            raise UnreadableError(f"The next state holds no text but {kinds}, and {why}.")
        return [
            (self.heading(f"what followed ({self.who(message, next_state.role)})"), _joined(body))
            for message, body in zip(messages, bodies, strict=True)
        ]

    def who(self, message: Message, default: str) -> str:
        """A message's role, with the name of a tool."""
        role = message.get("role")
        role = role if role in (*_ROLES, default) else "other"
        name = message.get("name") or self.called.get(str(message.get("tool_call_id")))
        return f"{role} {_label(name)}" if role == "tool" and name else str(role)

    def body(self, message: Message) -> str:
        try:
            lines = [self.part(part) for part in _parts(message.get("content"))]
        except UnreadableError as error:
            lines = [f"[{error}]"]
        calls = message.get("tool_calls") or ()
        return _joined([*lines, *(f"[calls {_call(call)}]" for call in (calls if _is_list(calls) else [calls]))])

    def part(self, part: Any, *, needed: bool = False) -> str:
        """A part of a message as text: its text, the place of an image, or a line that says what is not shown.

        Args:
            needed: Whether to raise `UnreadableError` for what is malformed, rather than say so.
        """
        if _is_text(part):
            return valid_text(part["text"])
        try:
            if not isinstance(part, Mapping) or not isinstance(part.get("type"), str) or part["type"] == "text":
                raise UnreadableError(f"a part of type {type(part).__name__} without a type, or without its text")
            if self.images is None or part["type"] not in IMAGE_TYPES:
                reason = f"this judge is given text{' and images' * (self.images is not None)} only"
            elif place := self.images.place(part):
                return place
            else:
                reason = f"only {self.images.max_images} images are"
        except UnreadableError as error:
            if needed:
                raise UnreadableError(f"The next state has a part that cannot be read: {error}.") from error
            reason = str(error)
        kind = part.get("type") if isinstance(part, Mapping) else None
        return valid_text(f"[{_label(kind)}] (not shown: {reason})")


def _messages_in(next_state: NextState) -> Messages:
    """The messages a next state is made of, where it says so, else one message of its content."""
    messages = next_state.info.get("messages")
    if _is_list(messages) and len(messages) > 1 and all(_is_message(message) for message in messages):
        return messages
    return [{"role": next_state.role, "content": next_state.content}]


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("role") in _ROLES and "content" in value


def _parts(content: Any) -> list[Any]:
    """The parts of a message's content; a text is one part."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not _is_list(content):
        raise UnreadableError(
            f"The content of a message is neither text nor a list of parts, but {type(content).__name__}."
        )
    return list(content)


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(line for line in lines if line.strip()).strip() or "(empty)"


def _thinking(message: Message) -> str:
    texts = (message.get(name) for name in _THINKING)
    return next((valid_text(text.strip()) for text in texts if isinstance(text, str) and text.strip()), "")


def _called_names(messages: Any) -> dict[str, Any]:
    """The names of called tools by the calls' ids, for answers that only have the id."""
    calls = [call for message in messages if _is_list(found := message.get("tool_calls")) for call in found]
    return {
        str(call["id"]): _function(call).get("name") for call in calls if isinstance(call, Mapping) and call.get("id")
    }


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", call)
    return function if isinstance(function, Mapping) else {}


def _call(call: Any) -> str:
    function = _function(call) if isinstance(call, Mapping) else {}
    if not function:
        return f"something that cannot be read: {valid_text(str(call))}"
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        try:
            arguments = json.dumps(arguments, ensure_ascii=False, default=str)
        except (TypeError, ValueError, RecursionError):
            arguments = "(arguments that cannot be written as JSON)"
    return valid_text(f"{function.get('name')} {arguments}").strip()


def _label(name: Any) -> str:
    """A name that others gave, made fit for a heading."""
    return re.sub(r"[^\w.:/-]+", "_", str(name or "part")[: 2 * _MAX_NAME])[:_MAX_NAME]
