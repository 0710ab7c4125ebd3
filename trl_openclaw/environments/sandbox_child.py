"""The small process between the trainer and a sandboxed program: builds the walls, starts, watches, ends.

`Sandbox` starts one for every run. It forks a first process, which is number one of a space of process numbers where
the kernel gives one, and which forks the command. What is left of the tree when the command ends, a limit is passed or
the trainer is gone, is killed before this process says how it went.
"""

import json
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from . import sandbox_walls as walls
from .sandbox_usage import descendants, disk_is_full, resident_bytes

_LINUX = sys.platform == "linux"
_WATCH_SECONDS = 0.05
_END_SECONDS = 5.0
_MB = 1 << 20
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/ld.so.conf",
    "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf",
    "/nix/store",
)  # fmt: skip


@dataclass
class _Walls:
    rules: int | None = None
    program: bytes = b""
    own_numbers: bool = False  # the first process is number one, and all that it numbers ends with it
    counted: bool = False  # a limit on processes means those of this run
    missing: dict[str, str] = field(default_factory=dict)


def main() -> None:
    """Read a line on the file descriptor that the first argument names, run what it asks for, say there how it went."""
    channel = int(sys.argv[1])
    os.set_inheritable(channel, False)
    try:
        with open(channel, "rb", closefd=False) as requests:
            task = json.loads(requests.readline())
        answer = _run(task | {"channel": channel})
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    with suppress(OSError):  # nobody listens any more
        os.write(channel, json.dumps(answer).encode())


def _run(task: dict[str, Any]) -> dict[str, Any]:
    built = _build(task)
    refused = {name: why for name, why in built.missing.items() if name not in task["allow_missing"]}
    if refused:
        return {"missing": refused}
    reader, writer = os.pipe()
    if _LINUX:
        walls.adopt_orphans()
    first = os.fork()
    if first == 0:
        _be_first(task, built, writer)
    os.close(writer)
    try:
        ended, said = _watch(task, first, reader)
    finally:
        _end_tree(first, task["user"], built.own_numbers)
    return _outcome(ended, said) | {"without": built.missing}


def _outcome(ended: str, said: bytes) -> dict[str, Any]:
    if ended:
        return {"ended": ended, "exit_code": None}
    lines = [json.loads(line) for line in said.splitlines()]
    for line in lines:
        if "error" in line:
            return line
    if not lines:
        return {"ended": "killed", "exit_code": None}
    code = os.waitstatus_to_exitcode(lines[-1]["status"])
    names = {-signal.SIGXCPU: "cpu", -signal.SIGXFSZ: "disk"}
    return {"ended": names.get(code, "exited" if code >= 0 else "killed"), "exit_code": code}


# --- before the fork ------------------------------------------------------------------------------------------------


def _build(task: dict[str, Any]) -> _Walls:
    built = _Walls()
    root = task["user"] is not None
    try:
        readable = [*_SYSTEM, *task["readable"]]
        built.rules = walls.landlock_rules([task["directory"]], readable, _DEVICES)
    except OSError as error:
        built.missing["files"] = str(error)
    try:
        truncate = walls.landlock_version() >= 3
        built.program = walls.seccomp_program(network=False, change_mode=root, truncate=truncate)
    except OSError as error:  # the other walls need it, too: it closes the ways around them
        built.missing |= {name: str(error) for name in ("files", "network", "processes")}
    _count_processes(task, built, root)
    if not _LINUX:
        built.missing["memory"] = "only Linux keeps a process to a size"
    return built


def _count_processes(task: dict[str, Any], built: _Walls, root: bool) -> None:
    try:
        if root:
            built.counted = _LINUX
            with suppress(OSError):  # without the right to, all processes of the new user are killed at the end
                if task["namespaces"]:
                    walls.unshare(walls.CLONE_NEWPID)
                    built.own_numbers = True
        elif task["namespaces"]:
            walls.enter_user_namespace()
            built.counted = built.own_numbers = True
    except OSError as error:
        built.missing["processes"] = f"no user namespace for a user who is not root ({error})"
        return
    if not built.counted:
        built.missing["processes"] = "neither root nor user namespaces are there"


# --- the first process and the command ------------------------------------------------------------------------------


def _be_first(task: dict[str, Any], built: _Walls, writer: int) -> NoReturn:
    try:
        os.setpgid(0, 0)
        if _LINUX:
            walls.end_with_parent()
            walls.adopt_orphans()
            with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
                file.write("1000")  # where memory runs out all the same, this goes and the trainer stays
        command = os.fork()
        if command == 0:
            _be_command(task, built, writer)
        while True:
            process, status = os.wait()
            if process == command:
                os.write(writer, json.dumps({"status": status}).encode() + b"\n")
                break
    finally:
        os._exit(0)


def _be_command(task: dict[str, Any], built: _Walls, writer: int) -> NoReturn:
    kind = "error"
    try:
        os.chdir(task["directory"])
        os.umask(0o077)
        for name in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(name, signal.SIG_DFL)
        _set_limits(task["limits"], built)
        if _LINUX:
            walls.forbid_new_privileges()
        if task["user"] is not None:
            walls.become_user(task["user"], may_search=task["may_search"])
        if _LINUX:
            walls.end_with_parent()
        if built.rules is not None:
            walls.landlock_enter(built.rules)
        if built.program:
            walls.seccomp_enter(built.program)
        kind = "not_started"
        os.execvpe(task["argv"][0], task["argv"], task["env"])
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps({"error": text, "kind": kind}).encode() + b"\n")
    finally:
        os._exit(127)


def _set_limits(limits: dict[str, Any], built: _Walls) -> None:
    chosen = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: limits["file_mb"] * _MB,
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_CPU: max(1, round(limits["cpu_seconds"])),
    }
    if _LINUX:
        chosen[resource.RLIMIT_AS] = limits["memory_mb"] * _MB
    if built.counted:  # in a user namespace this process and the first one count, too
        chosen[resource.RLIMIT_NPROC] = limits["processes"] + (0 if os.geteuid() == 0 else 2)
    for name, value in chosen.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        spare = 1 if name == resource.RLIMIT_CPU else 0  # first a signal that says why, then the end
        resource.setrlimit(name, (value, value + spare if hard == resource.RLIM_INFINITY else value))


# --- watching and ending --------------------------------------------------------------------------------------------


def _watch(task: dict[str, Any], first: int, reader: int) -> tuple[str, bytes]:
    """Wait for the command: which limit ended it (empty when none did), and what the first process said."""
    limits, said = task["limits"], b""
    deadline = time.monotonic() + limits["seconds"]
    while True:
        left = deadline - time.monotonic()
        ready = _readable([reader, task["channel"]], max(0.0, min(_WATCH_SECONDS, left)))
        if reader in ready:
            piece = os.read(reader, 65536)
            said += piece
            if not piece:
                return "", said
            continue
        if task["channel"] in ready:
            return "killed", said
        if left <= 0:
            return "timeout", said
        tree = list(descendants(first)) if _LINUX else []
        if sum(map(resident_bytes, tree)) > limits["memory_mb"] * _MB:
            return "memory", said
        if disk_is_full(task["directory"], tree, limits):
            return "disk", said


def _readable(descriptors: list[int], seconds: float) -> list[int]:
    """Which of some descriptors can be read, or were closed; `select` takes no numbers beyond 1,023."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(seconds * 1000)]


def _end_tree(first: int, user: int | None, own_numbers: bool) -> None:
    give_up = time.monotonic() + _END_SECONDS
    for end in (os.kill, os.killpg):  # with the first process goes all that it numbers, where it is number one
        with suppress(OSError):
            end(first, signal.SIGKILL)
    while _reap():
        if time.monotonic() > give_up:
            raise RuntimeError("Some processes of the sandbox could not be ended.")
        if not own_numbers and user is not None:
            _kill_all_of(user)
        elif not own_numbers and _LINUX:
            for process in list(descendants(os.getpid()))[1:]:
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.002)


def _reap() -> bool:
    """Collect the children that have ended; whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _kill_all_of(user: int) -> None:
    helper = os.fork()
    if helper == 0:
        try:
            os.setresuid(user, user, user)
            if os.getuid() == user != 0:  # as root, -1 would mean the whole machine
                os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(helper, 0)
