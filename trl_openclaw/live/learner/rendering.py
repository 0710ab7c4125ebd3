"""Prompts of recorded turns, rendered as the engine did it, so that one with a hint differs by the hint alone."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

from ...trainer.prompts import prompt_problem
from ...types import is_parts, message_text
from ..engines.messages import as_templates_read
from ..records import NewTurn, StoredTurn

Messages = list[dict[str, Any]]

_CLOCK = "strftime_now"
"""What templates call that print the date."""

_OTHER_CLOCK = (
    "{%- macro strftime_now(format) -%}{%- set told = namespace(text=format) -%}"
    "{%- for name, value in strftime_then.items() -%}{%- set told.text = told.text | replace(name, value) -%}"
    "{%- endfor -%}{{ told.text }}{%- endmacro -%}"
)
"""In front of a template, this tells another time than now. Templates are given plain data, and no functions."""

_DIRECTIVES = ("%-d", "%-m", *(f"%{letter}" for letter in "aAbBcdeHIjmMpSuUwWxXyYzZ"), "%%")


class Renders(Protocol):
    """What a trainer renders with."""

    processing_class: Any
    chat_template: str | None
    chat_template_kwargs: dict[str, Any]


def render(
    trainer: Renders,
    messages: Sequence[Mapping[str, Any]],
    turn: NewTurn | None = None,
    clock: datetime | None = None,
) -> list[int]:
    """The ids of a conversation, with the tools and the template settings of a turn, if there is one.

    Args:
        trainer: What to render with.
        messages: The conversation.
        turn: The turn.
        clock: What a template that prints the date shall take for now; `None` for the time that it is.
    """
    own = turn.sampling.get("chat_template_kwargs") if turn is not None else None
    kwargs = {**trainer.chat_template_kwargs, **(own or {})}
    tools = (turn.tools if turn is not None else None) or None  # some templates have a heading for no tools, too
    template = trainer.chat_template
    if clock is not None:
        template = _OTHER_CLOCK + trainer.processing_class.get_chat_template(template, tools)
        kwargs["strftime_then"] = {name: clock.strftime(name) for name in _DIRECTIVES}
    rendered = trainer.processing_class.apply_chat_template(
        list(messages),
        tools=tools,
        chat_template=template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **kwargs,
    )
    return list(rendered["input_ids"])


def matching_prompt(trainer: Renders, turn: StoredTurn) -> tuple[Messages, datetime | None] | None:
    """The form of a turn's messages, and the time, whose rendering is its recorded prompt; `None` where there is none.

    Engines read arguments of tool calls, which clients send as JSON in text, and join parts of text. They also tell the
    time to templates that ask for it, so these are rendered with the turn's own date.
    """
    for messages in _forms(turn.messages):
        if prompt_problem(messages, images=False) is not None:
            continue
        for clock in _clocks(trainer, turn):
            try:
                ids = render(trainer, messages, turn, clock)
            except Exception:  # whatever a template raises of messages that it does not know
                break
            if tuple(ids) == turn.prompt_ids:
                return messages, clock
    return None


def _clocks(trainer: Renders, turn: StoredTurn) -> list[datetime | None]:
    """When the prompt may have been rendered, as far as its template cares: on the day of the recording here, or on the
    day before or after, by the engine's own time zone or since the reply went on past midnight."""
    template = trainer.chat_template or getattr(trainer.processing_class, "chat_template", None)
    if _CLOCK not in str(template):
        return [None]
    recorded = datetime.fromtimestamp(turn.created)
    return [recorded, recorded - timedelta(days=1), recorded + timedelta(days=1)]


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
