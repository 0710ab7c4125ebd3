"""A Python task for an agent: write a function, run it against real unit tests, read what they say."""

import ast
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ..errors import SandboxError
from ..next_states.views import clip, terminal_view
from ..types import NextState, ToolResult
from .bad_rows import UNUSABLE, answer_for_row, warn_of_row
from .sandbox import Limits, Sandbox, SandboxResult
from .unit_tests.client import FLAGS, START

Verdict = Literal[
    "not_run", "solved", "failed", "not_loaded", "timeout", "ended_early", "no_code", "sandbox_failed", "unusable_row"
]  # fmt: skip

_MAX_CODE = 100_000
_WISH_CHARS = 500
_LIMITS = Limits(seconds=5, processes=16)
_SPARE_SECONDS = 2.0
_REPORT_CHARS = 500_000
_FENCE = re.compile(r"^```[^\n`]*\n(.*?)(?:^```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_CODE_LINE = re.compile(r"^(?:def|class|import|from|async def)\b|^@", re.MULTILINE)


class CodeEnvironment:
    """Unit tests for Python code. TRL's `environment_factory` takes the class, or a function that makes one.

    A row of the data set has `prompt`; `tests`, Python text of functions `test_*` and plain assertions, which use the
    function that the prompt asks for by its name or import it from `solution`; and, optionally, `entry_point`, that
    name. Every function and every assertion outside of one is a test. Tests that only define `check(candidate)` are
    called with the entry point.

    The code runs in a process of its own that only answers calls, so nothing that it prints, writes, patches or ends
    changes what is counted. Between tests and code go numbers, texts, bytes, lists, tuples, sets, dicts, `Decimal` and
    `Fraction`, as plain values that are the tests' own. Other objects of the tests, functions too, cannot be passed.
    Other objects of the code stay there. They are equal to no plain value; they can be called, asked for attributes,
    for their text and hash, used in `with`, and iterated once. Everything else, such as arithmetic, comparisons, `in`,
    truth, `len` and indices, is a `TypeError` with any operand that is no object of the code, unless the tests made the
    object by calling a name with a capital letter (`Stack()`), so asked for an object.

    What remains possible: answers learned by heart from the arguments; a test that compares two of the code's own
    objects, or computes with them, believes what those say, and so does one that asks an object by its attributes, text
    or items, or that made it; and where the sandbox was allowed to miss walls, what those keep out.

    Args:
        sandbox: Where the tests run. Its `seconds` are for all tests together. Defaults to 5 seconds, 512 MiB.
        max_chars: How much of a traceback, and of what the code printed, an answer shows.
    """

    def __init__(self, sandbox: Sandbox | None = None, max_chars: int = 2000):
        self._sandbox = sandbox or Sandbox(_LIMITS)
        self._max_chars = max_chars
        self._tests = ""
        self._entry_point: str | None = None
        self._problem = ""
        self._verdict: Verdict = "not_run"
        self._last: ToolResult | None = None

    def reset(self, **row: Any) -> None:
        """Begin a rollout. With tests that cannot be used it is not scored, and a warning says why.

        Args:
            row: The row of the data set, of which `tests` and `entry_point` are read.
        """
        self._verdict, self._last, self._problem = "not_run", None, ""
        try:
            self._tests, self._entry_point = check_tests(row.get("tests")), _entry_point(row)
        except ValueError as error:
            self._verdict, self._problem = UNUSABLE, warn_of_row(self, error)

    def run_tests(self, code: str) -> str:
        """Run the unit tests against your code and see which fail.

        Args:
            code: The whole Python code, imports included.

        Returns:
            How many tests passed, the first failure, and what the code printed.
        """
        if self._problem:
            return answer_for_row(self._problem)
        self._verdict, self._last = self._run(code)
        return self._last

    @property
    def verdict(self) -> Verdict:
        """How the last run of the tests went, in a word, for logs."""
        return self._verdict

    def get_reward(self) -> float | None:
        """1.0 when the last run passed all tests, else 0.0; `None` without a fair one: a bad row, a failed sandbox."""
        return None if self._verdict in ("sandbox_failed", UNUSABLE) else float(self._verdict == "solved")

    @property
    def next_state(self) -> NextState | None:
        """What is said of the rollout after its last turn; `None` where the row cannot be used."""
        if self._problem:
            return None
        if self._last is None:
            info = {"wish": "Call `run_tests` with the whole code before you answer.", "verdict": "not_run"}
            return NextState("The tests were never run.", role="tool", satisfied=False, info=info)
        headline = self._last.partition("\n")[0]
        return NextState(headline, role="tool", satisfied=self._last.satisfied, info=self._last.info)

    def _run(self, code: Any) -> tuple[Verdict, ToolResult]:
        problem = _problem_with(code)
        if problem:
            return "no_code", _result(problem, satisfied=False, verdict="no_code", wish=problem)
        nonce = secrets.token_hex(16)
        limits = self._sandbox.limits
        task: dict[str, Any] = {"code": without_fences(code), "tests": self._tests, "entry_point": self._entry_point}
        task |= {"nonce": nonce, "seconds": limits.seconds}
        roomier = replace(limits, seconds=limits.seconds + _SPARE_SECONDS, output_chars=_REPORT_CHARS)
        argv = [self._sandbox.python, *FLAGS, "-c", START.format("judge"), ".tests"]
        try:
            run = self._sandbox.run(argv, stdin=json.dumps(task), files=_program(), limits=roomier)
        except SandboxError as error:
            text = f"The tests could not be run: {error}"
            return "sandbox_failed", _result(text, satisfied=None, verdict="sandbox_failed")
        return self._read(_find_report(run.stdout, nonce), run)

    def _read(self, report: dict[str, Any] | None, run: SandboxResult) -> tuple[Verdict, ToolResult]:
        seconds = self._sandbox.limits.seconds
        if report is None:  # not a word: the whole tree was stopped
            report = {"ended": run.ended, "passed": 0, "total": 0, "first": None, "load_error": None, "stdout": ""}
            report["stderr"] = run.stderr if run.ended == "exited" else ""
        verdict, headline = _headline(report, seconds)
        first = report["first"] or {}
        lines = [headline, *_failure_lines(first)]
        trace = (report["load_error"] or first).get("trace") or ""
        lines += [clip(trace.rstrip(), self._max_chars)] if trace else []
        if report["stdout"] or report["stderr"]:
            lines += [
                "Output of the code:",
                terminal_view(report["stdout"], report["stderr"], max_chars=self._max_chars),
            ]
        facts = {name: report[name] for name in ("passed", "total", "ended")}
        if verdict != "solved":
            facts["wish"] = clip(_wish(verdict, headline, first, seconds), _WISH_CHARS)
        return verdict, _result("\n".join(lines), satisfied=verdict == "solved", verdict=verdict, **facts)


def check_tests(tests: Any) -> str:
    """The tests of a row, or a `ValueError` that says why they cannot be used."""
    if not isinstance(tests, str) or not tests.strip():
        raise ValueError(f"A row of `CodeEnvironment` needs `tests`, Python text, got {tests!r}.")
    try:
        tree = ast.parse(tests)
        compile(tree, "tests.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"`tests` is no Python: {error or type(error).__name__}") from None
    for node in tree.body:
        name = getattr(node, "name", "")
        if isinstance(node, ast.AsyncFunctionDef | ast.ClassDef) and name.lower().startswith("test"):
            raise ValueError(f"`tests` has {name!r}; use plain functions `test_*` and assertions.")
        if isinstance(node, ast.FunctionDef) and name.startswith("test") and _needs_arguments(node):
            raise ValueError(f"`tests` has {name!r}, which takes arguments; nobody would give them.")
    if not any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(tree)):
        raise ValueError("`tests` asserts nothing, so any code would pass.")
    return tests


def _entry_point(row: Mapping[str, Any]) -> str | None:
    name = row.get("entry_point") or None
    if name is not None and not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"`entry_point` must be the name of what the code defines, got {name!r}.")
    return name


def _needs_arguments(node: ast.FunctionDef) -> bool:
    required = len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults)
    return required > 0 or any(default is None for default in node.args.kw_defaults)


def without_fences(code: str) -> str:
    """The code inside a Markdown fence, where there is one with no code before it; else the text as it is."""
    found = _FENCE.search(code.replace("\r\n", "\n"))
    if found and not _CODE_LINE.search(code[: code.find("```")]):
        return found[1]
    return code


def _problem_with(code: Any) -> str:
    if not isinstance(code, str):
        return f"`code` must be a text, got {type(code).__name__}. Nothing was run."
    if not without_fences(code).strip():
        return "`code` is empty. Nothing was run."
    if len(code) > _MAX_CODE:
        return f"`code` has {len(code)} characters, at most {_MAX_CODE} are allowed. Nothing was run."
    return ""


def _result(text: str, *, satisfied: bool | None, **info: Any) -> ToolResult:
    return ToolResult(text, satisfied=satisfied, info=info)


@cache
def _program() -> dict[str, str]:
    folder = Path(__file__).parent / "unit_tests"
    return {f".tests/unit_tests/{path.name}": path.read_text(encoding="utf-8") for path in folder.glob("*.py")}


def _find_report(stdout: str, nonce: str) -> dict[str, Any] | None:
    for line in reversed(stdout.splitlines()):
        if nonce in line:
            try:
                report = json.loads(line)
            except ValueError:
                continue
            return report if report.get("nonce") == nonce else None
    return None


def _headline(report: Mapping[str, Any], seconds: float) -> tuple[Verdict, str]:
    """The verdict in a word and in a line."""
    passed, total = report["passed"], report["total"]
    counted = f"{passed} of {total} test{'s' * (total != 1)} passed."
    if report["ended"] == "timeout":
        return "timeout", f"Stopped after {seconds:g} s. {counted}" if total else f"Stopped after {seconds:g} s."
    if report["load_error"]:
        return "not_loaded", f"The code could not be loaded: {_one_line(report['load_error']['text'])}"
    if report["ended"] != "finished":
        why = {"memory": "It took too much memory.", "disk": "It wrote too much."}.get(report["ended"], "")
        return "ended_early", " ".join(
            filter(None, ["The run of the tests ended early.", why, counted if total else ""])
        )
    if passed == total and not report["first"]:
        return "solved", f"All {total} tests passed." if total > 1 else "The test passed."
    return "failed", counted if passed < total else "What the tests need failed after the code had run."


def _failure_lines(first: Mapping[str, Any]) -> list[str]:
    if not first:
        return []
    lines = [f"First failure, in {first['name']}: {_one_line(first['source'] or first['error'])}"]
    if first["got"] is not None:
        lines.append(f"It got {first['got']}" + (f", expected {first['expected']}." if first["expected"] else "."))
    elif first["source"]:
        lines.append(_one_line(first["error"]))
    if first["call"]:
        lines.append(f"The last call was {first['call']}.")
    return [clip(line, _WISH_CHARS) for line in lines]


def _wish(verdict: Verdict, headline: str, first: Mapping[str, Any], seconds: float) -> str:
    """What the code should do, as a hint: one sentence made of the first failing test."""
    if verdict == "not_loaded":
        return f"The code must load. {headline}"
    call = f"`{first['call']}`" if first and first["call"] else "the code"
    if verdict == "timeout":
        return f"{call[0].upper()}{call[1:]} must finish: all tests together have {seconds:g} s."
    if not first:
        return f"All tests must pass. {headline}"
    source = f"`{_one_line(first['source'])}` must hold" if first["source"] else f"{first['name']} must pass"
    if first["expected"]:
        return f"{source}: expected {first['expected']}, but got {first['got']}, after the call of {call}."
    if first["got"] is not None:
        return f"{source}, but got {first['got']}, after the call of {call}."
    if first["error"].startswith("the code "):
        return f"{source}, but {first['error']} when {call} was called."
    return f"{source}, but {call} raised {_one_line(first['error'])}."


def _one_line(text: str) -> str:
    return clip(" ".join(text.split()), _WISH_CHARS, lambda _: "...").replace("\n", " ")
