"""From sampled ids to what a client sees, one id at a time: text, thinking and tool calls."""

import json
import uuid
from collections.abc import Sequence
from typing import Any

from .base import Delta

_HALF = "\ufffd"  # how decoders show bytes that are no whole character
_MAX_PENDING = 8  # no character has more bytes than 4: what is not whole after so many ids never will be
_REASONING = ("reasoning_content", "reasoning", "thinking")


class TextStream:
    """Decodes ids as they come. Together the pieces are the decoded whole; no piece ends in half a character.

    Args:
        tokenizer: What decodes.
        keep_special: Whether special tokens are written out.
    """

    def __init__(self, tokenizer: Any, *, keep_special: bool):
        self._tokenizer, self._keep_special = tokenizer, keep_special
        self._ids: list[int] = []
        self._from = 0  # the ids before are not needed any more to know how the next ones are written
        self._read = 0  # the ids before are written

    def feed(self, token: int) -> str:
        """The text that an id completes, possibly none."""
        self._ids.append(token)
        text = self._new_text()
        if not text or (text.endswith(_HALF) and len(self._ids) - self._read < _MAX_PENDING):
            return ""
        self._from, self._read = self._read, len(self._ids)
        return text

    def end(self) -> str:
        """The text of the ids that completed none."""
        return self._new_text() if self._read < len(self._ids) else ""

    def _new_text(self) -> str:
        known, whole = self._decode(self._ids[self._from : self._read]), self._decode(self._ids[self._from :])
        return whole[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=not self._keep_special, clean_up_tokenization_spaces=False
        )


class StopCutter:
    """Cuts a text at the first of some stop texts, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """What is known to stand before any stop text."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped, known = True, self._held[: min(found)]
            self._held = ""
            return known
        keep = self._beginning()
        known, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return known

    def end(self) -> str:
        """What was held back for nothing."""
        held, self._held = self._held, ""
        return held

    def _beginning(self) -> int:
        """How many of the last characters may begin a stop text."""
        most = min(max(map(len, self._stops), default=1) - 1, len(self._held))
        ends = (size for size in range(most, 0, -1) if any(stop.startswith(self._held[-size:]) for stop in self._stops))
        return next(ends, 0)


class ReplyReader:
    """Reads a reply by the tokenizer's response template where it has one; else all of it is text.

    A tool call that cannot be read, or that nobody offered, is given as the text that it is.

    Args:
        tokenizer: The model's.
        prompt_ids: What the model was given: a template may have begun the reply.
        tools: The tools that were offered.
        stops: Texts that end the reply.
    """

    def __init__(self, tokenizer: Any, prompt_ids: list[int], tools: Sequence[dict] | None, stops: Sequence[str]):
        self._parser = None
        if getattr(tokenizer, "response_template", None) is not None and hasattr(tokenizer, "get_response_parser"):
            self._parser = tokenizer.get_response_parser(prefix=prompt_ids, tools=list(tools or ()))
        self._text = TextStream(tokenizer, keep_special=self._parser is not None)
        self._cutter = StopCutter(stops)
        self._offered = bool(tools)
        self._unseen = ""  # what was read and not given yet
        self.calls = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop text was found."""
        return self._cutter.stopped

    def feed(self, token: int) -> Delta:
        """What an id adds. Not for the id that ends a reply."""
        return self._read(self._cutter.feed(self._text.feed(token)))

    def end(self) -> Delta:
        """What is left at the end of the reply."""
        text = self._cutter.feed(self._text.end())
        piece = self._read(text + self._cutter.end())
        if self._parser is not None:
            try:
                _, events = self._parser.finalize()
                self._take(events, piece)
            except Exception:  # whatever a template makes of what a model writes
                self._give_up(piece)
        return piece

    def _read(self, text: str) -> Delta:
        piece = Delta()
        if self._parser is None:
            piece.content = text
        elif text:
            self._unseen += text
            try:
                self._take(self._parser.feed(text), piece)
            except Exception:  # likewise
                self._give_up(piece)
        return piece

    def _take(self, events: list[dict[str, Any]], piece: Delta) -> None:
        for event in events:
            kind, field = event["type"], event.get("field")
            if kind == "region_chunk" and not event.get("dirty"):
                text = event.get("text") or ""
                if field in _REASONING:
                    piece.reasoning += text
                else:
                    piece.content += text
                self._unseen = self._unseen[len(text) :] if self._unseen.startswith(text) else ""
            elif kind == "region_close" and field == "tool_calls":
                self._add_calls(event.get("value"), piece)

    def _add_calls(self, value: Any, piece: Delta) -> None:
        if not self._offered:
            piece.content += self._unseen
        else:
            calls = [_as_openai(call) for call in (value if isinstance(value, list) else [value])]
            for call in calls:
                piece.tool_calls.append({"index": self.calls, **call})
                self.calls += 1
        self._unseen = ""

    def _give_up(self, piece: Delta) -> None:
        """Read no further: what is not given yet, and all that comes, is text."""
        piece.content += self._unseen
        self._unseen, self._parser = "", None


def _as_openai(call: Any) -> dict[str, Any]:
    """A call as in OpenAI's API, with an id, and its arguments as JSON."""
    function = call["function"]
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": str(function["name"]), "arguments": text},
    }
