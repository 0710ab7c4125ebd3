"""`recipes/live.py` as people start it: an update, a second learner, a signal, and what is refused in one line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from learner_harness import USER, open_store, record, states
from tiny import tiny_llama, tiny_tokenizer

from recipes import live

ROOT = Path(__file__).parents[3]
PROGRAMS = {"accelerate": "accelerate.commands.accelerate_cli", "trl-openclaw": "trl_openclaw.cli"}
SMALL = ["--turns_per_step", "4", "--per_device_train_batch_size", "2", "--lora_r", "4", "--check_reply_tokens", "4"]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny model, as `from_pretrained` reads it."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def start(tmp_path, model):
    """Starts a command with more arguments behind it; whatever still runs at the end is ended."""
    started = []

    def run(command: str, *arguments: str) -> subprocess.Popen:
        program, *given = command.split()
        common = ["--model_name_or_path", str(model), "--live_dir", str(tmp_path / "live"), *SMALL]
        home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-m", PROGRAMS[program], *given, *common, *arguments],
            cwd=ROOT,
            env={**os.environ, **home},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_a_full_disk_is_said_in_one_line(tmp_path, model, monkeypatch, capsys):
    def trainer(**kwargs):
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr(live, "LiveTrainer", trainer)
    given = ["--model_name_or_path", str(model), "--live_dir", str(tmp_path), "--use_cpu", "true", *SMALL]
    monkeypatch.setattr(sys, "argv", ["live.py", *given])
    with pytest.raises(SystemExit) as caught:
        live.main()
    assert caught.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("live.py: error: [Errno 28] No space left on device")


@pytest.mark.slow
def test_a_version_is_published_and_rolled_back_with_one_command(tmp_path, model, start):
    store = open_store(tmp_path / "live")
    ids = record(store, range(4), **named(model))
    process = start("accelerate launch recipes/live.py --config recipes/configs/live.yaml", "--max_updates", "1")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err[-3000:]
    assert "Learning from user 'default' from the base model." in out
    assert "Version v000001 is published (held_out no data, plain_questions passed" in out
    assert states(store, ids) == ["trained"] * 4
    config = json.loads(Path(store.versions(USER)[0].path, "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (4, str(model))
    command = [sys.executable, "-m", "trl_openclaw.cli", "versions", "roll-back", "--live_dir", str(tmp_path / "live")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "base answers from now on.\n"
    assert store.published_version(USER) == "base"


def named(model: Path) -> dict:
    """The turns as a gateway records them that was given the model's folder."""
    return {"recorded_model": str(model)}


def test_a_second_learner_is_refused_and_a_signal_ends_the_first(tmp_path, model, start):
    store = open_store(tmp_path / "live")
    record(store, range(5), **named(model))
    first = start("trl-openclaw live --config live")
    deadline = time.monotonic() + 300
    while store.published_version(USER) == "base":
        assert time.monotonic() < deadline
        assert first.poll() is None, first.communicate()[1][-3000:]
        time.sleep(0.2)
    second = start("accelerate launch recipes/live.py --config recipes/configs/live.yaml")
    out, err = second.communicate(timeout=300)
    assert second.returncode != 0
    assert "already trains user 'default'" in err
    assert "Traceback" not in err.split("already trains")[0]
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=120)
    assert first.returncode == 128 + signal.SIGTERM, err[-3000:]
    assert "1/4 turns ready, waiting for feedback" in out
    assert store.open_batches(USER) == []
    assert store.ready_count(USER, 4) == 1


@pytest.mark.slow
def test_mistakes_are_answered_in_one_line(tmp_path, model, start):
    store = open_store(tmp_path / "live")
    record(store, range(4), recorded_model="another model")
    for arguments, message in (
        (["--temperature", "0.7"], "`temperature` must be 1.0 in live training"),
        (["--use_peft", "false"], "Live training publishes adapters"),
        ([], "recorded from the model 'another model', not from"),
    ):
        process = start("accelerate launch recipes/live.py --config recipes/configs/live.yaml", *arguments)
        _, err = process.communicate(timeout=300)
        assert process.returncode != 0
        (line,) = (line for line in err.splitlines() if "live.py: error:" in line)
        assert message in line
    assert store.ready_count(USER, 4) == 4
