"""Messages as chat templates read them."""

import json
from collections.abc import Mapping
from typing import Any


def as_templates_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose tool calls have their arguments as values. Clients send them as JSON in text, which templates
    would write as a text within JSON. Arguments that are no JSON stay as they are.
    """
    found = dict(message)
    if found.get("tool_calls"):
        found["tool_calls"] = [_read_call(call) for call in found["tool_calls"]]
    return found


def _read_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        values = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": values}}
