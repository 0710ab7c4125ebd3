"""Runs a benchmark as its docstring says, on a tiny model."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tiny import tiny_llama, tiny_tokenizer

ROOT = Path(__file__).parents[1]


def save_tiny_model(folder: Path) -> str:
    """A model that scripts take with `--model`."""
    tiny_llama(max_position_embeddings=1024).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def run_script(command: str, model: str, options: str) -> tuple[str, Any]:
    """What a command printed, and its last line as JSON. The model and the options are what makes it small."""
    return run_plain_script(command, f"--model {shlex.quote(model)} {options}")


def run_plain_script(command: str, options: str) -> tuple[str, Any]:
    """The same of a command that takes no model."""
    _, script, *given = shlex.split(command)
    done = subprocess.run(
        [sys.executable, script, *given, *shlex.split(options)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, json.loads(done.stdout.strip().splitlines()[-1])
