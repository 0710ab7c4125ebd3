"""The process of the tests: runs them against the code, which reaches it by its answers only, and reports."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from .client import Client, Stopped
from .remote import Remote
from .suite import Failed, Tests


class Report:
    """Counts tests, and keeps what is known of the first that failed."""

    def __init__(self, client: Client):
        self.client = client
        self.passed = 0
        self.first: dict[str, Any] | None = None

    def test(self, name: str, call: Callable[[], object]) -> bool:
        """Run one test, or, with an empty name, what tests need."""
        if self.client.ended:
            return False
        self.client.last_call = ""
        try:
            call()
            if self.client.ended:  # a bare `except` of the test has hidden it
                raise Stopped("stopped")
        except BaseException as error:
            if self.first is None:
                self.first = self._facts(name, error)
            return False
        self.passed += bool(name)
        return True

    def _facts(self, name: str, error: BaseException) -> dict[str, Any]:
        facts = {"name": name or "the tests' own setup", "source": "", "got": None, "expected": None, "error": ""}
        facts["call"] = self.client.last_call
        if isinstance(error, Failed):
            return facts | error.facts | {"trace": ""}
        if isinstance(error, Stopped):
            facts["error"] = f"the code {error}"
        else:
            facts["error"] = f"{type(error).__name__}: {error}"[:2000].rstrip(": ")
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == "tests.py"]
        line = frames[-1].line if frames and frames[-1].line else ""
        return facts | {"source": line, "trace": getattr(error, "from_code", "")}


def main() -> None:
    """Read the task from stdin, run it, print the report as one line of JSON."""
    sys.set_int_max_str_digits(0)
    task = json.loads(sys.stdin.buffer.read())
    tests = Tests(task["tests"], task["entry_point"])
    client = Client(sys.argv[1], task["seconds"])
    report = Report(client)
    facts = _judge(task, tests, client, report)
    client.process.kill()
    facts |= {"ended": client.ended or "finished", "passed": report.passed, "total": tests.total}
    facts |= {"first": report.first, "stdout": client.outputs[0].text(), "stderr": client.outputs[1].text()}
    out = sys.__stdout__ or sys.stdout
    out.write("\n" + json.dumps(facts | {"nonce": task["nonce"]}) + "\n")
    out.flush()
    os._exit(0)  # whatever threads the tests have left


def _judge(task: dict[str, Any], tests: Tests, client: Client, report: Report) -> dict[str, Any]:
    try:
        loaded = client.ask(do="load", code=task["code"])
        found = {str(name): client.decode(value) for name, value in loaded.items()}
        if (wanted := task["entry_point"]) and wanted not in found:
            return {"load_error": {"text": f"it does not define `{wanted}`.", "trace": ""}}
        for name, value in found.items():
            if isinstance(value, Remote):
                value.named(name, name)
        tests.run(found, report.test)
        return {"load_error": None}
    except Stopped as error:
        return {"load_error": {"text": f"it {error}.", "trace": ""}}
    except Exception as error:
        return {
            "load_error": {
                "text": f"{type(error).__name__}: {error}".rstrip(": "),
                "trace": getattr(error, "from_code", ""),
            }
        }
