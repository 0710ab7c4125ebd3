"""Every recipe under every config of `accelerate_configs`: one step on the CPU, of a tiny model that is saved."""

import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch_ranks import ENGINES, ON_CPU, ROOT, SCRIPTS, processes_of, run_under
from recipe_harness import JUDGE_MODEL, judge_or_user, save_tiny_model
from safetensors.torch import load_file
from stub_chat_server import StubChatServer
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(600)

RECIPES = ("opd", "combine", "rl", "agent")
ADAPTERS = ("opd", "rl")
"""Recipes that train an adapter here, as their own configs do; the others train all weights."""

SMALL = (
    "--max_steps 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --max_completion_length 8 "
    "--logging_steps 1 --learning_rate 0.01 --save_strategy steps --save_steps 1 --log_completions false "
    "--report_to none"
)
CPU = {"single": "", "multi_gpu": "--use_cpu true"}
ENGINE_ON_CPU = "--ddp_backend gloo"
"""Asked for the CPU, accelerate would leave it out."""

OWN = {
    "opd": "",
    "combine": "--use_peft false",
    "rl": "",
    "agent": "--num_generations 2 --eval_strategy no --eval_on_start false",
}


def arguments_of(recipe: str, config: str, folder: Path, server: StubChatServer) -> list[str]:
    """What makes a recipe's own config small, and runs it on the CPU."""
    given = shlex.split(f"{SMALL} {CPU.get(config, ENGINE_ON_CPU)} {OWN[recipe]}")
    if recipe != "agent":
        given += ["--judge_base_url", server.base_url, "--judge_num_votes", "1"]
    return [*given, "--model_name_or_path", str(folder / "model"), "--output_dir", str(folder / recipe)]


@pytest.fixture
def trained(run_once):
    """Launches all recipes under a config, one after another in the same processes; gives what they left."""

    def launched(config: str) -> Path:
        def run(folder: Path) -> None:
            save_tiny_model(folder / "model")
            with StubChatServer(judge_or_user, models=[JUDGE_MODEL]) as server:
                arguments = []
                for recipe in RECIPES:
                    arguments += ["--then", f"recipes/{recipe}.py", "--config", f"recipes/configs/{recipe}.yaml"]
                    arguments += arguments_of(recipe, config, folder, server)
                run_under(config, "recipe_ranks.py", folder, *arguments)

        return run_once(f"recipes-{config}", run)

    return launched


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "config", [name if name in ("single", "zero3") else pytest.param(name, marks=pytest.mark.slow) for name in ENGINES]
)
def test_it_trains_and_saves(trained, config, recipe):
    folder = trained(config)
    assert_trained(recipe, folder, processes_of(config), ENGINES[config])
    assert_saved(recipe, folder)


def assert_trained(recipe: str, folder: Path, processes: int, engine: str) -> None:
    paths = [folder / f"{recipe}{rank}.json" for rank in range(processes)]
    assert all(path.exists() for path in paths), (folder / "stderr0").read_text()[-3000:]
    ranks = [json.loads(path.read_text()) for path in paths]
    assert [rank["log"][0]["loss"] for rank in ranks] == [ranks[0]["log"][0]["loss"]] * processes
    for rank in ranks:
        assert rank["engine"].startswith(engine)
        assert rank["processes"] == processes
        assert rank["precision"] == ("no" if recipe == "agent" else "bf16")  # as their configs say
        (entry,) = rank["log"]
        assert entry["loss"]
        assert math.isfinite(entry["loss"])
        assert 0 < entry["grad_norm"] < math.inf
        assert entry["train_rows/share"] == 1.0
        assert entry.get("hint/accepted") == (None if recipe == "rl" else 1.0)


def assert_saved(recipe: str, folder: Path) -> None:
    """What was saved is the whole model, or the adapter alone, and it has been trained."""
    out = folder / recipe
    assert (out / "checkpoint-1" / "trainer_state.json").is_file()
    if recipe in ADAPTERS:
        assert not (out / "model.safetensors").exists()
        saved = load_file(out / "adapter_model.safetensors")
        trained = [name for name in saved if "lora_B" in name]
        assert len(trained) == 2 * 7  # layers, and their linear maps
        assert all(saved[name].any() for name in trained)
        return
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder / "model", out))
    assert {name: tensor.shape for name, tensor in before.items()} == {n: t.shape for n, t in after.items()}
    assert all(after[name].isfinite().all() and not torch.equal(before[name], after[name]) for name in before)


def test_our_command_finds_the_config_by_name(tmp_path):
    """`trl-openclaw opd --config opd --accelerate_config zero3`, with what lets DeepSpeed run on a CPU in between."""
    through = (
        "import sys\n"
        "from pathlib import Path\n"
        "from trl_openclaw import cli\n"
        "script, folder, *arguments = sys.argv[1:]\n"
        "def on_cpu(recipe, given, options):\n"
        "    return cli.launch_recipe(Path(script), [folder, str(recipe), *given], options)\n"
        "sys.exit(cli.main(arguments, launch=on_cpu))\n"
    )
    save_tiny_model(tmp_path / "model")
    command = shlex.split("opd --config opd --accelerate_config zero3 --num_processes 2 --main_process_port 0")
    with StubChatServer(judge_or_user, models=[JUDGE_MODEL]) as server:
        command += arguments_of("opd", "zero3", tmp_path, server)
        done = subprocess.run(
            [sys.executable, "-c", through, str(SCRIPTS / "recipe_ranks.py"), str(tmp_path), *command],
            cwd=ROOT,
            env={**os.environ, **ON_CPU},
            stderr=(tmp_path / "stderr0").open("w"),
            timeout=240,
        )
    assert done.returncode == 0, (tmp_path / "stderr0").read_text()[-3000:]
    assert_trained("opd", tmp_path, 2, "DeepSpeedEngine")
    assert_saved("opd", tmp_path)
