"""Where the learner keeps its files under the folder that it shares with the gateway."""

import os
from pathlib import Path
from urllib.parse import quote

from ..store import STORE_FILE


def user_name(user: str) -> str:
    """The user as the name of a file or folder: letters, digits, `_`, `-` and `~` as they are, the rest quoted."""
    return quote(user, safe="").replace(".", "%2E")


def store_of(live_dir: Path) -> Path:
    """The store."""
    return live_dir / STORE_FILE


def adapters_of(live_dir: Path, user: str) -> Path:
    """The folder with a user's adapter versions."""
    return live_dir / "adapters" / user_name(user)


def checkpoints_of(live_dir: Path, user: str) -> Path:
    """The folder with a user's checkpoints."""
    return live_dir / "checkpoints" / user_name(user)


def lock_of(live_dir: Path, user: str) -> Path:
    """The file that a learner holds while it runs."""
    return live_dir / f"learner-{user_name(user)}.lock"


def onto_disk(folder: Path, *, inside: bool = True) -> None:
    """Return when a folder's names, and the files inside unless told otherwise, would outlive the machine's power."""
    for path in [*(folder.rglob("*") if inside else ()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
