"""The files in `accelerate_configs`, as accelerate reads them. What they train like: `distributed/test_engines.py`."""

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

FILES = sorted((Path(__file__).parents[1] / "accelerate_configs").glob("*.yaml"))
ARGUMENTS = {action.dest for action in launch_command_parser()._actions}

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def test_there_is_one_for_each_engine():
    names = {path.stem for path in FILES}
    zero = {"zero1", "zero2", "zero3", "zero3_offload"}
    assert names == {"single", "multi_gpu", "fsdp2", "multi_node"} | zero


@each_file
def test_accelerate_reads_it(path):
    """Its reader refuses unknown keys, but not those of an engine's own part, which are arguments of the launcher."""
    config = load_config_from_file(str(path))
    assert {**config.deepspeed_config, **config.fsdp_config}.keys() <= ARGUMENTS
    assert config.distributed_type.value in ("NO", "MULTI_GPU", "DEEPSPEED", "FSDP")


@each_file
def test_precision_and_number_of_processes_are_left_to_who_starts_it(path):
    settings = yaml.safe_load(path.read_text())
    assert path.read_text().startswith("# ")
    assert "mixed_precision" not in settings
    assert settings.get("num_processes") == (1 if path.stem == "single" else None)


def test_a_second_model_is_not_left_empty_under_fsdp():
    """Only the policy would be handed out to the other processes."""
    settings = yaml.safe_load(next(path for path in FILES if path.stem == "fsdp2").read_text())
    assert settings["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] is False
