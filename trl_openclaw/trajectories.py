"""From what an agent did to its turns: which tokens the policy wrote, and what followed each turn. Free of torch.

A trajectory is one completion in which the policy spoke several times, with tools, an environment or a user answering
in between. Its tokens are never rendered again: where a turn begins and ends is read from the mask that sampling left.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .types import Message, Messages, NextState, Turn, is_parts, message_text

TEMPERATURES = "temperatures"
"""What a rollout function may give besides: at which temperature each row is scored and trained, relative to the
trainer's own. Its log-probs are taken at the same."""

TRAJECTORY_COLUMN = "_openclaw_trajectory"
"""The column of a sampled row with its messages, where a rollout function led it and TRL knows them as one text."""

UNREAD_CALL = "The tool call could not be read, so no tool was run."
"""What follows a turn whose tool call is malformed."""

UNANSWERED_CALL = "The tool call was not answered: there was no room for an answer, or no further call was allowed."
"""What follows a last turn with a tool call. Whether the call was right is not known."""

_UNREAD_CALL_WISH = "Write the tool call exactly in the format that was asked for, as complete and valid JSON."


@dataclass(frozen=True)
class Span:
    """Tokens of a completion: those from `start` on, up to `stop` and without it."""

    start: int
    stop: int


def sampled_spans(length: int, tool_mask: Sequence[int] | None = None) -> list[Span]:
    """Where the policy's turns are: the runs of tokens that it sampled.

    Args:
        length: Tokens of the completion.
        tool_mask: 1 for each sampled token, 0 for each token of tools, environments and users; `None` if all are
            sampled.

    Returns:
        Spans in order; every sampled token is in one of them, and no other token in any.
    """
    mask = [True] * length if tool_mask is None else [bool(value) for value in tool_mask]
    edges = [i for i in range(length) if mask[i] != (i > 0 and mask[i - 1])]
    return [Span(a, b) for a, b in zip(edges[::2], [*edges[1::2], length], strict=False)]


def split_trajectory(
    prompt: str | Messages,
    completion: str | Messages,
    *,
    truncated: bool = False,
    calls_tools: bool = False,
    call_pattern: re.Pattern[str] | None = None,
) -> list[Turn]:
    """The policy's turns in a completion, each with all that came before it and what followed it.

    Assistant messages without anything in between are one turn. Everything between two turns is one next state, such as
    the answers to parallel tool calls. The last turn may have none.

    Args:
        prompt: What the completion answers.
        completion: Text, or messages. What stands before the first assistant message belongs to the prompt.
        truncated: Whether the completion's last token does not end it. A turn that a tool has answered was not cut.
        calls_tools: Whether the policy has tools. A last turn whose call nobody answered, or could parse, then has a
            next state that says so.
        call_pattern: What shows that a text was meant to be a call.

    Returns:
        At least one turn.
    """
    if isinstance(completion, str) or all(message.get("role") == "assistant" for message in completion):
        turn = Turn(prompt, completion, truncated=truncated)
        return [_with_failed_call(turn, call_pattern) if calls_tools else turn]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    turns: list[Turn] = []
    for context, spoken, followed in _blocks(completion):
        state = next_state_of(followed)
        turns.append(Turn([*before, *context], spoken, state, step=len(turns)))
    if not turns:
        return [Turn(prompt, completion, truncated=truncated)]
    answered = turns[-1].next_state is not None and turns[-1].next_state.role == "tool"
    last = replace(turns[-1], truncated=truncated and not answered)
    return [*turns[:-1], _with_failed_call(last, call_pattern) if calls_tools else last]


def _blocks(messages: Messages) -> Iterator[tuple[list[Message], list[Message], list[Message]]]:
    """What came before each turn, what was said in it, and what followed it."""
    at = 0
    while at < len(messages):
        start = _skip(messages, at, assistant=False)
        stop = _skip(messages, start, assistant=True)
        at = _skip(messages, stop, assistant=False)
        if stop > start:
            yield list(messages[:start]), list(messages[start:stop]), list(messages[stop:at])


def _skip(messages: Messages, at: int, *, assistant: bool) -> int:
    """The first message from `at` on that is not the assistant's, or is."""
    while at < len(messages) and (messages[at].get("role") == "assistant") is assistant:
        at += 1
    return at


def next_state_of(messages: Sequence[Message]) -> NextState | None:
    """One next state of all messages that followed a turn, or `None` where there are none.

    A tool that answers with a [`~trl_openclaw.types.ToolResult`] says whether it went well. Of several, the whole went
    well if all did, and badly if one did. `info` has the messages, if they are several, and what the answers know.
    """
    if not messages:
        return None
    role: Literal["user", "tool"] = "user" if all(message.get("role") == "user" for message in messages) else "tool"
    known = [getattr(message.get("content"), "satisfied", None) for message in messages]
    satisfied = False if False in known else True if all(known) else None
    infos = [getattr(message.get("content"), "info", {}) for message in messages]
    info: dict[str, Any] = {name: value for found in infos for name, value in found.items()}
    wishes = [found["wish"] for found in infos if found.get("wish")]
    if wishes:
        info["wish"] = "\n".join(dict.fromkeys(wishes))
    if len(messages) == 1:
        return NextState(_content(messages[0]), role, satisfied, info)
    return NextState(_joined(messages), role, satisfied, {**info, "messages": list(messages)})


def _content(message: Message) -> str | list[Mapping[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) and is_parts(content) else message_text(message)


def _joined(messages: Sequence[Message]) -> str | list[Mapping[str, Any]]:
    """Contents under the names of who said them: text, or parts where one of them has more than text."""
    blocks = [(f"[{message.get('name') or message.get('role')}]", _content(message)) for message in messages]
    if all(isinstance(content, str) for _, content in blocks):
        return "\n\n".join(f"{heading}\n{content}" for heading, content in blocks)
    parts: list[Mapping[str, Any]] = []
    for heading, content in blocks:
        parts.append({"type": "text", "text": heading})
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _with_failed_call(turn: Turn, pattern: re.Pattern[str] | None) -> Turn:
    """The turn, with a next state where it meant to call a tool and nothing came back."""
    if turn.next_state is not None or isinstance(turn.completion, str):
        return turn
    if any(message.get("tool_calls") for message in turn.completion):
        return replace(turn, next_state=NextState(UNANSWERED_CALL, "tool"))
    if turn.truncated or pattern is None or not pattern.search(turn.reply):
        return turn
    return replace(turn, next_state=NextState(UNREAD_CALL, "tool", satisfied=False, info={"wish": _UNREAD_CALL_WISH}))
