"""Hints: cleaning a candidate, and placing it into a prompt. Text in, text out, no token ids."""

import re
import unicodedata
from collections.abc import Collection, Sequence
from typing import Any, Literal, TypeVar, get_args

from .errors import HintError
from .types import Message, Messages, valid_text

HintPlacement = Literal["user", "system", "turn"]

DEFAULT_HINT_TEMPLATE = "Hint: {hint}"

_SYSTEM_ROLES = ("system", "developer")
# U+200C and U+200D stay: Persian, Indic scripts and emoji need them.
_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u2060\ufeff]")
_QUOTES = {'"': '"', "'": "'", "`": "`", "“": "”", "„": "“", "‘": "’", "«": "»", "「": "」", "『": "』"}

Prompt = TypeVar("Prompt", str, Messages)


def check_hint_template(template: str) -> None:
    """Check that a hint template can be used.

    Args:
        template: The text around the hint. Must contain `{hint}`; every other brace is plain text.

    Raises:
        ValueError: When `{hint}` is missing.
    """
    if not isinstance(template, str) or "{hint}" not in template:
        raise ValueError(f"A hint template must contain `{{hint}}`, where the hint goes, got {template!r}.")


def insert_hint(prompt: Prompt, hint: str, placement: str = "user", template: str = DEFAULT_HINT_TEMPLATE) -> Prompt:
    """Place a hint into a prompt, for the teacher to see.

    Args:
        prompt: Messages, or plain text. Never changed; the result holds copies of the messages. Parts of a content list
            are shared, the list itself is not.
        hint: The hint. A blank one changes nothing, which is what the self-test compares with.
        placement: `"user"` appends to the last user message, `"system"` to the first system (or developer) message.
            Without a system message one is added at the front; a chat template that fills in a system prompt of its own
            when there is none then no longer does so, and the prompts differ by that too. `"turn"` puts it right before
            the reply: into the last message if that is the user's, else into a user message of its own. Plain text has
            no messages: the hint goes in front of it, a blank line between.
        template: The text around the hint, with `{hint}` where it goes. The hint is put in once and not expanded again.

    Returns:
        The hinted prompt: text for text, a tuple for a tuple, else a list.

    Raises:
        HintError: When `placement="user"` and no message is the user's.
        ValueError: When the placement is unknown or the template has no `{hint}`.
    """
    if placement not in get_args(HintPlacement):
        raise ValueError(f"`placement` must be one of {list(get_args(HintPlacement))}, got {placement!r}.")
    check_hint_template(template)
    rendered = template.replace("{hint}", hint) if hint.strip() else ""
    if isinstance(prompt, str):
        return f"{rendered}\n\n{prompt}" if rendered else prompt
    messages: list[Message] = [dict(message) for message in prompt]
    if rendered:
        index = _target(messages, placement)
        if index is None and placement == "turn":
            messages.append({"role": "user", "content": rendered})
        elif index is None:
            messages.insert(0, {"role": "system", "content": rendered})
        else:
            messages[index] = {**messages[index], "content": _append(messages[index].get("content"), rendered)}
    return tuple(messages) if isinstance(prompt, tuple) else messages


def _target(messages: Sequence[Message], placement: str) -> int | None:
    """The index of the message that takes the hint; `None` when one has to be added."""
    if placement == "turn":
        return len(messages) - 1 if messages and messages[-1].get("role") == "user" else None
    if placement == "system":
        return next((i for i, message in enumerate(messages) if message.get("role") in _SYSTEM_ROLES), None)
    for i in reversed(range(len(messages))):
        if messages[i].get("role") == "user":
            return i
    raise HintError("The prompt has no user message to append the hint to. Use `placement='system'` for such prompts.")


def _append(content: Any, rendered: str) -> str | list[Any]:
    """The content with the hint after a blank line. Templates join parts with nothing, so a part brings its own."""
    if content is None or content == "":
        return rendered
    if isinstance(content, str):
        return f"{content}\n\n{rendered}"
    return [*content, {"type": "text", "text": f"\n\n{rendered}" if content else rendered}]


def clean_hint(text: str) -> str | None:
    """Tidy a hint candidate. Short hints are kept: a few characters can say everything in some languages.

    Args:
        text: The candidate as a judge wrote it.

    Returns:
        The text with plain spaces and line ends, runs of them collapsed, invisible characters and quotation marks
        around the whole removed; `None` when no letter or digit of any script is left.
    """
    text = unquote(_tidy(text))
    return text if any(c.isalnum() for c in text) else None


def _tidy(text: str) -> str:
    """The text with plain spaces and line ends, runs of them collapsed, without invisible characters."""
    text = _INVISIBLE.sub("", valid_text(text))
    text = re.sub(r"\r\n?|[\v\f\x1c-\x1e\x85\u2028\u2029]", "\n", text)
    text = "".join(" " if unicodedata.category(c) in ("Zs", "Cc") and c != "\n" else c for c in text)
    text = re.sub(r" *\n *", "\n", re.sub(r" +", " ", text))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def without_special_tokens(hint: str, special_tokens: Collection[str], *, tidy: bool = True) -> str:
    """The hint without the control tokens of a chat template, so that it cannot close its message and open another.

    Args:
        hint: The hint, as a user or a judge wrote it.
        special_tokens: What to remove, such as a tokenizer's `all_special_tokens`. Blank ones are left alone: without
            its spaces a hint reads as one word.
        tidy: Whether to tidy white space as `clean_hint` does. Code, for one, needs its own.

    Returns:
        The hint without any of them, also where removing one puts another together. Empty when nothing is left.
    """
    tidied = _tidy if tidy else valid_text
    tokens = sorted(filter(str.strip, special_tokens), key=len, reverse=True)
    # Of the tokens that begin at one place, the pattern takes its first: the longest.
    pattern = re.compile("|".join(map(re.escape, tokens)))
    hint = tidied(hint)
    while tokens and pattern.search(hint):
        hint = tidied(pattern.sub("", hint))
    return hint


def unquote(text: str) -> str:
    """The text without the quotation marks around the whole of it, as a model puts them around what it says.

    Args:
        text: Any text. Backticks count as quotation marks; apostrophes inside words do not.

    Returns:
        The text without surrounding space and pairs of marks, however many there are. `"A" or "B"` is no pair.
    """
    text = text.strip()
    while len(text) > 1 and _QUOTES.get(text[0]) == text[-1]:
        inner = text[1:-1]
        # 'Don't use bold' is one quoted text.
        bare = re.sub(r"(?<=\w)['’](?=\w)", "", inner)
        if text[0] in bare or text[-1] in bare:
            break
        text = inner.strip()
    return text
