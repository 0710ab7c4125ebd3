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
        r"[^\n]{0,80}\b(?:the|this|following|our) (?:chat|conversation|thread|session|dialogue)\b(?! (?:on|about|of)\b)"
    ),
    "summary": (
        r"\byour task is to create a (?:detailed|concise|comprehensive) summary of (?:the|this|our) conversation\b"
        r"|^(?:please )?provide a detailed (?:summary|prompt) (?:of|for continuing) "
        r"(?:the|this|our) (?:conversation|session) (?:so far|above)"
        r"|^you are performing a context checkpoint compaction"
        r"|^progressively summarize the lines of conversation"
        r"|^generate a detailed summary of this conversation\. include:\s*1\."  # Zed
        r"|^summarize the conversation so far, as described in the prompt instructions\b"  # Roo Code
    ),
    "task": r"^### ?task:[\s\S]*(?:<chat_history>|### ?chat history)",
}
_INSTRUCTIONS = {
    "title": r"^you are a title generator|\bgenerates? (?:short |brief )*titles? for (?:chats|conversations|threads)",
    "summary": r"\btasked with summarizing conversations|\bsummarizes internal chat history",
}
# What stands in a conversation without a person having written it. Taken whole where a client could put it in front of
# what a person says, and in the client's own words where a person could begin with the same ones.
_EVENT = r"(?:system(?: \(untrusted\))?: ?\[[^\n]*(?:\n\s*|$))"  # a line of what OpenClaw noticed meanwhile
_INTERRUPTED = r"^\[request interrupted by user(?: for tool use)?\]$"
_AUTOMATIC = {
    "ping": (
        r"^read heartbeat\.md if it exists\b|^\[?heartbeat[\].!]?$|^ping[.!]?$"
        r"|\bif nothing needs attention, (?:reply|respond)(?: with)?(?: exactly)? heartbeat_ok\b"
        r"|^\[(?:cron|scheduled (?:ping|check|task|reminder))(?::[^\]\n]*)?\]"
        rf"|^{_EVENT}*a scheduled (?:reminder has been|cron event was) triggered\b"
    ),
    "resume": (
        r"^\[(?:system: ?)?(?:note: ?)?(?:(?:the|your|this) )?(?:session|conversation) (?:(?:was|has been|is being) )?"
        r"(?:resumed|continued|restored|restarted|interrupted)\b[^\]]*\]$"
        r"|^(?:the )?(?:session|conversation) (?:(?:was|has been) )?(?:resumed|restored|restarted)"
        r"(?: after an interruption)?[.:]?(?: continue(?: where you left off)?[.]?)?$"
        r"|^this session is being continued from a previous conversation that ran out of context\b"
        # Cline; what its user says by the way it quotes
        r"|^\[task resumption\] this task was interrupted\b(?:(?!</?user_message>)[\s\S])*$"
        rf"|{_INTERRUPTED}"
    ),
    "notice": (
        rf"^{_EVENT}+$|^{_EVENT}*an async command you ran earlier (?:has )?completed\b"
        r"|^(?:<(system-reminder|task-notification|environment_context|environment_details)>(?:(?!</\1>)[\s\S])*</\1>\s*)+$"
    ),
}
_TOOL_ERRORS = {
    "tool error": (
        r"^(?:\[[\w-]+\] )?missing tool result in (?:session )?history; (?:inserted )?synthetic error result\b"
        r"|^\[?tool (?:call|use|execution) (?:(?:was|has been) )?(?:interrupted|aborted|cancell?ed|skipped)[.\]]*$"
        rf"|{_INTERRUPTED}"
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
