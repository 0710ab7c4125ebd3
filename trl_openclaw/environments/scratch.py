"""A scratch directory for a sandbox: writing into it and removing it stay safe, whatever a program has left in it."""

import os
import random
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Self

# As root, every directory belongs to a user number of its own, from a range that nobody hands out. A container may
# know fewer numbers, so the second range is tried next.
_USERS = (range(0x20000000, 0x30000000), range(61184, 65520))


class Scratch:
    """A fresh directory, removed by `close` or at the end of a `with` block.

    Args:
        path: Where it is.
        user: The user number that owns it, which its programs run as; `None` where this process is not root.
    """

    path: str
    user: int | None = None

    def __init__(self):
        self.path = os.path.realpath(tempfile.mkdtemp(prefix="openclaw-"))
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            self.user = self._give_away()

    def _give_away(self) -> int:
        failure: OSError | None = None
        for users in _USERS:
            user = random.SystemRandom().choice(users)
            try:
                os.chown(self.path, user, user)
                return user
            except OSError as error:
                failure = error
        self.close()
        raise OSError(f"The scratch directory cannot be given to a user of its own: {failure}")

    def write(self, files: Mapping[str, str]) -> None:
        """Write text files. A link that a program left on the way is an error and not followed.

        Args:
            files: Path inside the directory -> text.
        """
        for name, text in files.items():
            folders, last = _split(name)
            folder = os.open(self.path, os.O_DIRECTORY | os.O_RDONLY)
            try:
                for part in folders:
                    folder = self._enter(folder, part, name)
                self._write_one(folder, last, name, text)
            finally:
                os.close(folder)

    def _enter(self, folder: int, part: str, name: str) -> int:
        try:
            os.mkdir(part, 0o700, dir_fd=folder)
            created = True
        except FileExistsError:
            created = False
        try:
            inner = os.open(part, os.O_DIRECTORY | os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            raise ValueError(f"`files`: {name!r} cannot be written, since {part!r} is no folder ({error}).") from None
        os.close(folder)
        if created and self.user is not None:
            os.fchown(inner, self.user, self.user)
        return inner

    def _write_one(self, folder: int, last: str, name: str, text: str) -> None:
        try:
            if stat.S_ISDIR(os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode):
                raise ValueError(f"`files`: {name!r} cannot be written, since a folder is there.")
            os.unlink(last, dir_fd=folder)
        except FileNotFoundError:
            pass
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(last, flags, 0o600, dir_fd=folder), "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            if self.user is not None:
                os.fchown(file.fileno(), self.user, self.user)

    def close(self) -> None:
        """Remove the directory, however deep."""
        with suppress(RecursionError):
            shutil.rmtree(self.path, ignore_errors=True)
        for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            if os.path.isdir(self.path):  # too deep for the above, or with folders that were closed
                subprocess.run([*command, self.path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_files(files: Mapping[str, str]) -> None:
    """Raise a `ValueError` for files that are not text, or whose paths leave the directory."""
    if not isinstance(files, Mapping):
        raise ValueError(f"`files` must be a mapping of path to text, got {type(files).__name__}.")
    for name, text in files.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError(f"`files` must map paths to texts, got {name!r}: {type(text).__name__}.")
        _split(name)


def _split(name: str) -> tuple[tuple[str, ...], str]:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"`files`: {name!r} is no path inside the directory. Use a relative one without '..'.")
    return path.parts[:-1], path.parts[-1]
