"""The trainer's end of a sandbox: starts its child process, writes, and reads everything without keeping everything."""

import codecs
import json
import os
import selectors
import socket
import subprocess
import time
from contextlib import suppress
from typing import Any

from ..errors import SandboxError

_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_START = "import sys; sys.path.append({!r}); from trl_openclaw.environments.sandbox_child import main; main()"
_PATIENCE_SECONDS = 15.0


class Capture:
    """The head and the tail of a stream, of which everything is read.

    Args:
        max_chars: How many characters are kept, half of them at each end.
    """

    def __init__(self, max_chars: int):
        self._first, self._last = max_chars - max_chars // 2, max_chars // 2
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._head, self._tail = "", ""
        self._total = 0

    def add(self, data: bytes, final: bool = False) -> None:
        """Take in the next piece."""
        text = self._decoder.decode(data, final)
        self._total += len(text)
        space = self._first - len(self._head)
        self._head += text[:space]
        self._tail = (self._tail + text[space:])[-self._last :] if self._last else ""

    def text(self) -> tuple[str, int]:
        """What is kept, with a line in place of what is not, and how many characters that was. Call it once."""
        self.add(b"", final=True)
        cut = self._total - len(self._head) - len(self._tail)
        note = f"\n[{cut} characters left out here]\n" if cut else ""
        return self._head + note + self._tail, cut


def launch(
    python: str, task: dict[str, Any], stdin: str, output_chars: int, seconds: float
) -> tuple[dict[str, Any], list[Capture]]:
    """Start the child process of a sandbox, feed it, and read all it says until it ends.

    Returns:
        What it says of the run, and the two outputs of the command.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [python, "-I", "-S", "-c", _START.format(_PACKAGE_PARENT), str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env={},
            cwd="/",
            start_new_session=True,
        )
        theirs.close()
        captures = [Capture(output_chars), Capture(output_chars)]
        try:
            ours.settimeout(_PATIENCE_SECONDS)
            with suppress(BrokenPipeError):  # it has died, and the end of what it says will tell
                ours.sendall(json.dumps(task).encode("ascii") + b"\n")
            said = _converse(process, ours, stdin.encode("utf-8", "replace"), captures, seconds)
        finally:
            ours.close()  # the child ends its tree when nobody listens
            _finish(process)
    if not said:
        _, text = captures
        return {"error": f"its child process died: {text.text()[0][-500:] or process.returncode}"}, captures
    return json.loads(said), captures


def _converse(
    process: "subprocess.Popen[bytes]", channel: socket.socket, stdin: bytes, captures: list[Capture], seconds: float
) -> bytes:
    assert process.stdin
    assert process.stdout
    assert process.stderr
    said, give_up = b"", time.monotonic() + seconds + _PATIENCE_SECONDS
    with selectors.DefaultSelector() as selector:
        for stream, capture in ((process.stdout, captures[0]), (process.stderr, captures[1]), (channel, None)):
            selector.register(stream, selectors.EVENT_READ, capture)
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        while any(key.fileobj is not process.stdin for key in selector.get_map().values()):
            for key, _ in selector.select(max(0.0, give_up - time.monotonic())):
                if key.fileobj is process.stdin:
                    stdin = _feed(selector, process, stdin)
                    continue
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.data is None:
                    said += data
                else:
                    key.data.add(data)
            if time.monotonic() > give_up:
                raise SandboxError("The sandbox did not end its processes in time.")
    return said


def _feed(selector: selectors.BaseSelector, process: "subprocess.Popen[bytes]", stdin: bytes) -> bytes:
    assert process.stdin
    try:
        stdin = stdin[os.write(process.stdin.fileno(), stdin[:65536]) :] if stdin else b""
    except BlockingIOError:
        return stdin
    except BrokenPipeError:
        stdin = b""
    if not stdin:
        selector.unregister(process.stdin)
        process.stdin.close()
    return stdin


def _finish(process: "subprocess.Popen[bytes]") -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream:
            with suppress(OSError):
                stream.close()
    try:
        process.wait(timeout=_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
