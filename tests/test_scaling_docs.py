"""docs/scaling.md: its commands are a recipe's with options of the launcher; its table is what its bytes come to."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

from accelerate.commands.launch import launch_command_parser
from test_readme import COMMANDS, blocks, commands

from trl_openclaw import OPDConfig

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
SIZES = (1.7, 4, 8, 32)


def test_each_command_is_one_that_a_test_runs_with_a_config_of_ours():
    launched = [command for command in commands(TEXT) if command not in COMMANDS]
    assert len(launched) == 4
    for command in launched:
        _, _, *given = shlex.split(command)
        args = launch_command_parser().parse_args(given)
        assert (ROOT / args.config_file).is_file()
        plain = shlex.join(["accelerate", "launch", args.training_script, *args.training_script_args])
        assert plain in COMMANDS


def test_the_commands_for_vllm_are_those_with_settings_of_ours():
    joined = "\n".join(blocks(TEXT, "text")).replace("\\\n", " ").splitlines()
    found = [shlex.split(line) for line in joined if line.startswith("accelerate launch")]
    assert len(found) == 2
    for command in found:
        end = command.index("--use_vllm")
        args = launch_command_parser().parse_args(command[2:end])
        assert (ROOT / args.config_file).is_file()
        assert shlex.join(["accelerate", "launch", args.training_script, *args.training_script_args]) in COMMANDS
        settings = {name.removeprefix("--") for name in command[end:] if name.startswith("--")}
        assert settings <= {field.name for field in fields(OPDConfig)}


def test_every_config_is_named_and_exists():
    named = set(re.findall(r"`(\w+\.yaml)`", TEXT))
    assert named == {path.name for path in (ROOT / "accelerate_configs").glob("*.yaml")}


def test_the_table_is_what_the_bytes_per_parameter_come_to():
    rows = re.findall(r"^\| [^|]+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", TEXT, re.M)
    assert len(rows) == 12
    for per_parameter, *sizes in rows:
        assert sizes == [f"{float(per_parameter) * size:.1f}" for size in SIZES]


def test_links_lead_somewhere():
    headings = {heading.lower().replace(" ", "-").replace(",", "") for heading in re.findall(r"^## (.+)$", TEXT, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) == headings
