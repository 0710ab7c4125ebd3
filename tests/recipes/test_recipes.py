"""Every recipe, for two steps, through the real launcher: what is printed, what is saved, and what reached the loss."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
from huggingface_hub import ModelCard
from matplotlib import image
from recipe_harness import JUDGE_MODEL, judge_or_user, save_tiny_model

from trl_openclaw import cli

ROOT = Path(__file__).parents[2]
MODULES = {"accelerate": "accelerate.commands.accelerate_cli", "trl-openclaw": "trl_openclaw.cli"}
SAMPLES, VOTES, STEPS = 16, 3, 2


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory) -> Path:
    """A tiny model and its tokenizer, saved as `from_pretrained` reads them."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


@pytest.fixture
def launch(tmp_path, tiny_folder):
    """Runs a command as it is written, with more arguments behind it."""

    def run(command: str, *arguments) -> subprocess.CompletedProcess:
        program, *given = shlex.split(command)
        common = ["--model_name_or_path", tiny_folder, "--max_steps", STEPS, "--output_dir", tmp_path / "out"]
        # Its own home, so that nobody's default accelerate config gets in, and nothing is left behind.
        home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", MODULES[program], *given, *map(str, [*common, *arguments])],
            cwd=ROOT,
            env={**os.environ, **home},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=280,
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done

    return run


@pytest.fixture
def judged(launch, chat_server, tmp_path):
    """Launches a recipe whose judge and user are played by the stub server; returns the trainer's log."""
    chat_server.models = [JUDGE_MODEL]
    chat_server.script = judge_or_user

    def run(command: str, *arguments) -> list[dict]:
        launch(
            command,
            *("--judge_base_url", chat_server.base_url, "--use_cpu", "true", "--save_steps", STEPS),
            *("--max_completion_length", 8, "--generation_kwargs", '{"min_new_tokens": 8}', *arguments),
        )
        state = json.loads((tmp_path / "out" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
        return [entry for entry in state["log_history"] if "grad_norm" in entry]

    return run


def questions(server) -> tuple[list[str], list[str]]:
    """What the judge was asked, and what the simulated user was asked; both without thinking, as our configs say."""
    assert all(request["chat_template_kwargs"] == {"enable_thinking": False} for request in server.requests)
    asked = [request["messages"][-1]["content"] for request in server.requests]
    to_judge = [text for text in asked if "The marker is" in text]
    return to_judge, [text for text in asked if text not in to_judge]


def assert_every_vote_and_hint_arrived(log, server, table):
    to_judge, to_user = questions(server)
    assert len(to_judge) == STEPS * SAMPLES * VOTES
    assert len(to_user) == STEPS * SAMPLES
    assert all("HINT-" in text for text in to_judge)
    assert len(log) == STEPS
    for entry in log:
        assert entry["hint/accepted"] == 1.0
        assert entry["judge/vote/negative"] == 1.0
        assert entry["train_rows/share"] == 1.0
        assert entry["opd/gap_abs_mean"] > 0
        assert entry["grad_norm"] > 0
    assert set(table["hint"]) == {"Be brief."}
    assert set(table["next_state"]) == {"Shorter, please."}
    assert set(table["verdict"]) == {"negative"}


def completions(folder: Path) -> pandas.DataFrame:
    return pandas.concat(map(pandas.read_parquet, sorted((folder / "completions").glob("*.parquet"))))


def test_demo_reports_before_and_after(launch, tiny_folder, tmp_path):
    out, report = tmp_path / "out", tmp_path / "report"
    done = launch(
        "accelerate launch recipes/opd.py --config recipes/configs/demo.yaml",
        *("--report_dir", report, "--eval_steps", STEPS, "--max_completion_length", 8, "--num_generations_eval", 1),
    )
    summary = json.loads((report / "summary.json").read_text())
    for when in ("before", "after"):
        assert isinstance(summary[when]["satisfied"], float)
        assert 0 <= summary[when]["satisfied"] <= 1
        assert summary[when]["replies"] == 16
    assert summary["steps"] == STEPS
    assert isinstance(summary["seconds"], float)
    assert summary["seconds"] > 0
    assert [point["step"] for point in summary["curve"]] == [0, STEPS]

    picture = report / "learning_curve.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert min(image.imread(picture).shape[:2]) > 200

    assert [pair["satisfied_after"] for pair in summary["samples"]] == [False] * 16
    lines = done.stdout.splitlines()
    assert "step 0: 0% of held-out replies satisfy" in lines
    assert f"step {STEPS}: 0% of held-out replies satisfy" in lines
    assert [line for line in lines if line.startswith(f"step {STEPS}/{STEPS}: satisfied 0.00, gap ")]
    assert len(re.findall(r"^    before: \[.*\n    after:  \[", done.stdout, re.MULTILINE)) == 4
    assert f"% before, 0% after {STEPS} steps" in done.stdout
    said = done.stdout + done.stderr
    assert [noise for noise in ("\x1b", "gradient_checkpointing` is deprecated", "pin_memory") if noise in said] == []

    assert (out / "model.safetensors").is_file()
    card = ModelCard.load(out / "README.md")
    assert f"# Model Card for {tiny_folder.name}-OPD\n" in card.text
    assert "on 48 prompts of `recipes/demo/questions` by" in card.text
    assert f'model="{out}"' in card.text
    assert "2603.10165" in card.text
    assert {"trl", "trl-openclaw", "opd"} <= set(card.data.tags)
    assert card.data.datasets is None  # a folder here is no dataset on the Hub


@pytest.mark.slow
def test_opd_saves_an_adapter_alone(judged, chat_server, tmp_path):
    log = judged("accelerate launch recipes/opd.py --config recipes/configs/opd.yaml")
    out = tmp_path / "out"
    assert_every_vote_and_hint_arrived(log, chat_server, completions(out))
    assert not any("rewards/judge" in key and entry[key] > 0 for entry in log for key in entry)
    assert (out / "adapter_model.safetensors").is_file()
    assert (out / "adapter_config.json").is_file()
    assert not (out / "model.safetensors").exists()
    assert "- opd\n" in (out / "README.md").read_text()


@pytest.mark.slow
def test_rl_asks_for_scores_alone(judged, chat_server, tmp_path):
    log = judged("accelerate launch recipes/rl.py --config recipes/configs/rl.yaml")
    to_judge, to_user = questions(chat_server)
    assert len(to_judge) == STEPS * SAMPLES * VOTES
    assert len(to_user) == STEPS * SAMPLES
    assert not any("HINT-" in text for text in to_judge)
    assert len(log) == STEPS
    for entry in log:
        assert entry["judge/vote/negative"] == 1.0
        assert entry["rewards/judge/mean"] == -1.0
        assert entry["train_rows/share"] == 1.0
        assert entry["grad_norm"] > 0
        assert not any(key.startswith(("hint/", "opd/", "teacher/")) for key in entry)
    assert set(completions(tmp_path / "out")["verdict"]) == {"negative"}


@pytest.mark.slow
def test_combine_trains_all_weights_on_both_signals(judged, chat_server, tmp_path):
    log = judged("accelerate launch recipes/combine.py --config recipes/configs/combine.yaml", "--use_peft", "false")
    out = tmp_path / "out"
    assert_every_vote_and_hint_arrived(log, chat_server, completions(out))
    assert all(entry["rewards/judge/mean"] == -1.0 for entry in log)
    assert (out / "model.safetensors").is_file()
    assert not (out / "adapter_config.json").exists()


def test_combine_through_our_command(judged, chat_server, tmp_path):
    log = judged("trl-openclaw combine --config recipes/configs/combine.yaml", "--accelerate_config", "single")
    assert_every_vote_and_hint_arrived(log, chat_server, completions(tmp_path / "out"))
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert "- combine\n" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_agent_logs_every_step_of_its_trajectories(launch, tmp_path):
    launch(
        "accelerate launch recipes/agent.py --config recipes/configs/agent.yaml",
        *("--save_strategy", "steps", "--save_steps", STEPS, "--max_completion_length", 8),
    )
    state = json.loads((tmp_path / "out" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    log = [entry for entry in state["log_history"] if "grad_norm" in entry]
    assert len(log) == STEPS
    for entry in log:
        assert entry["environment/verdict/not_run"] == 1.0  # a tiny model knows no tools
        assert entry["steps/0/reward"] == -1.0
        assert entry["steps/0/hint_accepted"] == 1.0
        assert entry["turns/unmatched"] == 0.0
    assert "- combine\n" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_our_configs_are_found_by_name(name):
    asked = []
    assert cli.main([name, "--config", name], launch=lambda *given: asked.append(given) or 0) == 0
    script, script_args, launch_args = asked[0]
    assert script == cli.recipes_dir() / f"{name}.py"
    assert script_args == ["--config", str(cli.recipes_dir() / "configs" / f"{name}.yaml")]
    assert launch_args == []
