"""`trl-openclaw data`: what the store holds, and people's say over it."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import StoreError, UnknownTurnError
from ..types import message_text
from .records import TURN_STATES, StoredTurn
from .replay import replay
from .store import STORE_FILE, Store

_PROG = "trl-openclaw data"
_EXCERPT = 24  # characters of a reply that are shown at least
_ID = 17  # characters of an id that a table shows


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: What follows `data`.

    Returns:
        0; 1 when the store failed or not all of a log could be read; 2 when what was asked for does not exist.
    """
    args = _parser().parse_args(argv)
    path = Path(args.live_dir) / STORE_FILE
    try:
        if args.run is not _import and not path.is_file():
            raise UnknownTurnError(f"There is no store at {path}. Its folder is given by --live_dir.")
        return args.run(Store(path), args)
    except UnknownTurnError as error:
        return _failed(error, 2)
    except (StoreError, OSError) as error:
        return _failed(error, 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG, description="See, take out, take in, correct and delete what was recorded."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Store, Any], int], text: str, *selectors: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        found.add_argument(
            "--live_dir",
            "--live-dir",
            default="runs/live",
            metavar="DIR",
            help="folder of the store (default: runs/live)",
        )
        found.add_argument("--json", action="store_true", help="answer in JSON")
        for selector in selectors:
            found.add_argument(
                f"--{selector}", metavar="NAME" if selector == "user" else "ID", help=_SELECTORS[selector]
            )
        found.set_defaults(run=run)
        return found

    listing = command("list", _list, "list turns, the newest first", "user", "session")
    listing.add_argument("--state", choices=TURN_STATES, help="only those in this state")
    listing.add_argument("--limit", type=int, default=20, help="how many (default: 20)")
    show = command("show", _show, "show one turn with all that is known of it", "user")
    named = show.add_mutually_exclusive_group()
    # Without a default of its own, or it would take the place of what --turn says.
    named.add_argument("turn", nargs="?", default=argparse.SUPPRESS, metavar="ID", help=_SELECTORS["turn"])
    named.add_argument("--turn", metavar="ID", help="the same")
    export = command("export", _export, "write turns into the live folder's exports", "user", "session", "turn")
    export.add_argument(
        "--format",
        choices=("jsonl", "dataset"),
        default="jsonl",
        help="lines of all turns (default), or a `datasets` folder to train on, of main turns of users who are in",
    )
    log = command("import", _import, "take in the lines of an export, or logged requests with their responses", "user")
    log.add_argument("file", help="JSON lines; - for standard input")
    command("delete", _delete, "delete turns and their text wherever it lies, exports too", "user", "session", "turn")
    edit = command("edit-hint", _edit_hint, "put hints in place of a turn's", "user", "turn")
    edit.add_argument("hint", nargs="*", help="what the reply should have been like; none deletes the hints")
    opt_out = command("opt-out", _opt_out, "keep a user's turns from being judged and trained", "user")
    opt_out.add_argument("--off", action="store_true", help="let them be judged and trained again")
    return parser


_SELECTORS = {
    "user": "only this user's",
    "session": "only this session's; the beginning of its id will do",
    "turn": "this turn; the beginning of its id will do",
}


def _list(store: Store, args: Any) -> int:
    session = _completed(store, "session", args)
    for name, given in (("user", args.user), ("session", session)):
        if given is not None and not store.turns(args.user, session, limit=1):
            raise UnknownTurnError(f"There is no {name} {given!r}.")
    turns = store.turns(args.user, session, args.state, args.limit)
    if args.json:
        return _print_json([_summary(turn) for turn in turns])
    rows = [_row(turn) for turn in turns]
    _table(["turn", "user", "session", "recorded", "state", "score", "hints", "reply"], rows)
    counts = store.counts(args.user)
    states = ", ".join(f"{counts[state]} {state}" for state in TURN_STATES if state in counts) or "none"
    _print(f"{_plural(sum(counts.values()), 'turn')}: {states}")
    return 0


def _show(store: Store, args: Any) -> int:
    turn = store.show(args.user, _needed(store, "turn", args))
    if args.json:
        return _print_json(asdict(turn))
    verdict, use = turn.verdict, turn.use
    _print(f"turn      {turn.turn_id}, number {turn.number}, of user {turn.user}")
    _print(f"session   {turn.session_id}" + (f", after {turn.parent}" if turn.parent else ""))
    _print(f"recorded  {_when(turn.created)}, {turn.model} ({turn.model_version}), ended by {turn.finish_reason}")
    _print(f"state     {turn.state}" + (f" ({turn.side_reason})" if turn.side_reason else "") + f", lag {turn.lag}")
    _print(f"tokens    {len(turn.prompt_ids)} of the prompt, {len(turn.completion_ids)} of the reply")
    for message in turn.messages:
        _block(str(message.get("role")), _said(message))
    _block("reply", _said(turn.reply))
    for message in turn.next_state or ():
        _block(f"then, {message.get('role')}", _said(message))
    if verdict is not None:
        votes = ", ".join(str(vote.failure or vote.score) for vote in verdict.votes)
        _print(f"\nverdict   {verdict.outcome}, by {verdict.source}" + (f" (votes: {votes})" if votes else ""))
        for hint in verdict.hints:
            _block(f"hint, by {verdict.hint_source}", hint)
    if use is not None:
        _print(f"\nbatch     {use.batch_id}, {use.outcome}" + (f", {use.version}" if use.version else ""))
    return 0


def _export(store: Store, args: Any) -> int:
    if args.format == "dataset":
        import datasets

        datasets.disable_progress_bars()
    session, turn = _completed(store, "session", args), _completed(store, "turn", args)
    path, count = store.export(args.user, session_id=session, turn_id=turn, form=args.format)
    return _answer(args, {"path": str(path), "turns": count}, f"{_plural(count, 'turn')} in {path}")


def _import(store: Store, args: Any) -> int:
    if args.file == "-":
        report = replay(store, sys.stdin, args.user)
    else:
        with open(args.file, encoding="utf-8", errors="replace") as lines:
            report = replay(store, lines, args.user)
    for failure in report.failures:
        print(f"{_PROG}: {failure}", file=sys.stderr)
    text = f"{_plural(report.turns, 'turn')} taken in, {report.known} known already, "
    text += f"{_plural(report.next_states, 'next state')} found"
    if report.failed:
        text += f", {_plural(report.failed, 'line')} could not be read"
    _answer(args, asdict(report), text)
    return 1 if report.failed else 0


def _delete(store: Store, args: Any) -> int:
    named = [name for name in _SELECTORS if getattr(args, name) is not None]
    if not named:
        return _failed("say what to delete: --user NAME, --session ID or --turn ID", 2)
    if {"session", "turn"} <= set(named):
        return _failed("--session and --turn cannot be deleted at once", 2)
    session, turn = _completed(store, "session", args), _completed(store, "turn", args)
    done = store.delete(args.user, session_id=session, turn_id=turn)
    text = f"{_plural(done.turns, 'turn')} of {_plural(done.sessions, 'session')} deleted"
    if done.exports:
        text += f", and exports with their text: {', '.join(done.exports)}"
    return _answer(args, asdict(done), text)


def _edit_hint(store: Store, args: Any) -> int:
    turn_id = _needed(store, "turn", args)
    store.edit_hint(args.user, turn_id, args.hint)
    count = _plural(len(args.hint), "hint") if args.hint else "no hints"
    return _answer(args, {"turn_id": turn_id, "hints": args.hint}, f"{turn_id} has {count} now")


def _opt_out(store: Store, args: Any) -> int:
    if args.user is None:
        return _failed("say whose turns: --user NAME", 2)
    store.opt_out(args.user, not args.off)
    state = "may be judged and trained" if args.off else "are neither judged nor trained"
    return _answer(args, {"user": args.user, "opted_out": not args.off}, f"turns of {args.user} {state} from now on")


def _completed(store: Store, what: Any, args: Any) -> str | None:
    start = getattr(args, what)
    return None if start is None else store.complete(what, start, args.user)


def _needed(store: Store, what: Any, args: Any) -> str:
    found = _completed(store, what, args)
    if found is None:
        raise UnknownTurnError(f"Say which {what}: --{what} ID.")
    return found


def _summary(turn: StoredTurn) -> dict[str, Any]:
    verdict = turn.verdict
    return {
        "number": turn.number,
        "turn_id": turn.turn_id,
        "user": turn.user,
        "session_id": turn.session_id,
        "created": turn.created,
        "state": turn.state,
        "model_version": turn.model_version,
        "judge_score": verdict.score if verdict else None,
        "hints": list(verdict.hints) if verdict else [],
        "reply": _said(turn.reply),
        "next_state": turn.next_state,
    }


def _row(turn: StoredTurn) -> list[str]:
    verdict = turn.verdict
    score = "" if verdict is None else verdict.outcome if verdict.score is None else f"{verdict.score:+d}"
    hints = str(len(verdict.hints)) if verdict and verdict.hints else ""
    ids = (turn.turn_id[:_ID], turn.user, turn.session_id[:_ID])
    return [*map(_plain, ids), _when(turn.created), turn.state, score, hints, _plain(_said(turn.reply))]


def _said(message: dict[str, Any]) -> str:
    calls = [call.get("function", call) for call in message.get("tool_calls") or () if isinstance(call, dict)]
    lines = [f"[calls {call.get('name')}({call.get('arguments')})]" for call in calls if isinstance(call, dict)]
    return "\n".join(filter(None, [message_text(message), *lines]))


def _when(created: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(created))
    except (ValueError, OverflowError, OSError):  # a clock that was far off
        return "?"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under their heads; the last column takes what room is left."""
    lines = [list(heads), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads) - 1)]
    room = max(shutil.get_terminal_size((120, 24)).columns - sum(widths) - 2 * len(widths), _EXCERPT)
    for line in lines:
        last = line[-1] if len(line[-1]) <= room else line[-1][: room - 1] + "…"
        cells = [cell.ljust(width) for cell, width in zip(line[:-1], widths, strict=True)]
        _print("  ".join([*cells, last]).rstrip())


def _block(head: str, text: str) -> None:
    _print(f"\n{head}")
    for line in text.splitlines():
        _print(f"  {line}")


def _plain(text: str) -> str:
    return " ".join(text.split())


def _print(line: str) -> None:
    """Print a line in which nothing moves the cursor or changes colours, whatever was recorded."""
    shown = "".join(char if char.isprintable() or char == "\n" else "�" for char in line)
    print(shown.encode(sys.stdout.encoding or "utf-8", "replace").decode(sys.stdout.encoding or "utf-8"))


def _print_json(value: Any) -> int:
    print(json.dumps(value, indent=2, allow_nan=False))
    return 0


def _answer(args: Any, value: Any, text: str) -> int:
    if args.json:
        return _print_json(value)
    _print(text)
    return 0


def _failed(error: Exception | str, code: int) -> int:
    print(f"{_PROG}: error: {error}", file=sys.stderr)
    return code
