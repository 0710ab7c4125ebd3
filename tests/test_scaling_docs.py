"""docs/scaling.md: its commands are a recipe's with options of the launcher; its table is what its bytes come to."""

import argparse
import ast
import importlib.util
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from test_readme import COMMANDS, README, blocks, unknown_commands

from trl_openclaw import OPDConfig
from trl_openclaw.trainer.inputs import check_size

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
SIZES = (1.7, 4, 8, 32)


def launched(text: str) -> list[argparse.Namespace]:
    """The commands for `accelerate launch` in a text, as the launcher reads them."""
    lines = (line for line in text.replace("\\\n", " ").splitlines() if line.startswith("accelerate launch"))
    return [launch_command_parser().parse_args(shlex.split(line)[2:]) for line in lines]


def options(words: list[str]) -> dict[str, str]:
    """`--name value` pairs by their names."""
    return dict(zip((name.removeprefix("--") for name in words[::2]), words[1::2], strict=True))


SHOWN = launched("\n".join(blocks(TEXT, "bash", "text")))
PER_STEP = 16
"""Prompts a step, in the recipes and in all of the commands."""


@pytest.mark.parametrize("args", SHOWN, ids=lambda args: f"{Path(args.config_file).stem} {args.num_processes}")
def test_each_command_is_one_that_a_test_runs_with_a_config_of_ours(args):
    assert (ROOT / args.config_file).is_file()
    option, config, *given = args.training_script_args
    assert shlex.join(["accelerate", "launch", args.training_script, option, config]) in COMMANDS
    settings = options(given)
    assert settings.keys() <= {field.name for field in fields(OPDConfig)}
    assert prompts_per_step(args.num_processes or 1, config, settings) == PER_STEP


def test_a_test_runs_each_other_command():
    assert [command for command in unknown_commands(TEXT) if not command.startswith("accelerate launch")] == []


def test_the_command_of_the_readme_for_two_gpus_fits_too():
    (given,) = re.findall(r"`--accelerate_config multi_gpu ([^`]+)`", README.read_text())
    settings = options(given.split())
    processes = int(settings.pop("num_processes"))
    assert prompts_per_step(processes, "recipes/configs/combine.yaml", settings) == PER_STEP


def prompts_per_step(processes: int, config: str, settings: dict[str, str]) -> int:
    """How many prompts a recipe's config takes at a time, in so many processes, if it has enough of them."""
    known = yaml.safe_load((ROOT / config).read_text())
    rows, steps = (
        int(settings.get(name, known[name])) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    args = OPDConfig(
        "unused",
        per_device_train_batch_size=processes * rows,  # by one process, which is all that there is here
        gradient_accumulation_steps=steps,
        num_generations=known["num_generations"],
        bf16=False,
        use_cpu=True,
    )
    check_size((ROOT / known["dataset_name"] / "train.jsonl").read_text().splitlines(), args)
    return args.generation_batch_size // args.num_generations


def test_every_config_is_named_and_exists():
    named = set(re.findall(r"`(\w+\.yaml)`", TEXT))
    assert named == {path.name for path in (ROOT / "accelerate_configs").glob("*.yaml")}


LORA, ALL = "LoRA on bfloat16, adapter of 1 %", "all weights, `dtype: {}`"
BESIDE_BFLOAT16 = "beside bfloat16 weights, or DeepSpeed's"
MEANT = {
    "LoRA bfloat16": (LORA, "one GPU", "beside LoRA"),
    "QLoRA": ("QLoRA, adapter of 1 %", "one GPU", "beside LoRA"),
    "all, bfloat16": (ALL.format("bfloat16"), "one GPU", BESIDE_BFLOAT16),
    "all, float32": (ALL.format("float32") + " with `bf16`", "one GPU", "beside float32 weights"),
    "per GPU of 8, ZeRO-2": (ALL.format("bfloat16"), "N GPUs, ZeRO-2", BESIDE_BFLOAT16),
    "per GPU of 8, ZeRO-3": (ALL.format("bfloat16"), "N GPUs, ZeRO-3 or FSDP2", BESIDE_BFLOAT16),
}
"""What a row of the table of sizes is made of: the training's row and column, and the teacher's column."""


def table(first: str) -> dict[str, dict[str, str]]:
    """The table whose first column has this name, by rows and columns."""
    lines = TEXT[TEXT.index(f"| {first} |") :].partition("\n\n")[0].splitlines()
    (_, *columns), _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines)
    return {name: dict(zip(columns, cells, strict=True)) for name, *cells in rows}


def per_parameter(cell: str) -> float:
    """The bytes of a cell such as `2 + 14 / N (...)`, with 8 GPUs."""
    terms = re.findall(r"([\d.]+)( / N)?(?: \+|$|:| for| \()", cell.partition(" (")[0])
    return sum(float(number) / (8 if divided else 1) for number, divided in terms)


def test_the_table_of_sizes_is_what_training_and_teacher_come_to():
    training, teachers = table("training"), table("teacher, in bytes per parameter of its own")
    sizes = table("training and teacher")
    assert len(sizes) == 15
    for name, given in sizes.items():
        kind, _, taught = name.partition("; ")
        row, column, beside = MEANT[kind]
        for teacher in re.split(r", | or ", taught):
            (added,) = (cells[beside] for known, cells in teachers.items() if teacher in known)
            total = per_parameter(training[row][column]) + per_parameter(added) / (8 if "ZeRO-3" in column else 1)
            in_gb = {f"{size}B": f"{total * size:.1f}" for size in SIZES}
            assert given == {"bytes": f"{total:.2f}".rstrip("0").rstrip(".")} | in_gb, (name, teacher)


SAY_SO = (
    "trl_openclaw.merge",
    "trl_openclaw.scoring",
    "trl_openclaw.teachers.ema_limits",
    "trl_openclaw.teachers.weights",
    "trl_openclaw.trainer.roles",
    "trl_openclaw.trainer.teacher_server",
    "trl.generation.vllm_client",
    "accelerate.commands.launch",
    "accelerate.utils.launch",
)
"""The modules that hold the messages which are explained."""
COMPILED = {"Connection closed by peer"}
"""What a library says whose source is not at hand: gloo."""


def texts_of(module: str) -> list[str]:
    """All texts in a module's code, without backticks, and with `{}` for what is filled in."""
    source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr | ast.Constant):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts))
    return [text.replace("`", "") for text in found]


def test_each_message_that_is_explained_is_one_that_somebody_says():
    said = "\n".join(text for module in SAY_SO for text in texts_of(module))
    explained = [message for cell in table("message") for message in re.findall(r"`([^`]+)`", cell)]
    assert len(explained) == 14
    assert [m for m in explained if m not in COMPILED and re.sub(r"=\d+", "={}", m) not in said] == []


def test_links_lead_somewhere():
    headings = {heading.lower().replace(" ", "-").replace(",", "") for heading in re.findall(r"^## (.+)$", TEXT, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) == headings
