"""The code as the tests see it: its names, behind which every call is a request to the process of the code."""

import builtins
import json
import os
import select
import subprocess
import sys
import threading
import time
from typing import IO, Any, NoReturn

from .remote import Remote
from .wire import MAX_REPR, Wire, changeable, short

MAX_MESSAGE = 4 << 20
FLAGS = ("-s", "-P")
START = "import sys; sys.path.append(sys.argv[1]); from unit_tests.{0} import main; sys.path.pop(); main()"
"""The folder of these files, which the code may write to, is no place to import from once they are loaded."""


class Stopped(BaseException):
    """The process of the code no longer answers. A test cannot catch it as an `Exception`."""


class Client(Wire):
    """Starts the process of the code and asks it.

    Args:
        folder: Where this package is.
        seconds: How long all answers together may take.
    """

    def __init__(self, folder: str, seconds: float):
        self.deadline = time.monotonic() + seconds
        self.buffer = b""
        self.ended = ""
        self.last_call = ""
        (their_requests, self.requests), (self.answers, their_answers) = os.pipe(), os.pipe()
        self.process = subprocess.Popen(
            [
                sys.executable,
                *FLAGS,
                "-u",
                "-c",
                START.format("worker"),
                folder,
                str(their_requests),
                str(their_answers),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[their_requests, their_answers],
        )
        os.close(their_requests)
        os.close(their_answers)
        self.outputs = [Drain(stream) for stream in (self.process.stdout, self.process.stderr) if stream]

    def keep(self, value: object) -> dict[str, Any]:
        if isinstance(value, Remote) and value._client is self:
            return {"object": [value._number]}
        return super().keep(value)

    def find(self, text: dict[str, Any]) -> object:
        number, shown = text["object"]
        return Remote(self, int(number), str(shown)[:MAX_REPR])

    def call(self, target: Remote, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shown = [short(a) for a in args] + [f"{name}={short(value)}" for name, value in kwargs.items()]
        self.last_call = f"{target._text}({', '.join(shown)})"
        sent = {name: self.encode(value) for name, value in kwargs.items()}
        answer = self.ask(do="call", target=self.encode(target), args=[self.encode(a) for a in args], kwargs=sent)
        for ours, theirs in zip(args, answer["args"], strict=True):
            if theirs is not None:
                self._write_back(ours, self.decode(theirs))
        result = self.decode(answer["result"])
        if isinstance(result, Remote):
            result.__dict__["_made"] = target._is_class
        return result

    @staticmethod
    def _write_back(ours: Any, theirs: Any) -> None:
        if not changeable(ours) or type(ours) is not type(theirs):
            return
        if isinstance(ours, list | bytearray):
            if ours != theirs:
                ours[:] = theirs
        elif ours != theirs:
            ours.clear()
            ours.update(theirs)

    def ask(self, **request: Any) -> Any:
        """Send a request and give back what the code makes of it, or raise what it raises."""
        self._send(json.dumps(request).encode() + b"\n")
        try:
            answer = json.loads(self._receive())
            error = answer.get("error")
            told = [str(error[key]) for key in ("builtin", "name", "text", "trace")] if error else []
            value = None if error else answer["value"]
        except Exception as error:
            raise self._stop("broken", f"gave an answer that cannot be read ({error})") from None
        if told:
            raise_as(*told)
        return self.decode(value) if request["do"] == "get" else value

    def _send(self, data: bytes) -> None:
        while data:
            ready = select.select([], [self.requests], [], max(0.0, self.deadline - time.monotonic()))[1]
            if not ready:
                raise self._stop("timeout", "did not answer in time")
            try:
                data = data[os.write(self.requests, data[:4096]) :]
            except OSError:
                raise self._stop("died", "ended its process") from None

    def _receive(self) -> bytes:
        while b"\n" not in self.buffer:
            ready = select.select([self.answers], [], [], max(0.0, self.deadline - time.monotonic()))[0]
            if not ready:
                raise self._stop("timeout", "did not answer in time")
            data = os.read(self.answers, 65536)
            if not data:
                raise self._stop("died", "ended its process")
            self.buffer += data
            if len(self.buffer) > MAX_MESSAGE:
                raise self._stop("broken", f"gave an answer of more than {MAX_MESSAGE >> 20} MB")
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def _stop(self, ended: str, text: str) -> Stopped:
        self.ended = ended
        self.process.kill()
        return Stopped(text)


def raise_as(known: str, name: str, text: str, trace: str) -> NoReturn:
    """Raise in the tests what the code raised: an error of the same builtin class, with its own name."""
    base = getattr(builtins, known, Exception)
    if not isinstance(base, type) or not issubclass(base, Exception):
        base = RuntimeError  # an exit, say, must not end the tests
    name = name if name.isidentifier() else base.__name__
    kind = base if base.__name__ == name else type(name, (base,), {})
    try:
        error = kind(text)
    except TypeError:  # a UnicodeDecodeError takes five arguments
        error = type(name, (RuntimeError,), {})(text)
    error.from_code = trace
    raise error


class Drain:
    """Reads a stream to its end in a thread and keeps its head and tail."""

    def __init__(self, stream: IO[bytes], half: int = 4000):
        self.stream, self.half = stream, half
        self.head, self.tail, self.total = b"", b"", 0
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        while data := os.read(self.stream.fileno(), 65536):
            self.total += len(data)
            space = self.half - len(self.head)
            self.head += data[:space]
            self.tail = (self.tail + data[space:])[-self.half :]

    def text(self) -> str:
        """What was read so far, with a line in place of what was not kept."""
        self.thread.join(0.5)
        cut = self.total - len(self.head) - len(self.tail)
        note = f"\n[... {cut} bytes left out ...]\n".encode() if cut else b""
        return (self.head + note + self.tail).decode("utf-8", "replace")
