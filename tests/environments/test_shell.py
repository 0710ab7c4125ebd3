"""A shell whose directory lasts as long as the episode, and a check that says whether it is solved."""

import os
from dataclasses import replace

import pytest

from trl_openclaw.environments.sandbox import Sandbox
from trl_openclaw.environments.shell import ShellEnvironment
from trl_openclaw.errors import SandboxError


@pytest.fixture
def environment(sandbox):
    made = ShellEnvironment(sandbox, max_chars=200)
    made.reset(prompt="Do it.", files={"notes/a.txt": "alpha\n", "filled up": None}, check="grep -q omega notes/a.txt")
    return made


def test_a_command_answers_with_what_a_terminal_shows(environment):
    answer = environment.run_command("cat notes/a.txt; echo wrong >&2; exit 3")
    assert answer == "exit code: 3\nalpha\nstderr:\nwrong"
    assert (answer.satisfied, answer.info) == (None, {"exit_code": 3, "ended": "exited"})


def test_files_stay_and_variables_do_not(environment):
    environment.run_command("cd notes; X=1; echo beta > b.txt")
    assert "beta" in environment.run_command("cat notes/b.txt; echo [$X]")
    assert "[]" in environment.run_command("echo [$X]")


def test_long_output_keeps_head_and_tail(environment):
    answer = environment.run_command("echo head; seq 1 100000; echo tail; seq 1 100000 >&2")
    assert "head\n1\n" in answer
    assert "tail" in answer
    assert answer.count("characters left out here]") == 2
    assert len(answer) < 600


@pytest.mark.parametrize(("command", "said"), [("sleep 60", "Stopped after 0.5 s."), ("kill -9 $$", "exit code: -9")])
def test_commands_that_do_not_end_well(sandbox, command, said):
    environment = ShellEnvironment(Sandbox(replace(sandbox.limits, seconds=0.5)))
    environment.reset()
    assert environment.run_command(command).splitlines()[0] == said


def test_a_full_directory_is_said(environment):
    answer = environment.run_command("for i in 1 2 3 4 5 6 7; do head -c 1000000 /dev/zero > $i; done; sleep 5")
    assert answer.startswith("Stopped: more files than the limit, 4 MiB or 60 of them.")


def test_the_check_decides(environment):
    state = environment.next_state
    assert (state.satisfied, environment.get_reward(), state.role) == (False, 0.0, "tool")
    assert state.text.startswith("Not solved.\nexit code: 1")
    assert state.info["wish"].startswith("This must succeed: grep -q omega notes/a.txt\nIt says: exit code: 1")
    environment.run_command("echo omega > notes/a.txt")
    assert (environment.next_state.satisfied, environment.get_reward()) == (True, 1.0)
    assert "wish" not in environment.next_state.info


def test_the_check_runs_once_per_state(environment, monkeypatch):
    runs = []
    run = Sandbox.run
    monkeypatch.setattr(Sandbox, "run", lambda *args, **kwargs: runs.append(args) or run(*args, **kwargs))
    for _ in range(3):
        _ = environment.next_state, environment.get_reward()
    assert len(runs) == 1


def test_the_check_does_not_read_what_the_agent_left_at_home(environment):
    site = "$HOME/.local/lib/python3.$(python3 -c 'import sys; print(sys.version_info[1])')/site-packages"
    environment.reset(check="python3 -c 'raise SystemExit(1)'")
    environment.run_command(f"mkdir -p {site}; echo 'import os; os._exit(0)' > {site}/usercustomize.py")
    assert environment.get_reward() == 0.0


def test_without_a_check_nothing_is_known(environment):
    environment.reset(prompt="", files=None, check=None)
    assert environment.run_command("ls -A") == "exit code: 0\n(nothing was printed)"
    assert (environment.next_state, environment.get_reward()) == (None, None)


def test_reset_removes_the_directory(environment):
    first = environment.run_command("pwd").splitlines()[1]
    environment.reset()
    second = environment.run_command("pwd").splitlines()[1]
    assert os.path.isdir(second)
    assert not os.path.exists(first)


def test_the_directory_goes_with_the_environment(sandbox):
    environment = ShellEnvironment(sandbox)
    environment.reset()
    place = environment._scratch.path
    del environment
    assert not os.path.exists(place)


BAD_ROWS = [
    *({"files": files} for files in ({"../x": ""}, {"/etc/x": ""}, {"x": 5}, ["x"], {"": ""}, {"a": "", "a/b": ""})),
    {"files": {"x" * 300: ""}},
    *({"check": check} for check in (5, "a\0b", ":" * 40_000)),
]


@pytest.mark.parametrize("row", BAD_ROWS, ids=lambda row: str(row)[:30])
def test_a_row_that_cannot_be_used_counts_for_nothing(environment, row):
    environment.run_command("echo omega > notes/a.txt")
    assert environment.verdict == "not_checked"
    assert environment.get_reward() == 1.0
    with pytest.warns(
        UserWarning, match=r"`ShellEnvironment` cannot use a row, .*(`files`|`check`|File name)"
    ) as found:
        environment.reset(**{"check": "true"} | row)
    assert len(found) == 1
    answer = environment.run_command("ls")
    assert answer.startswith("This task cannot be used. Nothing was run. ")
    assert (answer.satisfied, answer.info) == (None, {"verdict": "unusable_row"})
    assert (environment.verdict, environment.get_reward(), environment.next_state) == ("unusable_row", None, None)
    environment.reset(check="true")
    assert (environment.get_reward(), environment.verdict) == (1.0, "solved")


def test_verdicts(environment):
    assert (environment.verdict, environment.get_reward(), environment.verdict) == ("not_checked", 0.0, "failed")
    environment.reset()
    assert environment.verdict == "no_check"


@pytest.mark.parametrize("command", [None, 5, "", "  ", "a\0b", "x" * 100_000])
def test_commands_that_are_none(environment, command):
    answer = environment.run_command(command)
    assert answer.startswith("`command`")
    assert answer.endswith("Nothing was run.")


def test_a_sandbox_that_fails_is_no_score(environment, monkeypatch):
    def fail(*_, **__):
        raise SandboxError("no more processes")

    monkeypatch.setattr(Sandbox, "run", fail)
    assert environment.run_command("ls") == "The command could not be run: no more processes"
    assert (environment.next_state.satisfied, environment.get_reward()) == (None, None)


def test_a_command_before_reset(sandbox):
    assert "before `reset`" in ShellEnvironment(sandbox).run_command("ls")
