"""A reply as it comes in pieces: what the client gets of it, and what is recorded."""

import math
from typing import Any

from ...errors import EngineError
from ..engines import Delta

_MAX_ID = 2**31 - 1
_MAX_CALLS = 1024
_SLACK = 1e-3  # rounding may lift a log-prob a little above 0


class Reply:
    """Collects the pieces of one reply."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.tool_calls: list[dict[str, Any]] = []
        self.prompt_ids: list[int] = []
        self.completion_ids: list[int] = []
        self.logprobs: list[float] = []
        self.temperature = 1.0
        self.finish_reason: str | None = None

    def add(self, piece: Delta) -> None:
        """Append a piece."""
        self.content += piece.content
        self.reasoning += piece.reasoning
        for call in piece.tool_calls:
            self._add_call(call)
        self.prompt_ids = piece.prompt_ids or self.prompt_ids
        self.completion_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.temperature = piece.temperature
        self.finish_reason = piece.finish_reason or self.finish_reason

    def _add_call(self, piece: dict[str, Any]) -> None:
        if not isinstance(piece.get("index"), int) or not 0 <= piece["index"] < _MAX_CALLS:
            raise EngineError("broken", f"The engine's reply has a tool call number {str(piece.get('index'))[:20]}.")
        while len(self.tool_calls) <= piece["index"]:
            self.tool_calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
        call, function = self.tool_calls[piece["index"]], piece.get("function") or {}
        if not isinstance(function, dict) or not all(
            isinstance(text, str | None) for text in (piece.get("id"), function.get("name"), function.get("arguments"))
        ):
            raise EngineError("broken", f"The engine's reply has a tool call that is none: {str(piece)[:80]}.")
        call["id"] = piece.get("id") or call["id"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""

    def __bool__(self) -> bool:
        """Whether anything was sampled."""
        return bool(self.content or self.reasoning or self.tool_calls or self.completion_ids)

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            found["tool_calls"] = self.tool_calls
            found["content"] = self.content or None
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        return found

    @property
    def usage(self) -> dict[str, int]:
        """What it cost, in tokens."""
        prompt, completion = len(self.prompt_ids), len(self.completion_ids)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    @property
    def problem(self) -> str | None:
        """Why its ids cannot be trained on, in two words; `None` when they can."""
        if not self.prompt_ids:
            return "no prompt ids"
        if not self.completion_ids:
            return "no ids"
        if len(self.logprobs) != len(self.completion_ids):
            return "missing log-probs"
        if not all(_within(ids, {int}, 0, _MAX_ID) for ids in (self.prompt_ids, self.completion_ids)):
            return "wrong ids"
        if not _within(self.logprobs, {int, float}, -math.inf, _SLACK) or not all(map(math.isfinite, self.logprobs)):
            return "wrong log-probs"
        return None


def _within(values: list[Any], kinds: set[type], least: float, most: float) -> bool:
    """Whether all values, at least one, are numbers between two. Prompts are long, so no loop of Python's own."""
    return set(map(type, values)) <= kinds and min(values) >= least and max(values) <= most
