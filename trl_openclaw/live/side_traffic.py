"""Traffic that is no conversation: what clients send on their own account, for titles, summaries, pings and notices.

A request of this kind is answered and recorded, but neither trained nor taken for feedback; a message of this kind in
a conversation is nobody's opinion of the reply before it.
"""

import re
from collections.abc import Mapping
from typing import Any

from ..types import Message, Messages, message_text

MAIN = "main"
"""The value of the header `X-Turn-Type` that says that a request is a person's, whatever it looks like."""

_READ_CHARS = 2000  # what a message is starts at its head

# What a client asks of a model in a request of its own. Strict, since people ask for titles and summaries too.
_REQUESTS = {
    "title": (
        r"^(?:### ?task:\s*)?(?:please )?(?:generate|create|write|provide|come up with)\b[^\n]{0,60}\btitle\b"
        r"[^\n]{0,80}\b(?:the|this|following|our) (?:chat|conversation|thread|session|dialogue)"
    ),
    "summary": (
        r"\byour task is to create a (?:detailed|concise|comprehensive) summary of\b"
        r"|^(?:please )?(?:provide|create|write) a (?:detailed )?(?:summary|prompt) (?:of|for continuing) "
        r"(?:the|this|our) (?:conversation|session) (?:so far|above)"
        r"|^you are performing a context checkpoint compaction"
        r"|^progressively summarize the lines of conversation"
    ),
    "task": r"^### ?task:[\s\S]*(?:<chat_history>|### ?chat history)",
}
_INSTRUCTIONS = {
    "title": r"^you are a title generator|\bgenerates? (?:short |brief )*titles? for (?:chats|conversations|threads)",
    "summary": r"\btasked with summarizing conversations|\bsummarizes internal chat history",
}
# What stands in a conversation without a person having written it.
_AUTOMATIC = {
    "ping": (
        r"^\[?heartbeat\b|^read heartbeat\.md|\b(?:reply|respond)(?: with)?(?: exactly)? heartbeat_ok|^\[cron[:\]]"
        r"|^\[?scheduled (?:ping|check|task|reminder)\b|^ping[.!]?$"
    ),
    "resume": (
        r"^\[?(?:system: ?)?(?:note: ?)?(?:the|your|this) (?:session|conversation) (?:was|has been|is being) "
        r"(?:resumed|continued|restored|restarted|interrupted)\b"
        r"|^\[?(?:session|conversation) (?:resumed|restored|restarted)\b"
        r"|^\[request interrupted by user"
    ),
    "notice": r"^system: ?\[|^<(system-reminder|task-notification|environment_context)>[\s\S]*</\1>$",
}
_TOOL_ERRORS = {
    "tool error": (
        r"synthetic (?:tool |error )*(?:result|error)|^\W*(?:\w+\W+)?missing tool result"
        r"|^\[request interrupted by user"
        r"|^\W*tool (?:call|use|execution) (?:was |has been )?(?:interrupted|aborted|cancell?ed|skipped)\b"
    ),
}


def _compiled(patterns: Mapping[str, str]) -> dict[str, re.Pattern[str]]:
    return {reason: re.compile(pattern, re.IGNORECASE) for reason, pattern in patterns.items()}


_REQUEST_PATTERNS, _INSTRUCTION_PATTERNS = _compiled(_REQUESTS), _compiled(_INSTRUCTIONS)
_MESSAGE_PATTERNS = {"user": _compiled(_AUTOMATIC), "tool": _compiled(_TOOL_ERRORS)}


def automatic(message: Message) -> str | None:
    """Why a message in a conversation is nobody's feedback; `None` when it may be.

    Args:
        message: A message of any role. Only those of users and tools can be automatic.

    Returns:
        `"ping"`, `"resume"`, `"notice"` (instructions that a client slips in as the user's), `"tool error"` (of a call
        that never ran) or `None`.
    """
    return _first(_MESSAGE_PATTERNS.get(str(message.get("role")), {}), message)


def side_reason(messages: Messages, sampling: Mapping[str, Any] | None = None, header: str | None = None) -> str | None:
    """Why a request is side traffic; `None` when it is part of a conversation.

    Args:
        messages: The request's messages.
        sampling: Its sampling settings. One token is no reply.
        header: The value of `X-Turn-Type`. It is believed: `"main"` is a conversation, anything else is not.

    Returns:
        The header, a reason of [`automatic`], `"title"`, `"summary"`, `"task"` (tags, follow-up questions and the like,
        about a conversation that is quoted in the request), `"probe"` or `None`.
    """
    if header is not None and header.strip():
        return None if header.strip().lower() == MAIN else header.strip().lower()
    limits = [(sampling or {}).get(name) for name in ("max_tokens", "max_completion_tokens")]
    if 1 in limits:
        return "probe"
    instructions = [message for message in messages if message.get("role") in ("system", "developer")]
    if instructions and (reason := _first(_INSTRUCTION_PATTERNS, instructions[0])):
        return reason
    news = []
    for message in reversed(messages):
        if message.get("role") == "assistant":
            break
        if message.get("role") not in ("system", "developer"):
            news.append(message)
    if not news:
        return None
    if news[0].get("role") == "user" and (reason := _first(_REQUEST_PATTERNS, news[0])):
        return reason
    reasons = [automatic(message) for message in news]
    return reasons[0] if all(reasons) else None


def _first(patterns: Mapping[str, re.Pattern[str]], message: Message) -> str | None:
    text = message_text(message).strip()
    if len(text) > _READ_CHARS:
        text = text[:_READ_CHARS] + text[-_READ_CHARS:]
    return next((reason for reason, pattern in patterns.items() if pattern.search(text)), None)
