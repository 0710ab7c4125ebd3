"""The `trl-openclaw` command: what goes to the recipe, what to the launcher, and what a mistake looks like."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from trl_openclaw import __version__, cli
from trl_openclaw.signals import forward_signals

RECIPE = """
import json, os, sys
from dataclasses import dataclass, field
from pathlib import Path

from helper import GREETING


@dataclass
class Arguments:
    record: str = field(metadata={"help": "Where to write what arrived."})
    learning_rate: float = 1e-5
    steps: int = 1
    verbose: bool = False
    exit_code: int = 0
    names: list[str] = field(default_factory=list)


def make_parser(prog=None):
    from trl import TrlParser

    return TrlParser((Arguments,), prog=prog)


def main(args):
    seen = {"argv": sys.argv[1:], "args": vars(args), "world": os.environ.get("WORLD_SIZE"), "hello": GREETING,
            "mixed_precision": os.environ.get("ACCELERATE_MIXED_PRECISION"), "threads": os.environ["OMP_NUM_THREADS"]}
    Path(args.record).write_text(json.dumps(seen))
    sys.exit(args.exit_code)


if __name__ == "__main__":
    (args, *_) = make_parser().parse_args_and_config(fail_with_unknown_args=False)
    main(args)
"""


@pytest.fixture(autouse=True)
def ctrl_c_counts():
    """A suite that a script runs in the background ignores Ctrl-C, and so would all that it starts."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def recipes(tmp_path):
    folder = tmp_path / "recipes"
    (folder / "configs").mkdir(parents=True)
    (folder / "opd.py").write_text(RECIPE)
    (folder / "helper.py").write_text("GREETING = 'hello'\n")
    return folder


WAITING = """
import json, os, signal, sys, time
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Arguments:
    record: str = ""
    saves: bool = False


def make_parser(prog=None):
    from trl import TrlParser

    return TrlParser((Arguments,), prog=prog)


if __name__ == "__main__":
    record, seen = Path(sys.argv[sys.argv.index("--record") + 1]), []

    def note(signum, frame):
        seen.append(signum)

    if "--saves" in sys.argv:  # as a trainer that saves a checkpoint before it ends
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(name, note)
    rank = os.environ.get("RANK", "0")
    started = record.with_name(f"{record.name}.pid{rank}")
    started.with_suffix(".tmp").write_text(str(os.getpid()))
    started.with_suffix(".tmp").rename(started)
    end = time.monotonic() + 120
    while time.monotonic() < end and not seen:
        time.sleep(0.05)
    time.sleep(1)  # the checkpoint is written, whatever else arrives
    record.write_text(json.dumps(seen))
"""


@pytest.fixture
def launched(recipes):
    """Runs the command with a launcher that only notes what it was asked to do."""
    calls = []

    def note(script, script_args, launch_args):
        calls.append((script, script_args, launch_args))
        return 0

    def run(*argv):
        calls.clear()
        code = cli.main(["opd", *map(str, argv)], recipes=recipes, launch=note)
        return code, *(calls[0][1:] if calls else (None, None))

    return run


def test_arguments_are_split_between_recipe_and_launcher(launched):
    code, script_args, launch_args = launched(
        "--num_processes", 2, "--steps", 2, "--record", "r", "--multi_gpu", "--verbose", "--mixed_precision", "bf16"
    )
    assert code == 0
    assert script_args == ["--steps", "2", "--record", "r", "--verbose"]
    assert launch_args == ["--num_processes", "2", "--multi_gpu", "--mixed_precision", "bf16"]


def test_lists_and_negative_numbers_stay_with_their_option(launched):
    _, script_args, launch_args = launched("--record", "r", "--names", "a", "b", "--steps", -1, "--machine_rank", 0)
    assert script_args == ["--record", "r", "--names", "a", "b", "--steps", "-1"]
    assert launch_args == ["--machine_rank", "0"]


def test_abbreviations_are_not_guessed(launched):
    assert launched("--record", "r", "--step", 2)[1:] == (["--record", "r"], ["--step", "2"])


def test_config_file_fills_required_fields_and_passes_launcher_options_on(launched, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENCLAW_TEST_VARIABLE", "before")
    config = tmp_path / "x.yaml"
    config.write_text(
        "record: r\nnum_processes: 2\nmulti_gpu: true\ndebug: false\nenv:\n  OPENCLAW_TEST_VARIABLE: after\n"
    )
    code, script_args, launch_args = launched("--config", config, "--steps", "3")
    assert code == 0
    assert script_args == ["--steps", "3", "--config", str(config)]
    assert launch_args == ["--num_processes", "2", "--multi_gpu"]
    assert cli.os.environ["OPENCLAW_TEST_VARIABLE"] == "after"


def test_config_that_ships_with_the_recipes_is_found_by_name(launched, recipes):
    (recipes / "configs" / "tiny.yaml").write_text("record: r\n")
    _, script_args, _ = launched("--config=tiny")
    assert script_args == ["--config", str(recipes / "configs" / "tiny.yaml")]


@pytest.mark.parametrize("form", [["--accelerate_config", "zero2"], ["--accelerate_config=zero2"]])
def test_named_accelerate_config(launched, form):
    _, script_args, launch_args = launched("--record", "r", *form, "--num_processes", 2)
    assert script_args == ["--record", "r"]
    assert launch_args == [
        "--config_file", str(cli.accelerate_config_dirs()[0] / "zero2.yaml"), "--num_processes", "2",
    ]  # fmt: skip


def test_command_line_overrides_the_accelerate_config_of_the_file(launched, tmp_path):
    config = tmp_path / "x.yaml"
    config.write_text("record: r\naccelerate_config: zero2\n")
    _, _, launch_args = launched("--config", config, "--accelerate_config", "zero3")
    assert [Path(arg).name for arg in launch_args] == ["--config_file", "zero3.yaml"]


def test_our_accelerate_configs_come_before_those_of_trl(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder, names in ((ours, ["both"]), (theirs, ["both", "only_theirs"])):
        folder.mkdir()
        for name in names:
            (folder / f"{name}.yaml").touch()
    find = lambda name: cli.resolve_accelerate_config(["--accelerate_config", name], [ours, theirs])[1]  # noqa: E731
    assert find("both") == str(ours / "both.yaml")
    assert find("only_theirs") == str(theirs / "only_theirs.yaml")
    assert find(str(theirs / "both.yaml")) == str(theirs / "both.yaml")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--accelerate_config", "zero9"], ["zero9", "single", "multi_gpu", "zero2", "zero3", "fsdp2"]),
        (["--accelerate_config"], ["--accelerate_config needs a value"]),
        (["--accelerate_config", "--num_processes", "2"], ["--accelerate_config needs a value"]),
        (["--config", "nowhere.yaml"], ["nowhere.yaml", "neither a file nor"]),
        (["--config", "/"], ["'/'", "neither a file nor"]),
        (["--accelerate_config", "/"], ["'/'", "neither a file nor"]),
        (["--config"], ["--config needs a value"]),
    ],
)
def test_what_does_not_exist_is_a_clear_error(launched, capsys, argv, words):
    code, *calls = launched("--record", "r", *argv)
    assert code == 2
    assert calls == [None, None]
    message = capsys.readouterr().err
    assert all(word in message for word in words)
    assert len(message.splitlines()) == 1


BROKEN = {
    "a list": ("- 1\n", "does not hold a YAML mapping"),
    "numbers as names": ("1: 2\n", "does not hold a YAML mapping"),
    "text": ("distributed\n", "does not hold a YAML mapping"),
    "empty": ("", "is empty"),
    "malformed": ("a: [1,\nb: }\n", "cannot be read as YAML"),
    "binary": ("\ud800", "cannot be read as YAML"),
}


def assert_one_line_naming(errors, path, *words):
    assert len(errors.splitlines()) == 1
    assert all(word in errors for word in (f"error: {path} ", *words)), errors


@pytest.mark.parametrize("option", ["--config", "--accelerate_config", "--config_file"])
@pytest.mark.parametrize("kind", BROKEN)
def test_config_that_is_none_is_one_clear_line(recipes, tmp_path, capsys, option, kind):
    text, words = BROKEN[kind]
    path = tmp_path / "broken.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert cli.main(["opd", "--record", str(tmp_path / "record"), option, str(path)], recipes=recipes) == 2
    assert_one_line_naming(capsys.readouterr().err, path, words)
    assert not (tmp_path / "record").exists()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("distributed_type: 'NO'\nnum_gpuz: 2\n", "num_gpuz"),
        ("distributed_type: MANY\n", "MANY"),
        ("num_processes: 1\n", "distributed_type"),
        ("distributed_type: 'NO'\nnum_processes: two\n", "`num_processes` the value 'two'"),
    ],
)
def test_accelerate_config_with_what_accelerate_does_not_know(recipes, tmp_path, capsys, text, word):
    path = tmp_path / "unknown.yaml"
    path.write_text(text)
    assert cli.main(["opd", "--record", "r", "--accelerate_config", str(path)], recipes=recipes) == 2
    assert_one_line_naming(capsys.readouterr().err, path, word)


def test_launcher_that_refuses_is_one_clear_line(recipes, capsys):
    assert cli.main(["opd", "--record", "r", "--accelerate_config", "multi_gpu"], recipes=recipes) == 2
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1
    assert "--num_processes" in errors


def test_deepspeed_that_is_not_installed_names_the_extra(recipes, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert cli.main(["opd", "--record", "r", "--accelerate_config", "zero2"], recipes=recipes) == 2
    assert_one_line_naming(capsys.readouterr().err, cli.accelerate_config_dirs()[0] / "zero2.yaml", "[deepspeed]")


@pytest.mark.parametrize("stray", [["--num_procesess", "2"], ["--stepz", "2"], ["--multi_gpuu"]])
def test_option_that_nobody_knows_is_refused_before_launching(recipes, tmp_path, capsys, stray):
    record = tmp_path / "record.json"
    assert cli.main(["opd", "--record", str(record), *stray], recipes=recipes) == 2
    assert f"{stray[0]!r} is neither" in capsys.readouterr().err
    assert not record.exists()


def test_misspelt_option_of_the_recipe_is_recognised(recipes, capsys):
    assert cli.main(["opd", "--record", "r", "--learnig_rate", "1"], recipes=recipes) == 2
    assert "did you mean '--learning_rate'?" in capsys.readouterr().err


def test_wrong_value_is_refused_before_launching(launched, capsys):
    with pytest.raises(SystemExit) as stop:
        launched("--record", "r", "--steps", "many")
    assert stop.value.code == 2
    assert "--steps: invalid int value" in capsys.readouterr().err


def test_unknown_command_hints_at_the_right_one(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["combin"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "did you mean 'combine'?" in message
    assert "rl, opd, combine, agent" in message


def test_help_lists_the_commands(capsys):
    assert cli.main([]) == 0
    without = capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == without
    assert all(f"  {name} " in without for name in cli.COMMANDS)


def test_help_of_a_command_shows_the_fields_of_the_recipe(recipes, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["opd", "--help"], recipes=recipes)
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "trl-openclaw opd" in text
    assert "Where to write what arrived." in text


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"trl-openclaw {__version__}"


def test_missing_recipe_names_the_path(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no recipe at .*rl\.py"):
        cli.main(["rl"], recipes=tmp_path)


@pytest.mark.parametrize("exit_code", [0, 3])
def test_launches_through_accelerate_and_passes_the_exit_code_on(recipes, tmp_path, exit_code):
    record, config = tmp_path / "record.json", tmp_path / "x.yaml"
    config.write_text(f"record: {record}\nsteps: 7\nmixed_precision: 'no'\n")
    arguments = ["--config", str(config), "--accelerate_config", "single", "--exit_code", str(exit_code)]
    assert cli.main(["opd", *arguments, "--num_cpu_threads_per_process", "2"], recipes=recipes) == exit_code
    seen = json.loads(record.read_text())
    assert seen["argv"] == ["--exit_code", str(exit_code), "--config", str(config)]
    assert seen["args"]["steps"] == 7
    assert seen["mixed_precision"] == "no"
    assert seen["threads"] == "2"
    assert seen["hello"] == "hello"


def test_accelerate_does_not_list_its_assumptions(recipes, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", tmp_path / "none")
    monkeypatch.setattr("accelerate.commands.launch.default_config_file", tmp_path / "none")
    assert cli.main(["opd", "--record", str(tmp_path / "r")], recipes=recipes) == 0
    assert "had defaults used instead" not in caplog.text
    assert json.loads((tmp_path / "r").read_text())["mixed_precision"] == "no"


def test_exit_code_of_each_kind_of_launcher():
    one_of_many = ChildFailedError("x", {1: ProcessFailure(local_rank=1, pid=1, exitcode=3, error_file="")})
    assert cli._exit_code(one_of_many) == 3
    assert cli._exit_code(subprocess.CalledProcessError(4, "x")) == 4
    assert cli._exit_code(subprocess.CalledProcessError(-9, "x")) == 137  # as a shell reports a signal
    assert cli._exit_code(SignalException("x", signal.SIGTERM)) == 143
    assert cli._exit_code(ValueError("not a launched process")) is None


def test_every_command_has_its_recipe():
    assert all((cli.recipes_dir() / f"{name}.py").is_file() for name in cli.COMMANDS)


def test_help_does_not_import_torch():
    code = "import sys; from trl_openclaw import cli; cli.main([]); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=Path(__file__).parents[1])


# Stopping


def command_line(recipes, tmp_path, *argv, head=""):
    """The whole command, with a waiting recipe, as a process of its own would be started."""
    (recipes / "opd.py").write_text(WAITING)
    code = f"{head}import sys; from pathlib import Path; from trl_openclaw import cli; "
    code += f"sys.exit(cli.main(sys.argv[1:], recipes=Path({str(recipes)!r})))"
    return [sys.executable, "-c", code, "opd", "--record", str(tmp_path / "seen"), *argv]


def environment(tmp_path):
    home = {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(Path(__file__).parents[1])}
    return {**os.environ, **home}


@pytest.fixture
def started(recipes, tmp_path):
    """Starts the command out of reach of any terminal and returns it with the recipe's processes, once those run."""
    running = []

    def start(*argv, ranks=1, head=""):
        process = subprocess.Popen(
            command_line(recipes, tmp_path, *argv, head=head),
            env=environment(tmp_path),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        children = [psutil.Process(wait_for_pid(tmp_path / f"seen.pid{rank}")) for rank in range(ranks)]
        running.extend([psutil.Process(process.pid), *children])
        return process, children

    yield start
    for process in running:
        if process.is_running():
            process.kill()


def wait_for_pid(path):
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, "the recipe did not start"
        time.sleep(0.05)
    return int(path.read_text())


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_recipe_too(started, signum):
    process, (recipe,) = started()
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert not recipe.is_running()
    assert not re.search(r"(cli|signals|launch)\.py", errors)  # the traceback, if any, is the recipe's


def test_a_recipe_that_saves_first_is_waited_for(started, tmp_path):
    process, (recipe,) = started("--saves", "true")
    process.terminate()
    process.wait(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not recipe.is_running()
    assert json.loads((tmp_path / "seen").read_text()) == [signal.SIGTERM]


def test_a_recipe_that_does_not_end_is_killed(started, tmp_path):
    process, (recipe,) = started(
        "--saves", "true", head="from trl_openclaw import signals; signals.STOP_TIMEOUT = 0.1; "
    )
    process.terminate()
    process.wait(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not recipe.is_running()
    assert not (tmp_path / "seen").exists()


def test_a_signal_ends_every_process_of_a_launch(started):
    process, recipes = started("--multi_gpu", "--num_processes", "2", ranks=2)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not any(recipe.is_running() for recipe in recipes)
    assert "Traceback" not in errors


def test_ctrl_c_reaches_the_recipe_once(recipes, tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:
        command = command_line(recipes, tmp_path, "--saves", "true")
        os.execve(command[0], command, environment(tmp_path))
    recipe = psutil.Process(wait_for_pid(tmp_path / "seen.pid0"))
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGINT
    assert not recipe.is_running()
    assert json.loads((tmp_path / "seen").read_text()) == [signal.SIGINT]


def test_ctrl_c_before_anything_runs_is_no_traceback(recipes, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    assert cli.main(["opd", "--record", "r"], recipes=recipes, launch=interrupted) == 130


def test_ignored_signals_stay_ignored_and_handlers_come_back():
    def mine(signum, frame): ...

    before = {signal.SIGHUP: signal.SIG_IGN, signal.SIGTERM: mine}
    old = {signum: signal.signal(signum, handler) for signum, handler in before.items()}
    try:
        with forward_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) not in (mine, signal.SIG_DFL)
        assert {signum: signal.getsignal(signum) for signum in before} == before
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


def test_a_signal_before_the_launch_ends_the_command():
    """In a process of its own, since one that runs tests may have children."""
    code = (
        "import signal\nfrom trl_openclaw.signals import forward_signals\n"
        "with forward_signals():\n    signal.raise_signal(signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGTERM
