"""A shell for an agent, in a scratch directory that lives as long as its episode."""

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import SandboxError
from ..next_states.views import clip, terminal_view
from ..types import NextState, ToolResult
from .bad_rows import UNUSABLE, answer_for_row, warn_of_row
from .sandbox import Sandbox, SandboxResult
from .scratch import Scratch, check_files

_MAX_COMMAND = 30_000
_CHECK_CHARS = 500


class ShellEnvironment:
    """Commands in a directory of their own. TRL's `environment_factory` takes the class, or a function that makes one.

    A row of the data set has `prompt` and, optionally, `files`, a mapping of path to text that the directory begins
    with, and `check`, a shell command whose exit code 0 means solved. The check runs after the episode, in the same
    directory and sandbox, so it should trust nothing there but what it looks at: `python -I` does not import from it.

    Files stay from one command to the next; processes, variables and the working directory do not.

    Args:
        sandbox: Where the commands run.
        max_chars: How much of stdout, and of stderr, an answer shows; of a longer one its head and its tail.
    """

    def __init__(self, sandbox: Sandbox | None = None, max_chars: int = 2000):
        self._sandbox = sandbox or Sandbox()
        self._max_chars = max_chars
        self._limits = replace(self._sandbox.limits, output_chars=max_chars)
        self._scratch: Scratch | None = None
        self._close = lambda: None
        self._check: str | None = None
        self._checked: SandboxResult | None = None
        self._commands = 0
        self._problem = ""

    def reset(self, **row: Any) -> None:
        """Begin an episode with a fresh directory. One that cannot be made is not scored, and a warning says why.

        Args:
            row: The row of the data set, of which `files` and `check` are read. A file that is `None` is left out.
        """
        self._close()
        self._scratch = Scratch()
        self._close = weakref.finalize(self, self._scratch.close)
        self._check, self._checked, self._commands, self._problem = None, None, 0, ""
        try:
            self._scratch.write(_files(row))
            self._check = _check(row)
        except (ValueError, OSError) as error:
            self._problem = warn_of_row(self, error)

    def run_command(self, command: str) -> str:
        """Run a shell command in your directory and see what it prints.

        Args:
            command: The command line for `sh`.

        Returns:
            The exit code, stdout and stderr.
        """
        if self._problem:
            return answer_for_row(self._problem)
        problem = _problem_with(command)
        if problem:
            return ToolResult(problem, satisfied=None, info={"ended": "not_run", "wish": problem})
        self._checked = None
        self._commands += 1
        try:
            run = self._run(command)
        except SandboxError as error:
            return ToolResult(f"The command could not be run: {error}", info={"ended": "sandbox_failed"})
        return ToolResult(self._view(run), info={"exit_code": run.exit_code, "ended": run.ended})

    def get_reward(self) -> float | None:
        """1.0 when the row's `check` succeeds, else 0.0; `None` without one, or when the sandbox failed."""
        state = self.next_state
        return None if state is None or state.satisfied is None else float(state.satisfied)

    @property
    def verdict(self) -> str:
        """What is known of the episode so far, in a word, for logs."""
        if self._problem:
            return UNUSABLE
        if self._checked is None:
            return "no_check" if self._check is None else "not_checked"
        return "solved" if self._checked.ok else "failed"

    @property
    def next_state(self) -> NextState | None:
        """What the row's `check` says of the directory as it is now; `None` without one."""
        if self._check is None:
            return None
        if self._checked is None:
            try:
                self._checked = self._run(self._check, env={"HOME": "/"})
            except SandboxError as error:
                return NextState(f"The check could not be run: {error}", role="tool")
        text, solved = self._view(self._checked), self._checked.ok
        info: dict[str, Any] = {"exit_code": self._checked.exit_code, "ended": self._checked.ended}
        info["commands"] = self._commands
        if not solved:
            info["wish"] = f"This must succeed: {clip(self._check, _CHECK_CHARS)}\nIt says: {clip(text, _CHECK_CHARS)}"
        return NextState(("Solved.\n" if solved else "Not solved.\n") + text, role="tool", satisfied=solved, info=info)

    def _run(self, command: str, env: Mapping[str, str] | None = None) -> SandboxResult:
        if self._scratch is None:
            raise SandboxError("the environment has no directory before `reset`.")
        return self._sandbox.run(["/bin/sh", "-c", command], scratch=self._scratch, limits=self._limits, env=env)

    def _view(self, run: SandboxResult) -> str:
        stopped = {
            "timeout": f"Stopped after {self._limits.seconds:g} s.",
            "cpu": "Stopped: too much CPU time.",
            "memory": f"Stopped: more than {self._limits.memory_mb} MiB of memory.",
            "disk": f"Stopped: more files than the limit, {self._limits.disk_mb} MiB or {self._limits.files} of them.",
        }
        lines = [stopped[run.ended]] if run.ended in stopped else []
        # What is too long was cut where it was read, so here nothing is: the two notes would contradict each other.
        view = terminal_view(run.stdout, run.stderr, run.exit_code, max_chars=len(run.stdout) + len(run.stderr))
        return "\n".join([*lines, view])


def _files(row: Mapping[str, Any]) -> Mapping[str, str]:
    files = row.get("files") or {}
    if isinstance(files, Mapping):  # data sets fill up what some rows lack
        files = {name: text for name, text in files.items() if text is not None}
    check_files(files)
    return files


def _check(row: Mapping[str, Any]) -> str | None:
    check = row.get("check") or None
    if check is not None and (not isinstance(check, str) or "\0" in check):
        raise ValueError(f"`check` must be a shell command, got {check!r}.")
    if check is not None and len(check) > _MAX_COMMAND:
        raise ValueError(f"`check` has {len(check)} characters, at most {_MAX_COMMAND} are allowed.")
    return check


def _problem_with(command: Any) -> str:
    if not isinstance(command, str):
        return f"`command` must be a text, got {type(command).__name__}. Nothing was run."
    if not command.strip() or "\0" in command:
        return "`command` must not be empty nor contain NUL characters. Nothing was run."
    if len(command) > _MAX_COMMAND:
        return f"`command` has {len(command)} characters, at most {_MAX_COMMAND} are allowed. Nothing was run."
    return ""
