"""Checks on prompts, so that a malformed one is named with its row before TRL stumbles over it deep inside."""

from collections.abc import Iterable
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
_MEANT = {**{role: role for role in ROLES}, "human": "user", "gpt": "assistant"}
_WANTED = "text, or a list of messages with `role` and `content`"


def first_problem(prompts: Iterable[Any], *, images: bool) -> str | None:
    """What is wrong with the first malformed prompt, with its row; `None` when all are well-formed and of one kind.

    Args:
        prompts: Prompts as TRL will get them.
        images: Whether the policy may be able to read images.
    """
    kind = None
    for row, prompt in enumerate(prompts):
        problem = prompt_problem(prompt, images=images)
        if problem is None and kind not in (None, type(prompt)):
            problem = "`prompt` is text in some rows and a list of messages in others; use one of them throughout"
        if problem is not None:
            return f"row {row}: {problem}"
        kind = type(prompt)
    return None


def prompt_problem(prompt: Any, *, images: bool) -> str | None:
    """What is wrong with one prompt, or `None`. A last message of the assistant is fine: TRL opens a new turn after it.

    Args:
        prompt: Text, or a list of messages.
        images: Whether the policy may be able to read images.
    """
    if not isinstance(prompt, str | list):
        return f"`prompt` must be {_WANTED}, got {_short(prompt)}"
    if not prompt:
        return f"`prompt` is empty; it must be {_WANTED}"
    if isinstance(prompt, str):
        return None
    problems = (_message_problem(f"prompt[{i}]", message, images) for i, message in enumerate(prompt))
    return next((problem for problem in problems if problem is not None), None)


def _message_problem(name: str, message: Any, images: bool) -> str | None:
    if not isinstance(message, dict):
        return f"`{name}` must be a message with `role` and `content`, got {_short(message)}"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role.strip():
        return f"`{name}` has no `role` such as 'user', only {_fields(message)}"
    meant = _MEANT.get(role.strip().lower(), role)
    if role != meant:
        return f"`{name}` has the role {role!r}, which chat templates do not know; use {meant!r}"
    if "content" not in message or (content is None and not message.get("tool_calls")):
        return f"`{name}` has no `content`, only {_fields(message)}"
    if content is None or isinstance(content, str):
        return None
    if isinstance(content, list):
        problems = (_part_problem(f"{name}['content'][{i}]", part, images) for i, part in enumerate(content))
        return next((problem for problem in problems if problem is not None), None)
    return f"`{name}['content']` must be text or a list of parts, got {_short(content)}"


def _part_problem(name: str, part: Any, images: bool) -> str | None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        return f"`{name}` must be a part with a `type`, such as 'text', got {_short(part)}"
    if part["type"] == "text":
        is_text = isinstance(part.get("text"), str)
        return None if is_text else f"`{name}['text']` must be text, got {_short(part.get('text'))}"
    if images:
        return None
    return f"`{name}` is of type {part['type']!r}, but the policy's tokenizer reads text only; leave such rows out"


def _fields(message: dict[str, Any]) -> str:
    """The fields that hold something; `datasets` fills in `None` for a field that only other messages have."""
    return ", ".join(repr(name) for name, value in message.items() if value is not None) or "nothing"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
