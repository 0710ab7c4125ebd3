"""Prompts of recorded turns, rendered as the engine did it, so that one with a hint differs by the hint alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from ...trainer.prompts import prompt_problem
from ...types import is_parts, message_text
from ..engines.messages import as_templates_read
from ..records import NewTurn

Messages = list[dict[str, Any]]


class Renders(Protocol):
    """What a trainer renders with."""

    processing_class: Any
    chat_template: str | None
    chat_template_kwargs: dict[str, Any]


def render(trainer: Renders, messages: Sequence[Mapping[str, Any]], turn: NewTurn | None = None) -> list[int]:
    """The ids of a conversation, with the tools and the template settings of a turn, if there is one."""
    own = turn.sampling.get("chat_template_kwargs") if turn is not None else None
    kwargs = {**trainer.chat_template_kwargs, **(own or {})}
    rendered = trainer.processing_class.apply_chat_template(
        list(messages),
        tools=(turn.tools if turn is not None else None) or None,  # some templates have a heading for no tools, too
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **kwargs,
    )
    return list(rendered["input_ids"])


def matching_prompt(trainer: Renders, turn: NewTurn) -> Messages | None:
    """The messages of a turn in the form whose rendering is its recorded prompt; `None` where there is no such form.

    Engines read arguments of tool calls, which clients send as JSON in text, and join parts of text.
    """
    for messages in _forms(turn.messages):
        if prompt_problem(messages, images=False) is not None:
            continue
        try:
            ids = render(trainer, messages, turn)
        except Exception:  # whatever a template raises of messages that it does not know
            continue
        if tuple(ids) == turn.prompt_ids:
            return messages
    return None


def _forms(messages: Messages) -> Iterator[Messages]:
    """The messages as engines read them, and as they came."""
    read = [_read(message) for message in messages]
    yield read
    if read != messages:
        yield messages


def _read(message: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in message.items() if value is not None or name == "content"}
    content = found.get("content")
    if isinstance(content, list) and is_parts(content) and all(part["type"] == "text" for part in content):
        found["content"] = message_text(found)
    return as_templates_read(found)
