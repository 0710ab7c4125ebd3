"""Records as the JSON that the status page reads. Long texts are cut; `trl-openclaw data show` has them whole."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...types import Vote, message_text
from ..records import BASE_VERSION, StoredTurn, StoredVerdict, TokenScores, VersionInfo
from ..store_pages import SessionLine, Share

TEXT_SHOWN = 20_000
TITLE_SHOWN = 80

_VOTES = {1: "positive", -1: "negative", 0: "neutral"}


def session_view(line: SessionLine) -> dict[str, Any]:
    """A conversation in the list, called by its first message from the user."""
    said = (message_text(message) for message in line.messages if message.get("role") == "user")
    title = " ".join(next(said, "").split())
    return {
        "session_id": line.session_id,
        "number": line.number,
        "title": title[:TITLE_SHOWN] + "…" if len(title) > TITLE_SHOWN else title,
        "turns": line.turns,
        "created": line.created,
        "updated": line.updated,
        "outcomes": list(line.outcomes),
    }


def turn_view(turn: StoredTurn, scored: str | None) -> dict[str, Any]:
    """A turn. `scored` names the batch that its token scores are of, if it has any."""
    return {
        "turn_id": turn.turn_id,
        "number": turn.number,
        "created": turn.created,
        "kind": turn.kind,
        "side_reason": turn.side_reason,
        "messages": [message_view(message) for message in new_messages(turn.messages)],
        "reply": message_view(turn.reply),
        "finish_reason": turn.finish_reason,
        "model_version": turn.model_version,
        "state": turn.state,
        "next_state": None if turn.next_state is None else [message_view(message) for message in turn.next_state],
        "next_state_source": turn.next_state_source,
        "verdict": None if turn.verdict is None else verdict_view(turn.verdict),
        "use": None if turn.use is None else {"outcome": turn.use.outcome, "version": turn.use.version},
        "scored": scored,
    }


def new_messages(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """What a request added to its conversation: all that stands behind the last reply in it."""
    replies = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    return messages[replies[-1] + 1 :] if replies else messages


def message_view(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message: its text, and the calls of tools in it."""
    text, reasoning = message_text(message), message.get("reasoning_content") or ""
    return {
        "role": str(message.get("role", "assistant")),
        "name": message.get("name"),
        "text": text[:TEXT_SHOWN],
        "cut": max(0, len(text) - TEXT_SHOWN),
        "reasoning": str(reasoning)[:TEXT_SHOWN],
        "tool_calls": [_call_view(call) for call in message.get("tool_calls") or ()],
    }


def _call_view(call: Any) -> dict[str, str]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return {"name": "?", "arguments": str(call)[:TEXT_SHOWN]}
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"name": str(function.get("name", "?")), "arguments": arguments[:TEXT_SHOWN]}


def verdict_view(verdict: StoredVerdict) -> dict[str, Any]:
    """A verdict with its votes, without the judge's own words."""
    return {
        "score": verdict.score,
        "outcome": verdict.outcome,
        "hints": list(verdict.hints),
        "votes": [_vote_view(vote) for vote in verdict.votes],
        "source": verdict.source,
        "hint_source": verdict.hint_source,
    }


def _vote_view(vote: Vote) -> dict[str, Any]:
    outcome = "unasked" if vote.score is None else _VOTES[vote.score]
    return {"outcome": "failed" if vote.failure else outcome, "failure": vote.failure}


def scores_view(scores: TokenScores) -> dict[str, Any]:
    """Token scores. What is not a number is `null`; tokens whose text is not known are shown by their place."""
    return {
        "tokens": [f"<{place}>" for place in range(len(scores.student))]
        if scores.tokens is None
        else list(scores.tokens),
        "advantages": _numbers(scores.advantages),
        "student": _numbers(scores.student),
        "teacher": _numbers(scores.teacher),
        "prefers": _finite(scores.prefers),
    }


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [round(value, 5) if math.isfinite(value) else None for value in values]


def _finite(value: Any) -> Any:
    """The same without what is no number, for which browsers' JSON has nothing."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def version_views(versions: Sequence[VersionInfo], published: str) -> list[dict[str, Any]]:
    """The versions, newest first, down to the base model. Those that answered and are there can be returned to."""
    views = []
    for version in reversed(versions):
        events = [{"event": e.event, "detail": _finite(e.detail), "created": e.created} for e in version.events]
        status = _status(version)
        once = any(event["event"] == "published" for event in events) and status != "load_failed"
        views.append(
            {
                "version": version.version,
                "created": version.created,
                "status": status,
                "events": events,
                "can_return_to": once and not version.published and Path(version.path).is_dir(),
            }
        )
    base = "published" if published == BASE_VERSION else "superseded"
    return [
        *views,
        {
            "version": BASE_VERSION,
            "created": None,
            "status": base,
            "events": [],
            "can_return_to": published != BASE_VERSION,
        },
    ]


def _status(version: VersionInfo) -> str:
    if version.published:
        return "published"
    last = version.events[-1].event if version.events else "new"
    return "superseded" if last == "published" else last


def turns_of_last_update(versions: Sequence[VersionInfo]) -> int | None:
    """How many turns the newest version that was checked has learned from; `None` before there is one."""
    checks = [event.detail.get("turns") for version in versions for event in version.events if event.event == "checked"]
    return checks[-1] if checks and isinstance(checks[-1], int) else None


def queue_view(ready: int, claimed: int, wanted: int) -> dict[str, Any]:
    """How far the next update is."""
    says = f"{ready}/{wanted} turns ready, waiting for {'feedback' if ready < wanted else 'the learner'}"
    if claimed:
        says = f"training on {claimed} turns, {ready}/{wanted} ready for the next update"
    return {"ready": ready, "wanted": wanted, "says": says}


def share_view(share: Share) -> dict[str, Any]:
    """One point of the satisfaction curve."""
    return {"name": share.name, "positive": share.positive, "scored": share.scored}


def problem_views(problems: Mapping[str, Any]) -> list[str]:
    """What does not work now, a line each."""
    lines = []
    for part, texts in problems.items():
        lines += [f"{part.capitalize()}: {text}" for text in ([texts] if isinstance(texts, str) else texts)]
    return lines
