"""Old logs taken into the store, through the same matching as live traffic."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NoReturn, Protocol, get_args

from ..types import Outcome, Verdict, Vote, finite_float, is_parts
from .canonical import turn_hashes
from .records import BASE_VERSION, DEFAULT_USER, NewTurn, StoredTurn, TurnHashes, VerdictSource, VersionInfo
from .sessions import NextStateTaker, TurnFinder, attach, match
from .side_traffic import side_reason

IMPORTED_VERSION = "imported"
"""The `model_version` of replies whose weights this store does not know."""

_FAILURES_KEPT = 20
_LAST_SECOND = 253_402_300_800  # of the year 9999, behind which no calendar goes
_SAMPLING = (
    *("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stop", "n"),
    *("presence_penalty", "frequency_penalty"),
)


class ReplayStore(TurnFinder, NextStateTaker, Protocol):
    """What importing needs of the store."""

    def record_turn(self, turn: NewTurn, hashes: TurnHashes, *, created: float | None = ...) -> bool:
        """Record a turn; whether it is new."""
        ...

    def show(self, user: str | None, turn_id: str) -> StoredTurn:
        """A turn with all that is known of it."""
        ...

    def add_verdict(self, turn_id: str, verdict: Verdict, source: VerdictSource = ...) -> bool:
        """Keep a verdict."""
        ...

    def versions(self, user: str) -> list[VersionInfo]:
        """A user's versions."""
        ...


@dataclass
class ReplayReport:
    """What became of a log.

    Args:
        turns: New turns.
        known: Turns that were there already.
        next_states: Next states that were found.
        failed: Lines that could not be read.
        failures: What was wrong with the first of them.
    """

    turns: int = 0
    known: int = 0
    next_states: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Logged:
    """One reply of a log, and what the log knows of it beyond what its own request says."""

    turn: NewTurn
    session_id: str
    created: float | None = None
    row: Mapping[str, Any] = field(default_factory=dict)


def replay(store: ReplayStore, lines: Iterable[str], user: str | None = None) -> ReplayReport:
    """Take a log into a store. Doing it again changes nothing.

    Args:
        store: The store.
        lines: JSON, one reply a line, in the order of the conversations: lines of an export, or
            `{"request": ..., "response": ...}` with the bodies of OpenAI's chat completions, and optionally `user`,
            `session_id` and `created` (seconds since 1970). Blank lines do not count.
        user: Whose turns, whatever the lines say. Where neither says, they are the default user's.

    Returns:
        What became of it. A line that cannot be read costs itself and no other.
    """
    report = ReplayReport()

    @cache
    def known_versions(owner: str) -> set[str]:
        return {BASE_VERSION, *(version.version for version in store.versions(owner))}

    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            for logged in _read(line, user):
                _take(store, logged, known_versions, report)
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
            report.failed += 1
            if len(report.failures) < _FAILURES_KEPT:
                report.failures.append(f"line {number}: {error}")
    return report


def _take(
    store: ReplayStore, logged: _Logged, known_versions: Callable[[str], Collection[str]], report: ReplayReport
) -> None:
    turn, row = logged.turn, logged.row
    verdicts = list(_verdicts(row))
    followed = _messages(row["next_state_messages"], "next_state_messages") if row.get("next_state_messages") else []
    source, told_by = _text(row, "next_state_source", "import"), _text(row, "next_state_told_by", "") or None
    if turn.model_version not in known_versions(turn.user):  # another store's v000003 is not this one's
        turn = replace(turn, model_version=IMPORTED_VERSION)
    found = match(store, turn.user, turn.messages, logged.session_id or None, side=turn.kind == "side")
    turn = replace(turn, parent=found.parent, session_id=found.session_id or turn.turn_id)
    # The other way round an import that was killed in between would never attach it.
    report.next_states += attach(store, found, turn.turn_id, "import")
    new = store.record_turn(turn, turn_hashes(turn.messages, turn.reply, found.history), created=logged.created)
    stored = store.show(None, turn.turn_id)
    if stored.user != turn.user:
        raise ValueError(f"turn {turn.turn_id} is another user's already.")
    report.turns += new
    report.known += not new
    if followed:
        report.next_states += store.add_next_state(turn.turn_id, followed, source, told_by)
    for verdict, given_by in verdicts if stored.verdict is None else ():
        store.add_verdict(turn.turn_id, verdict, given_by)


def _read(line: str, user: str | None) -> Iterator[_Logged]:
    row = json.loads(line, parse_constant=_no_constant, parse_float=finite_float)
    if isinstance(row, dict) and {"turn_id", "prompt", "completion"} <= set(row):
        yield _exported(row, user)
    elif isinstance(row, dict) and isinstance(row.get("request"), dict) and isinstance(row.get("response"), dict):
        yield from _paired(row, user)
    else:
        raise ValueError("it is neither a line of an export nor an object with `request` and `response`.")


def _exported(row: Mapping[str, Any], user: str | None) -> _Logged:
    turn = NewTurn(
        turn_id=_text(row, "turn_id"),
        user=user or _text(row, "user", DEFAULT_USER),
        session_id="",
        parent=None,
        kind="main" if row.get("kind") is None else row["kind"],
        side_reason=_text(row, "side_reason", "") or None,
        messages=_messages(row["prompt"], "prompt"),
        tools=_tools(row.get("tools")),
        reply=_messages(row["completion"], "completion")[0],
        finish_reason=_text(row, "finish_reason", "") or "stop",
        prompt_ids=tuple(row.get("prompt_ids") or ()),
        completion_ids=tuple(row.get("completion_ids") or ()),
        logprobs=tuple(row.get("logprobs") or ()),
        sampling=row.get("sampling") or {},
        model=_text(row, "model", ""),
        model_version=_text(row, "model_version", "") or IMPORTED_VERSION,
    )
    return _Logged(turn, _text(row, "session_id", ""), _time(row.get("created")), row)


def _paired(row: Mapping[str, Any], user: str | None) -> Iterator[_Logged]:
    """A request and its response, whose choices are a reply each. They are known again by the response's id, if any."""
    request, response = row["request"], row["response"]
    owner = user or _text(row, "user", DEFAULT_USER)
    messages = _messages(request.get("messages"), "request.messages")
    sampling = {name: request[name] for name in _SAMPLING if request.get(name) is not None}
    reason = side_reason(messages, sampling)
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices:
        raise ValueError("`response` has no `choices`.")
    turn_id = response.get("id")
    if not isinstance(turn_id, str) or not turn_id:
        known = json.dumps([owner, request, response], sort_keys=True)
        turn_id = f"chatcmpl-{hashlib.sha256(known.encode()).hexdigest()[:32]}"
    for place, choice in enumerate(choices):
        (reply,) = _messages([choice.get("message")], "choices.message")
        turn = NewTurn(
            turn_id=f"{turn_id}-{place}" if place else turn_id,
            user=owner,
            session_id="",
            parent=None,
            kind="main" if reason is None else "side",
            side_reason=reason,
            messages=messages,
            tools=_tools(request.get("tools")),
            reply=reply,
            finish_reason=_text(choice, "finish_reason", "") or "stop",
            prompt_ids=(),
            completion_ids=(),
            logprobs=(),
            sampling=sampling,
            model=str(response.get("model") or request.get("model") or ""),
            model_version=IMPORTED_VERSION,
        )
        created = row.get("created", response.get("created"))
        yield _Logged(turn, _text(row, "session_id", ""), _time(created))


def _verdicts(row: Mapping[str, Any]) -> Iterator[tuple[Verdict, VerdictSource]]:
    """What a line of an export says was thought of its turn: the score, and hints that somebody else gave."""
    source, hint_source = row.get("verdict_source"), row.get("hint_source")
    if source is None:
        return
    if source not in get_args(VerdictSource) or hint_source not in (None, *get_args(VerdictSource)):
        raise ValueError("`verdict_source` and `hint_source` are 'judge', 'feedback' or 'edit'.")
    if row.get("judge_score") not in (None, -1, 0, 1) or row.get("outcome") not in (None, *get_args(Outcome)):
        raise ValueError("`judge_score` is -1, 0 or 1, and `outcome` what votes come to.")
    hints = tuple(row.get("hints") or ())
    if not all(isinstance(hint, str) for hint in hints):
        raise ValueError("`hints` are texts.")
    votes = tuple(Vote(**vote) for vote in row.get("votes") or ())
    if source != "edit":
        yield Verdict(row.get("judge_score"), row["outcome"], hints if hint_source == source else (), votes), source
    if hint_source not in (None, source) or source == "edit":
        yield Verdict(None, "unasked", hints), hint_source or "edit"


def _text(row: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = default if row.get(name) is None else row[name]
    if not isinstance(value, str) or not (value or default == ""):
        raise ValueError(f"`{name}` is no text.")
    return value


def _time(created: Any) -> float | None:
    if created is None:
        return None
    if isinstance(created, bool) or not isinstance(created, int | float) or not 0 <= created < _LAST_SECOND:
        raise ValueError("`created` is no number of seconds since 1970.")
    return float(created)


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("`tools` is no list of tools.")
    return tools


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no finite number.")


def _messages(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"`{name}` is no list of messages.")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"`{name}` holds something that is no message.")
        content = message.get("content")
        if not isinstance(content, str | None) and not is_parts(content):
            raise ValueError(f"`{name}` holds a message whose content is neither text nor parts.")
    return value
