"""The process of the code: it loads it and does what it is asked, one request a line."""

import builtins
import contextlib
import json
import linecache
import os
import sys
import traceback
import types
from typing import Any

from .wire import NAME, Wire, changeable, short


class Worker(Wire):
    """Holds the code's objects and does to them what it is asked."""

    def __init__(self, requests: int, answers: int):
        self.requests, self.answers = os.fdopen(requests, "rb"), os.fdopen(answers, "wb")
        self.objects: list[object] = []

    def keep(self, value: object) -> dict[str, Any]:
        self.objects.append(value)
        return {"object": [len(self.objects) - 1, short(value)]}

    def find(self, text: dict[str, Any]) -> Any:
        return self.objects[text["object"][0]]

    def serve(self) -> None:
        for line in self.requests:
            try:
                answer = {"value": self._do(json.loads(line))}
            except BaseException as error:
                answer = {"error": describe_error(error)}
            try:
                text = json.dumps(answer)
            except Exception as error:
                text = json.dumps({"error": describe_error(error)})
            self.answers.write(text.encode() + b"\n")
            self.answers.flush()

    def _do(self, request: dict[str, Any]) -> Any:
        if request["do"] == "load":
            return self._load(request["code"])
        target = self.decode(request["target"])
        if request["do"] == "get":
            return self.encode(getattr(target, request["name"]))
        args = [self.decode(item) for item in request["args"]]
        kwargs = {name: self.decode(item) for name, item in request["kwargs"].items()}
        result = self.encode(target(*args, **kwargs))
        return {"result": result, "args": [self.encode(a) if changeable(a) else None for a in args]}

    def _load(self, code: str) -> dict[str, Any]:
        linecache.cache[f"{NAME}.py"] = (len(code), None, code.splitlines(True), f"{NAME}.py")
        module = sys.modules[NAME] = types.ModuleType(NAME)
        exec(compile(code, f"{NAME}.py", "exec"), module.__dict__)
        found: dict[str, Any] = {}
        for name, value in list(module.__dict__.items()):
            if not name.startswith("__") and not isinstance(value, types.ModuleType):
                with contextlib.suppress(Exception):
                    found[name] = self.encode(value)
        return found


def describe_error(error: BaseException) -> dict[str, Any]:
    """What is told of an error: its builtin class, its own, its text, and where in the code it was raised."""
    known = next((k.__name__ for k in type(error).__mro__ if getattr(builtins, k.__name__, None) is k), "Exception")
    try:
        text = str(error)[:2000]
    except Exception:
        text = ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__, 500) if frame.filename == f"{NAME}.py"]
    lines = traceback.format_list(frames if len(frames) <= 6 else frames[:3] + frames[-3:])
    if isinstance(error, SyntaxError):
        lines += traceback.format_exception_only(error)[:-1]
    return {"builtin": known, "name": type(error).__name__, "text": text, "trace": "".join(lines)[-3000:]}


def main() -> None:
    """Serve on the two file descriptors that the arguments name."""
    sys.set_int_max_str_digits(0)
    Worker(int(sys.argv[2]), int(sys.argv[3])).serve()
