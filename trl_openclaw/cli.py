"""`trl-openclaw rl | opd | combine | agent | live`: launch a recipe through `accelerate launch`; others run in here.

Arguments that the recipe's parser knows go to the recipe, the others to `accelerate launch`; `--config` and
`--accelerate_config` take a path, or the name of a file that ships with the package.
"""

import argparse
import dataclasses
import difflib
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

from trl_openclaw import __version__
from trl_openclaw.config_file import read_config_file
from trl_openclaw.cores import available_cores
from trl_openclaw.signals import forward_signals

COMMANDS = {
    "rl": "Binary RL: a judge scores each reply by what followed it",
    "opd": "on-policy distillation: a teacher that saw the hint re-scores the same tokens",
    "combine": "both signals at once",
    "agent": "both signals for every turn of an agent with tools",
    "live": "both signals for the turns that people have with `serve`, as they come in",
}

PROGRAMS = {
    "merge": ("an adapter into its base model, for whoever loads models without PEFT", "trl_openclaw.merge"),
    "serve": (
        "OpenAI's chat API over your model, which records what it learns from",
        "trl_openclaw.live.gateway.serve",
    ),
    "data": ("what was recorded: list, show, export, import, correct, delete", "trl_openclaw.live.data_cli"),
    "versions": ("which version of an adapter answers: list, roll back", "trl_openclaw.live.versions_cli"),
}
"""Commands that are no recipes: what they do, and the module whose `main` does it."""

Launch = Callable[[Path, list[str], list[str]], int]


def main(argv: Sequence[str] | None = None, *, recipes: Path | None = None, launch: Launch | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments, by default those of the process.
        recipes: The folder with the recipes, by default the one that came with the package.
        launch: Called with the script, its arguments and the launcher's; by default runs `accelerate launch`.

    Returns:
        The exit code of the process that was launched, or 128 plus the signal that ended it.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _build_parser()
    command = parser.parse_args(argv[:1]).command  # what follows the command belongs to the recipe
    if command is None:
        parser.print_help()
        return 0
    if command in PROGRAMS:
        return run_program(command, argv[1:])
    if command not in COMMANDS:
        known = [*COMMANDS, *PROGRAMS]
        parser.error(f"unknown command {command!r}{_did_you_mean(command, known)}. Commands: {', '.join(known)}.")

    recipes = recipes_dir() if recipes is None else recipes
    script = recipes / f"{command}.py"
    try:
        recipe_parser = load_recipe(script).make_parser(prog=f"trl-openclaw {command}")
        script_args, launch_args = split_args(recipe_parser, argv[1:], recipes / "configs")
        launch_args = resolve_accelerate_config(launch_args, accelerate_config_dirs())
        return (launch or launch_recipe)(script, script_args, launch_args)
    except UsageError as error:
        return _usage_error(f"trl-openclaw {command}", error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def run_program(command: str, argv: list[str]) -> int:
    """Run one of `PROGRAMS` in this process, and return its exit code."""
    try:
        return importlib.import_module(PROGRAMS[command][1]).main(argv)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "trl_openclaw":
            raise
        print(
            f"trl-openclaw {command}: error: {error.name} is not installed: pip install 'trl-openclaw[live]'",
            file=sys.stderr,
        )
        return 2


class UsageError(Exception):
    """The command line asks for something that does not exist."""


def recipes_dir() -> Path:
    """The folder with the recipes: inside the installed package, or in the checkout's root."""
    return _shipped_dir("recipes")


def accelerate_config_dirs() -> list[Path]:
    """Where a name given to `--accelerate_config` is looked up, ours before TRL's."""
    return [_shipped_dir("accelerate_configs"), Path(str(resources.files("trl") / "accelerate_configs"))]


def load_recipe(script: Path) -> ModuleType:
    """Import a recipe by its path, with its folder importable as it is when the script itself runs."""
    name = f"trl_openclaw_recipe_{script.stem}"
    spec = importlib.util.spec_from_file_location(name, script)
    if spec is None or spec.loader is None or not script.is_file():
        raise FileNotFoundError(f"There is no recipe at {script}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    sys.path.insert(0, str(script.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(script.parent))
    return module


def split_args(parser: Any, args: Sequence[str], configs: Path) -> tuple[list[str], list[str]]:
    """Tell the recipe's arguments from the launcher's.

    Args:
        parser: The recipe's `TrlParser`. It checks the recipe's arguments here, before anything is launched.
        args: Everything after the command.
        configs: The folder with the configs that ship with the recipes.

    Returns:
        The recipe's arguments (with the path of its config) and the launcher's (those of the config file first).
    """
    args, config = _read_config(args, configs)
    from_config: list[str] = []
    if config:
        for name, value in (config.pop("env", None) or {}).items():
            os.environ[str(name)] = str(value)
        from_config = _as_flags(parser.set_defaults_with_config(**config))
    parser.allow_abbrev = False  # an abbreviation could swallow an option of the launcher
    index = args.index("--config") if "--config" in args else len(args)
    _, unknown = parser.parse_known_args(args[:index] + args[index + 2 :])
    return _without(args, unknown), from_config + unknown


def resolve_accelerate_config(args: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Turn `--accelerate_config NAME-or-path` into the `--config_file` of `accelerate launch`.

    Args:
        args: The launcher's arguments.
        folders: Where a name is looked up, in this order.

    Returns:
        The arguments with `--config_file` in front, or unchanged when there is nothing to resolve.
    """
    rest, value = _pop_option(args, "--accelerate_config")
    if value is None:
        return rest
    return ["--config_file", str(_find_yaml(value, folders, "accelerate config")), *rest]


def launch_recipe(script: Path, script_args: list[str], launch_args: list[str]) -> int:
    """Run `accelerate launch` with these arguments and return the exit code of the recipe."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    parser = launch_command_parser()
    args, unknown = parser.parse_known_args([*launch_args, str(script), *script_args])
    if unknown or args.training_script != str(script):
        bad = unknown[0] if unknown else args.training_script
        parsers = (load_recipe(script).make_parser(), parser)
        options = [option for known in parsers for action in known._actions for option in action.option_strings]
        raise UsageError(
            f"{bad!r} is neither an argument of this recipe nor an option of `accelerate launch`"
            f"{_did_you_mean(bad, options)}."
        )
    if args.config_file is not None:
        _check_accelerate_config(Path(args.config_file))
    _set_defaults(args)
    with forward_signals() as received:
        try:
            launch_command(args)
            code = 0
        except ValueError as error:
            raise UsageError(f"`accelerate launch` cannot start: {error}") from error
        except Exception as error:
            found = _exit_code(error)
            if found is None:
                raise
            code = found
    return 128 + received[0] if received else code


def _set_defaults(args: argparse.Namespace) -> None:
    """Say what accelerate would assume, so that it does not list its assumptions, and share the cores of a CPU."""
    import torch
    from accelerate.commands.config.config_args import default_config_file

    devices = torch.accelerator.device_count()
    if args.config_file is None and not os.path.isfile(default_config_file):
        defaults = {
            "num_processes": max(devices, 1),
            "num_machines": 1,
            "mixed_precision": "no",
            "dynamo_backend": "no",
        }
        for name, value in defaults.items():
            if getattr(args, name) is None:
                setattr(args, name, value)
    if args.num_cpu_threads_per_process is None and "OMP_NUM_THREADS" not in os.environ and not devices:
        # Left alone, accelerate gives a process without a GPU one thread.
        processes = max(args.num_processes or 1, 1)
        args.num_cpu_threads_per_process = max(available_cores() // processes, 1)


def _build_parser() -> argparse.ArgumentParser:
    texts = COMMANDS | {name: text for name, (text, _) in PROGRAMS.items()}
    width = max(map(len, texts))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in texts.items())
    parser = argparse.ArgumentParser(
        prog="trl-openclaw",
        usage="trl-openclaw COMMAND [--config FILE] [--accelerate_config NAME] [options of the recipe or the launcher]",
        description="Train a chat model on what happens after it speaks.",
        epilog=f"commands:\n{commands}\n\n`trl-openclaw COMMAND --help` lists a recipe's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"trl-openclaw {__version__}")
    return parser


def _shipped_dir(name: str) -> Path:
    package = Path(__file__).resolve().parent
    folders = [package / name, package.parent / name]  # an installed wheel, a checkout
    for folder in folders:
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"{name} is in neither {folders[0]} nor {folders[1]}: the installation is incomplete.")


def _read_config(args: Sequence[str], configs: Path) -> tuple[list[str], dict[str, Any]]:
    """The arguments with `--config` resolved to a path, and what that file holds."""
    rest, value = _pop_option(args, "--config")
    if value is None:
        return rest, {}
    path = _find_yaml(value, [configs], "recipe config")
    config = _read_yaml(path)
    if not isinstance(config.get("env") or {}, dict):
        raise UsageError(f"`env` in {path} must be a mapping of environment variables.")
    return [*rest, "--config", str(path)], config


def _pop_option(args: Sequence[str], option: str) -> tuple[list[str], str | None]:
    """Take `--option value` or `--option=value` out of the arguments; the last one given wins, as in argparse."""
    rest: list[str] = []
    value = None
    pending = iter(args)
    for arg in pending:
        if arg == option:
            value = next(pending, "")
        elif arg.startswith(f"{option}="):
            value = arg.partition("=")[2]
        else:
            rest.append(arg)
            continue
        if not value or value.startswith("--"):
            raise UsageError(f"{option} needs a value.")
    return rest, value


def _find_yaml(value: str, folders: Sequence[Path], what: str) -> Path:
    if Path(value).is_file():
        return Path(value)
    for folder in folders:
        if (candidate := folder / f"{value}.yaml").is_file():
            return candidate
    names = dict.fromkeys(path.stem for folder in folders for path in sorted(folder.glob("*.yaml")))
    raise UsageError(
        f"{what} {value!r} is neither a file nor one of the names that ship with the package: {', '.join(names)}."
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        return read_config_file(path)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _check_accelerate_config(path: Path) -> None:
    """Let accelerate read its config file now, since it would answer a mistake with a traceback later."""
    from accelerate.commands.config.config_args import load_config_from_file

    config = _read_yaml(path)
    try:
        loaded = load_config_from_file(str(path))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path} is not a config file of accelerate: {error}") from error
    for field in dataclasses.fields(loaded):
        value = getattr(loaded, field.name)
        if field.type in (int, bool) and not isinstance(value, field.type):
            raise UsageError(f"{path} gives `{field.name}` the value {value!r}, which is no {field.type.__name__}.")
    if config["distributed_type"] == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        raise UsageError(f"{path} needs DeepSpeed, which is not installed: pip install 'trl-openclaw[deepspeed]'")


def _as_flags(pairs: Sequence[str]) -> list[str]:
    """Write the true and false of a YAML file as the flags of `accelerate launch`, which take no value."""
    flags: list[str] = []
    for option, value in zip(pairs[::2], pairs[1::2], strict=True):
        if value == "True":
            flags.append(option)
        elif value != "False":
            flags += [option, value]
    return flags


def _without(args: Sequence[str], unknown: Sequence[str]) -> list[str]:
    """`args` less its ordered subsequence `unknown`."""
    pending = list(unknown)
    kept: list[str] = []
    for arg in args:
        if pending and arg == pending[0]:
            pending.pop(0)
        else:
            kept.append(arg)
    return kept


def _exit_code(error: Exception) -> int | None:
    """The exit code of the process whose failure this error reports, or `None` when it reports something else."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if isinstance(error, SignalException):
        code = -error.sigval
    elif isinstance(error, subprocess.CalledProcessError):
        code = error.returncode
    elif isinstance(error, ChildFailedError):
        code = error.get_first_failure()[1].exitcode
    else:
        return None
    return code if code >= 0 else 128 - code  # killed by a signal: as a shell reports it


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _usage_error(prog: str, error: UsageError) -> int:
    print(f"{prog}: error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
