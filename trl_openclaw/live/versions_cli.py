"""`trl-openclaw versions list | roll-back | publish`: which version of a user's adapter answers."""

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from ..errors import StoreError
from .records import BASE_VERSION, DEFAULT_USER, VersionInfo
from .store import STORE_FILE, Store


def main(argv: Sequence[str]) -> int:
    """Run the command with these arguments; the exit code is 2 when it cannot be done."""
    args = _parser().parse_args(argv)
    file = Path(args.live_dir) / STORE_FILE
    try:
        if not file.is_file():
            raise StoreError(f"There is no store in {args.live_dir}: name its folder with --live_dir.")
        store = Store(file)
        print(_ACTIONS[args.action](store, args))
    except StoreError as error:
        print(f"trl-openclaw versions: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--live_dir", "--live-dir", default="runs/live", metavar="DIR", help="folder of the store (default: runs/live)"
    )
    common.add_argument("--user", default=DEFAULT_USER, help="whose versions")
    parser = argparse.ArgumentParser(prog="trl-openclaw versions", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("list", parents=[common], help="all versions, with what their checks said")
    back = actions.add_parser("roll-back", parents=[common], help="let an earlier version answer: the last was bad")
    back.add_argument("--to", help="which one; by default the one that the present version was trained from")
    publish = actions.add_parser("publish", parents=[common], help="let this version answer, whatever its checks said")
    publish.add_argument("version", help="its name, or `base`")
    return parser


def _list(store: Store, args: argparse.Namespace) -> str:
    versions = store.versions(args.user)
    if not versions:
        return f"User {args.user!r} has no versions yet: the base model answers."
    base = "" if store.published_version(args.user) != BASE_VERSION else "\nThe base model answers."
    return "\n".join(map(_lines, versions)) + base


def _lines(version: VersionInfo) -> str:
    events = [event.event for event in version.events if event.event != "checked"]
    last = _STATES.get(events[-1], events[-1]) if events else "not checked yet"
    state = "answers now" if version.published else last
    made = datetime.fromtimestamp(version.created, UTC).strftime("%Y-%m-%d %H:%M UTC")
    lines = [f"{version.version}  from {version.parent}  {made}  {state}"]
    for event in version.events:
        if why := event.detail.get("reason") or event.detail.get("error"):
            lines.append(f"    {event.event.replace('_', ' ')}: {why}")
        for name, check in event.detail.get("checks", {}).items():
            lines.append(f"    {name}: {check['outcome'].replace('_', ' ')} ({check['note']})")
    return "\n".join(lines)


def _roll_back(store: Store, args: argparse.Namespace) -> str:
    return f"{store.roll_back(args.user, args.to)} answers from now on."


def _publish(store: Store, args: argparse.Namespace) -> str:
    _check_folder(store, args.user, args.version)
    news = store.publish(args.user, args.version, {"by": "hand"})
    return f"{args.version} answers from now on." if news else f"{args.version} answers already."


def _check_folder(store: Store, user: str, name: str) -> None:
    """Refuse a version whose adapter was removed.

    Raises:
        StoreError: If its folder is gone.
    """
    for version in store.versions(user):
        if version.version == name and not Path(version.path).is_dir():
            raise StoreError(f"The adapter of version {name!r} was removed: {version.path} is not there.")


_STATES = {"published": "answered earlier", "rolled_back": "rolled back", "load_failed": "cannot be loaded"}
_ACTIONS = {"list": _list, "roll-back": _roll_back, "publish": _publish}
