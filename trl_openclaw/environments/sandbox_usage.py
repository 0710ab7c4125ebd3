"""What the processes of a sandbox take: memory, and files, also those that no folder lists any more."""

import os
import re
import resource
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

_MB = 1 << 20
# Address range, rights, offset, device, inode, name. Memory that is shared without a file is shown as /dev/zero.
_DELETED_MAP = re.compile(r"^(\S+) \S+ \S+ \S+ (\d+) +(?!/dev/zero |/SYSV|/memfd:)/.* \(deleted\)$", re.MULTILINE)


def descendants(process: int) -> Iterator[int]:
    """A process and all that come from it, as far as they are there."""
    found = [process]
    while found:
        yield (current := found.pop())
        for thread in threads(current):
            found += map(int, _text(f"{thread}/children").split())


def threads(process: int) -> list[str]:
    """The folders in `/proc` of a process's threads. Each may have files of its own; the first may have ended."""
    with suppress(OSError):
        return [f"/proc/{process}/task/{thread}" for thread in os.listdir(f"/proc/{process}/task")]
    return []


def resident_bytes(process: int) -> int:
    """How much memory a process takes."""
    return max(map(_resident_bytes, threads(process)), default=0)  # its threads have one and the same


def _resident_bytes(thread: str) -> int:
    pages = _text(f"{thread}/statm").split()[1:2]
    return int(*pages) * resource.getpagesize()


def disk_is_full(directory: str, tree: Iterable[int], limits: dict[str, Any]) -> bool:
    """Whether the directory, with what the processes of `tree` hold in deleted files, is above the limits."""
    entries, size = 0, sum(_deleted_files(tree, limits["file_mb"] * _MB).values())
    folders = [directory]
    while folders and entries <= limits["files"] and size <= limits["disk_mb"] * _MB:
        try:
            with os.scandir(folders.pop()) as listing:
                for entry in islice(listing, limits["files"] + 1):
                    entries += 1
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # a path too long to look at, a folder that was closed: nothing that can be measured
            return True
    return entries > limits["files"] or size > limits["disk_mb"] * _MB


def _deleted_files(tree: Iterable[int], largest: int) -> dict[int, int]:
    """The files that are open, mapped or executed and in no folder: inode -> bytes, `largest` where nobody tells."""
    found: dict[int, int] = {}
    for process in tree:
        folders = threads(process)
        for thread in folders:
            found |= _open_and_deleted(thread)
        maps = next(filter(None, (_text(f"{thread}/maps") for thread in folders)), "")  # all threads have the same
        for place, inode in _DELETED_MAP.findall(maps):
            found.setdefault(int(inode), _mapped_bytes(process, place, largest))
    return found


def _open_and_deleted(thread: str) -> dict[int, int]:
    found: dict[int, int] = {}
    with suppress(OSError):
        for link in ["exe", *(f"fd/{number}" for number in os.listdir(f"{thread}/fd"))]:
            with suppress(OSError):
                known = os.stat(f"{thread}/{link}")
                if stat.S_ISREG(known.st_mode) and not known.st_nlink:
                    found[known.st_ino] = known.st_blocks * 512
    return found


def _mapped_bytes(process: int, place: str, largest: int) -> int:
    name = "-".join(end.lstrip("0") or "0" for end in place.split("-"))
    try:
        return os.stat(f"/proc/{process}/map_files/{name}").st_blocks * 512
    except OSError:  # not everybody may look, and a page that is mapped says nothing of the rest
        return largest


def _text(path: str) -> str:
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""
