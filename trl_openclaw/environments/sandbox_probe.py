"""Whether this machine holds a sandbox's walls: found out by a program that tries to break out, not by versions."""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from functools import lru_cache

from .sandbox import WALLS, Limits, Sandbox, Wall
from .scratch import Scratch

_LIMITS = Limits(seconds=20, memory_mb=192, processes=12, file_mb=1, disk_mb=8, files=50)
_LOCK = threading.Lock()

# Each attempt says what it could do. The last one may be what ends the program.
_BREAK_OUT = r"""
import fcntl, json, os, signal, socket, subprocess, sys, time
outside, port, bystander, allowed, megabytes = sys.argv[1], *map(int, sys.argv[2:])

def attempt(wall, what, call):
    try:
        done = call()
    except BaseException:
        done = False
    if done is not False:
        print(json.dumps([wall, what]), flush=True)

def fork_many():
    children = []
    try:
        for _ in range(allowed + 8):
            if (child := os.fork()) == 0:
                time.sleep(20)
                os._exit(0)
            children.append(child)
    except OSError:
        return False
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

def stay():
    if os.fork():
        return False
    os.setsid()
    if os.fork():
        os._exit(0)
    held = open("stayed", "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    for stream in (0, 1, 2):
        os.close(stream)
    time.sleep(30)
    os._exit(0)

secret = os.path.join(outside, "secret")
attempt("files", "read a file elsewhere", lambda: open(secret).read())
attempt("files", "list a folder elsewhere", lambda: os.listdir(outside))
attempt("files", "make a file elsewhere", lambda: open(os.path.join(outside, "new"), "w"))
attempt("files", "change a file elsewhere", lambda: open(secret, "a").write("x"))
attempt("files", "shorten a file elsewhere", lambda: os.truncate(secret, 0))
attempt("files", "change the mode of a file elsewhere", lambda: os.chmod(secret, 0o600))
attempt("files", "delete a file elsewhere", lambda: os.unlink(secret))
attempt("files", "run a program elsewhere", lambda: subprocess.run([os.path.join(outside, "program")]).returncode)
attempt("network", "reach a server on this machine", lambda: socket.create_connection(("127.0.0.1", port), 2))
attempt("network", "open a datagram socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
attempt("network", "open a Unix socket", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
if bystander not in (1, os.getpid(), os.getppid()):
    attempt("processes", "end another process", lambda: os.kill(bystander, signal.SIGTERM))
attempt("processes", "start more processes than allowed", fork_many)
stay()
while not os.path.exists("stayed"):
    time.sleep(0.01)
time.sleep(0.05)
attempt("memory", "take more memory than allowed", lambda: bytearray(2 * megabytes << 20))
print("tried", flush=True)
"""


class _Unchecked(Sandbox):
    def _check_walls(self) -> None:
        pass


def broken_walls(python: str, namespaces: bool) -> dict[Wall, str]:
    """The walls that do not hold here -> what got through. Tried once in this process.

    Args:
        python: The interpreter of the sandbox.
        namespaces: Whether the sandbox may use namespaces.
    """
    with _LOCK:
        return _broken_walls(python, namespaces, os.geteuid() == 0)


@lru_cache
def _broken_walls(python: str, namespaces: bool, root: bool) -> dict[Wall, str]:
    sandbox = _Unchecked(_LIMITS, allow_missing=WALLS)
    sandbox._namespaces = namespaces
    outside = os.path.realpath(tempfile.mkdtemp(prefix="openclaw-"))
    try:
        with Scratch() as place, socket.create_server(("127.0.0.1", 0)) as server:
            _furnish(outside)
            return _try_to_break_out(sandbox, place, outside, server.getsockname()[1])
    finally:
        shutil.rmtree(outside, ignore_errors=True)


def _furnish(outside: str) -> None:
    """Leave what nothing but the sandbox keeps a program from."""
    for name, text, mode in (("secret", "secret", 0o666), ("program", "#!/bin/sh\nexit 0\n", 0o755)):
        path = os.path.join(outside, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, mode)
    os.chmod(outside, 0o777)


def _try_to_break_out(sandbox: Sandbox, place: Scratch, outside: str, port: int) -> dict[Wall, str]:
    bystander = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"])
    try:
        arguments = [outside, str(port), str(bystander.pid), str(_LIMITS.processes), str(_LIMITS.memory_mb)]
        argv = [sandbox.python, "-I", "-S", "-c", _BREAK_OUT, *arguments]
        answer, (stdout, stderr) = sandbox._start(argv, place, "", _LIMITS, {})
        lines = stdout.text()[0].splitlines()
        broken: dict[Wall, str] = dict(answer.get("without", {}))
        for wall, what in map(json.loads, (line for line in lines if line.startswith("["))):
            broken.setdefault(wall, f"a program in it could {what}")
        if "tried" not in lines:
            reason = answer.get("error") or stderr.text()[0][-500:].strip() or answer.get("ended")
            broken = dict.fromkeys(WALLS, f"the trial could not be run: {reason}") | broken
        if bystander.poll() is not None:
            broken.setdefault("processes", "a program in it could end another process")
        if _is_held(os.path.join(place.path, "stayed")):
            broken.setdefault("processes", "a program in it was still there after the run")
        return broken
    finally:
        bystander.kill()
        bystander.wait()


def _is_held(path: str) -> bool:
    try:
        with open(path, "a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False
