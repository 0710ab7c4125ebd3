"""What a policy sampled, as messages: TRL's parser, kept from failing by what a policy may write."""

import json
import pickle
import re
from collections.abc import Mapping
from typing import Any

from trl.chat_template_utils import parse_response

from ..types import Message, ToolResult, is_parts, message_text, valid_text

MAX_DEPTH = 50
"""Arguments of a tool call may nest this deep; what nests deeper is no call."""

_LITERAL = re.compile(r"(?:\\[^a-zA-Z0-9]|[^\\\[\](){}.*+?^$|])+")


def parse_turn(tokenizer: Any, ids: list[int], **context: Any) -> dict[str, Any]:
    """TRL's `parse_response`, for any ids: a call that it cannot handle is a text without a call.

    Such a text keeps its control tokens, which show that a call was meant. All texts lose what no tokenizer can encode,
    such as half an emoji, which JSON can spell.

    Args:
        tokenizer: With a response template.
        ids: What was sampled in one turn.
        context: What TRL hands on: the ids before it, and the tools.
    """
    try:
        message = _cleaned(parse_response(tokenizer, ids, **context), MAX_DEPTH)
    except RecursionError:
        message = None
    if message is not None and message.get("tool_calls") and all(map(_is_call, message["tool_calls"])):
        return message
    said, pattern = tokenizer.decode(ids), call_pattern(tokenizer)
    if message is None or message.get("tool_calls") or (pattern is not None and pattern.search(said)):
        message = {"role": "assistant", "content": valid_text(said.removesuffix(tokenizer.eos_token or ""))}
    return message


def _is_call(call: Any) -> bool:
    """Whether TRL can run it, or say why not: it reads these fields without looking."""
    if not isinstance(call, Mapping) or "type" not in call:
        return False
    function = call.get("function")
    return call["type"] != "function" or (isinstance(function, Mapping) and isinstance(function.get("name"), str))


def _cleaned(value: Any, depth: int) -> Any:
    """The same value with texts that can be encoded."""
    if depth < 0:
        raise RecursionError
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, Mapping):
        return {_cleaned(name, depth): _cleaned(entry, depth - 1) for name, entry in value.items()}
    if isinstance(value, list):
        return [_cleaned(entry, depth - 1) for entry in value]
    return value


def as_answer(result: Any, *, shows_images: bool) -> str | list[Any]:
    """What a tool gave, as any template and tokenizer takes it: text, or parts.

    Args:
        result: Anything. A plain list is data and becomes text, as does everything else that is not parts. What a
            `ToolResult` knows is kept, but for what no other process could be sent.
        shows_images: Whether the policy can be shown other parts than text. If not, they are named.
    """
    if isinstance(result, ToolResult):
        info = {name: value for name, value in result.info.items() if _can_be_sent(value)}
        return ToolResult(result, satisfied=result.satisfied, info=info)
    if not isinstance(result, list) or not is_parts(result):
        return valid_text(str(result))
    if not shows_images and any(part["type"] != "text" for part in result):
        return message_text({"content": result})
    return [_cleaned(part, MAX_DEPTH) for part in result]


def _can_be_sent(value: Any) -> bool:
    """Whether something can go to another process, where the tables are written."""
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def call_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """What shows that a text was meant to be a tool call, by the tokenizer's response template; `None` if unknown.

    A tag shows it by itself. Where a call is plain JSON, all its fields must be there.
    """
    template = getattr(tokenizer, "response_template", None)
    field = template.get("fields", {}).get("tool_calls", {}) if isinstance(template, Mapping) else {}
    opening = re.escape(field["open"]) if "open" in field else field.get("open_pattern", "")
    literals = [found for found in _LITERAL.findall(re.sub(r"\(\?(?:P<\w+>|:)", "(", opening)) if len(found) > 2]
    if not literals:
        return None
    if literals[0].startswith(r"\{"):
        return re.compile(r"^\s*" + ".*".join(literals), re.DOTALL)
    return re.compile(literals[0])


def as_logged(completion: Any) -> Any:
    """A completion for a table whose column has one type: contents are text, and the arguments of calls are JSON."""
    return completion if isinstance(completion, str) else [_logged_message(message) for message in completion]


def _logged_message(message: Message) -> dict[str, Any]:
    content = message.get("content")
    shown: dict[str, Any] = {"role": str(message.get("role"))}
    shown["content"] = valid_text(content if isinstance(content, str) else "" if content is None else str(content))
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [{"type": "function", "function": _logged_call(call)} for call in calls]
    return shown


def _logged_call(call: Any) -> dict[str, str]:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    arguments = function.get("arguments")
    named = arguments if isinstance(arguments, Mapping) else {"": arguments}  # the table's printer reads names
    shown = json.dumps(named, ensure_ascii=False, default=str)
    return {"name": valid_text(str(function.get("name"))), "arguments": valid_text(shown)}
