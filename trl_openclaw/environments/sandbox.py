"""A sandbox for the programs of an agent: one command, in a directory of its own, within limits that always hold.

What keeps a program in are calls into the Linux kernel that need no installed helper and no special container: Landlock
(files), seccomp (network), a user number or a user namespace of its own (processes), resource limits and a watching
process (memory, disk, time). bubblewrap, the well-kept alternative, needs an administrator to install it and namespaces
that containers forbid, and limits neither memory nor processes nor disk.
"""

import os
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ..errors import SandboxError
from ..types import valid_text
from .sandbox_io import Capture, launch
from .scratch import Scratch, check_files

Wall = Literal["files", "network", "processes", "memory"]
WALLS: tuple[Wall, ...] = get_args(Wall)
"""What a machine may be unable to keep a program from; see `Sandbox.allow_missing`."""

Ended = Literal["exited", "killed", "timeout", "cpu", "memory", "disk", "not_started"]

_REMEDY = {
    "files": "Linux 5.13 or newer with Landlock switched on (`lsm=` of the kernel), on x86_64 or aarch64",
    "network": "Linux with seccomp, on x86_64 or aarch64",
    "processes": "root (as in most containers), or Linux 5.14 or newer that lets users make user namespaces",
    "memory": "Linux",
}


@dataclass(frozen=True)
class Limits:
    """What one run may use.

    Args:
        seconds: Wall time.
        cpu_seconds: CPU time of each process, in whole seconds; `None` leaves it to the wall time.
        memory_mb: Address space of each process, and resident memory of all of them together, in MiB.
        processes: Processes and threads at the same time.
        file_mb: Size of one file, in MiB.
        disk_mb: All files of the directory together, also deleted ones that are still open or mapped, in MiB. It is
            looked at 20 times a second, so a fast writer may pass it for that long.
        files: Files and folders in the directory.
        open_files: Open files of each process.
        output_chars: How much of stdout, and of stderr, is kept: half of it the head, half the tail.
    """

    seconds: float = 10.0
    cpu_seconds: float | None = None
    memory_mb: int = 512
    processes: int = 32
    file_mb: int = 16
    disk_mb: int = 64
    files: int = 2000
    open_files: int = 64
    output_chars: int = 20_000

    def __post_init__(self):
        for name, value in asdict(self).items():
            if name == "cpu_seconds" and value is None:
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < float("inf"):
                raise ValueError(f"`{name}` must be a number above 0, got {value!r}.")


@dataclass(frozen=True)
class SandboxResult:
    """How a run went.

    Args:
        ended: `"exited"`; `"killed"` by a signal of its own; `"timeout"`, `"cpu"`, `"memory"` or `"disk"` by that
            limit; `"not_started"` when there is no such program.
        exit_code: The exit code, minus the signal if one ended it, or `None` when the sandbox did.
        stdout: Its output; where it was too long, head and tail with a line between them that says so.
        stderr: The same for its errors.
        stdout_cut: How many characters of stdout were left out.
        stderr_cut: How many characters of stderr were left out.
        seconds: Wall time, the start of the sandbox included.
    """

    ended: Ended
    exit_code: int | None
    stdout: str
    stderr: str
    stdout_cut: int = 0
    stderr_cut: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it exited with code 0."""
        return self.exit_code == 0


class Sandbox:
    """Runs commands that cannot write outside their directory, read what is not theirs, reach a network, or stay.

    A command may read the system's programs and libraries, all that is installed with this Python (`sys.base_prefix`;
    a virtual environment is not in it) and what `readable` names; nothing else of home directories, of the project, of
    `/proc`, or of the environment. When it ends, all that it started is killed, also what left its
    process group. Making a sandbox tries once in this process whether the machine holds what it promises, by a program
    that tries to break out.

    What it does not keep from a program: the kernel's own faults, names and sizes of files elsewhere (not their
    content), the CPU up to the time limit, and for users other than root changing modes of files by path, which is
    forbidden everywhere, also inside.

    Args:
        limits: What one run may use.
        allow_missing: Walls that this machine may lack, out of `"files"`, `"network"`, `"processes"` and `"memory"`.
            They still hold where they can, and a warning says where they do not.
        readable: Further files and folders that commands may read.
        env: Further environment variables.

    Raises:
        SandboxError: The machine cannot hold a wall that is not in `allow_missing`.
    """

    _namespaces = True

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        allow_missing: Iterable[Wall] = (),
        readable: Iterable[str | os.PathLike[str]] = (),
        env: Mapping[str, str] | None = None,
    ):
        self.limits = limits or Limits()
        self.allow_missing = frozenset([allow_missing] if isinstance(allow_missing, str) else allow_missing)
        if unknown := self.allow_missing - set(WALLS):
            raise ValueError(f"`allow_missing` has {sorted(unknown)}; it may have {list(WALLS)}.")
        self.readable = tuple(os.path.realpath(path) for path in readable)
        self.env = dict(env or {})
        self._check_walls()

    @property
    def python(self) -> str:
        """The interpreter to run Python programs with: this one without its virtual environment."""
        return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        scratch: Scratch | None = None,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
    ) -> SandboxResult:
        """Run one command. Safe to call from several threads at once.

        Args:
            argv: The program and its arguments.
            stdin: What it reads.
            files: Path inside the directory -> text, written before it starts.
            scratch: The directory to run in, where it shall outlive the run; else a fresh one.
            limits: Other limits for this run.
            env: Further environment variables for this run.

        Raises:
            ValueError: A path in `files` leaves the directory.
            SandboxError: The sandbox itself failed.
        """
        if not argv or any(not isinstance(part, str) or "\0" in part for part in argv):
            raise ValueError("`argv` must be a list of texts without NUL characters, the program first.")
        check_files(files or {})
        limits, started = limits or self.limits, time.monotonic()
        try:
            with Scratch() if scratch is None else nullcontext(scratch) as place:
                place.write(files or {})
                answer, outputs = self._start(argv, place, stdin, limits, env or {})
        except OSError as error:
            raise SandboxError(f"The sandbox could not be made: {error}") from error
        if "missing" in answer:
            raise SandboxError(_why_missing(answer["missing"]))
        if "error" in answer and answer.get("kind") != "not_started":
            raise SandboxError(f"The sandbox failed: {answer['error']}")
        if "error" in answer:
            return SandboxResult("not_started", 127, "", answer["error"], seconds=time.monotonic() - started)
        (stdout, stdout_cut), (stderr, stderr_cut) = (output.text() for output in outputs)
        seconds = time.monotonic() - started
        return SandboxResult(answer["ended"], answer["exit_code"], stdout, stderr, stdout_cut, stderr_cut, seconds)

    def _start(
        self, argv: Sequence[str], place: Scratch, stdin: str, limits: Limits, env: Mapping[str, str]
    ) -> tuple[dict[str, Any], list[Capture]]:
        task = self._task([valid_text(part) for part in argv], place, limits, env)
        return launch(self.python, task, stdin, limits.output_chars, limits.seconds)

    def _task(self, argv: list[str], place: Scratch, limits: Limits, env: Mapping[str, str]) -> dict[str, Any]:
        python = [os.path.realpath(sys.base_prefix), self.python]
        clean = {
            "PATH": os.pathsep.join([os.path.dirname(self.python), "/usr/local/bin:/usr/bin:/bin"]),
            "HOME": place.path, "TMPDIR": place.path, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
        }  # fmt: skip
        needed = (self.python, place.path, *self.readable)
        return {
            "argv": argv,
            "directory": place.path,
            "user": place.user,
            "may_search": place.user is not None and not all(map(_is_open_to_all, needed)),
            "readable": [*python, *self.readable],
            "env": clean | self.env | dict(env),
            "limits": asdict(limits) | {"cpu_seconds": limits.cpu_seconds or limits.seconds + 1},
            "allow_missing": sorted(self.allow_missing),
            "namespaces": self._namespaces,
        }

    def _check_walls(self) -> None:
        if os.name != "posix":
            raise SandboxError("A sandbox needs Linux. On Windows, run inside WSL 2.")
        from .sandbox_probe import broken_walls

        try:
            broken = broken_walls(self.python, self._namespaces)
        except OSError as error:
            raise SandboxError(f"The sandbox could not be tried out: {error}") from error
        refused = {name: why for name, why in broken.items() if name not in self.allow_missing}
        if refused:
            raise SandboxError(_why_missing(refused))
        for name, why in broken.items():
            warnings.warn(f"This sandbox does not hold {name!r}, as `allow_missing` lets it: {why}", stacklevel=3)


def _why_missing(missing: Mapping[Any, str]) -> str:
    lines = [f"- {name}: {why}. Needed: {_REMEDY[name]}." for name, why in missing.items()]
    return "\n".join(
        [
            "This machine cannot keep a program in:",
            *lines,
            "Run on a machine that can, in a virtual machine, say, or accept it: "
            f"`Sandbox(allow_missing={tuple(missing)!r})`.",
        ]
    )


def _is_open_to_all(path: str) -> bool:
    """Whether every user may come to this path through the folders above it."""
    above = os.path.dirname(path)
    while True:
        with suppress(OSError):
            if not os.stat(above).st_mode & 0o001:
                return False
        if above == os.path.dirname(above):
            return True
        above = os.path.dirname(above)
