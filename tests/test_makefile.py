"""The Makefile on machines that lack something, and what its targets run; nothing is installed here."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DEMO = "launch --config_file accelerate_configs/single.yaml recipes/opd.py --config recipes/configs/demo.yaml"

INHERITED = {  # `make test` hands its own settings on
    name: value
    for name, value in os.environ.items()
    if name not in ("CUDA_VISIBLE_DEVICES", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTEST_ARGS", "TORCH")
}

PYTHON = """#!/bin/sh
# A Python that really answers questions asked with -c, and only writes down what else it was told to run.
if [ "$1" = -c ]; then PYTHONPATH={hide} exec {python} "$@"; fi
echo "python $*" >> {log}
case "$*" in {fails}) exit 1;; esac
"""
STUB = """#!/bin/sh
echo "$(basename $0) $* [$CUDA_VISIBLE_DEVICES]" >> {log}
"""


@pytest.fixture
def make(tmp_path):
    """Runs `make` with a virtual environment and a Python of its own; returns the process and what was run."""
    log = tmp_path / "log"

    def run(target: str, *, without: str = "", fails: str = "nothing", **environment: str):
        hide = tmp_path / "hide"
        hide.mkdir()
        for module in without.split():
            (hide / f"{module}.py").write_text("raise ImportError")
        python = script(tmp_path / "python", PYTHON.format(hide=hide, python=sys.executable, log=log, fails=fails))
        done = subprocess.run(
            ["make", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}", target.format(venv=tmp_path / "venv")],
            cwd=ROOT,
            env={**INHERITED, **environment},
            capture_output=True,
            text=True,
        )
        return done, log.read_text().replace(str(tmp_path), "TMP").splitlines() if log.exists() else []

    return run


@pytest.fixture
def installed(tmp_path):
    """A virtual environment in which everything is there, and only writes down that it was called."""
    for name in ("python", "accelerate"):
        script(tmp_path / "venv" / "bin" / name, STUB.format(log=tmp_path / "log"))
    for name in ("venv", "torch", "demo", "test", "dev"):
        (tmp_path / "venv" / ".stamps").mkdir(exist_ok=True)
        (tmp_path / "venv" / ".stamps" / name).touch()


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_environment_with_ensurepip(make):
    done, ran = make("{venv}/.stamps/venv")
    assert done.returncode == 0, done.stderr
    assert ran == ["python -m venv TMP/venv"]


def test_environment_without_ensurepip_is_made_by_pip(make):
    done, ran = make("{venv}/.stamps/venv", without="ensurepip")
    assert done.returncode == 0, done.stderr
    assert ran == [
        "python -m venv --without-pip TMP/venv",
        "python -m pip --quiet --disable-pip-version-check --python TMP/venv/bin/python install pip",
    ]


def test_neither_ensurepip_nor_pip_is_one_clear_line(make, tmp_path):
    done, _ = make("{venv}/.stamps/venv", without="ensurepip", fails="*pip*")
    assert done.returncode == 2
    assert "cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" in done.stdout
    assert not (tmp_path / "venv" / ".stamps" / "venv").exists()


def test_no_python_is_one_clear_line(tmp_path):
    done = subprocess.run(
        ["make", "PYTHON=python0", f"VENV={tmp_path / 'venv'}", f"{tmp_path}/venv/.stamps/venv"],
        cwd=ROOT,
        env=INHERITED,
        capture_output=True,
        text=True,
    )
    assert "There is no python0. Install Python 3.11 or newer" in done.stdout


@pytest.mark.parametrize(
    ("given", "seen"), [({}, "0"), ({"CUDA_VISIBLE_DEVICES": "3"}, "3"), ({"CUDA_VISIBLE_DEVICES": ""}, "")]
)
def test_demo_runs_the_recipe_on_one_device(make, installed, given, seen):
    done, ran = make("demo", **given)
    assert done.returncode == 0, done.stderr
    assert ran == [
        f"python recipes/demo/smollm2.py --link runs/models/SmolLM2-135M-Instruct [{seen}]",
        f"accelerate {DEMO} [{seen}]",
    ]


def test_a_second_run_installs_nothing(make, installed):
    done, ran = make("test", PYTEST_ARGS="-k x")
    assert "Installing" not in done.stdout
    assert [line.split(" [")[0] for line in ran] == [
        "python recipes/demo/smollm2.py",
        "python -m pytest -m not slow --numprocesses 2 --dist worksteal -k x",
    ]


def test_the_long_runs_have_a_target_of_their_own(make, installed):
    command = "make test-slow"
    done, ran = make(command.split()[1], PYTEST_ARGS="-k x")
    assert "Installing" not in done.stdout
    assert [line.split(" [")[0] for line in ran] == [
        "python recipes/demo/smollm2.py",
        "python -m pytest -m slow --numprocesses 2 --dist worksteal -k x",
    ]


def test_the_device_check_runs_on_one_device(make, installed):
    done, ran = make("test-gpu", PYTEST_ARGS="-k live")
    assert done.returncode == 0, done.stderr
    assert ran == ["python -m pytest tests/gpu -m gpu -k live [0]"]


def test_what_is_installed_under_a_name_is_an_extra_of_the_project():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (rule,) = re.findall(
        r"^(\$\(STAMPS\)/\S+(?: \$\(STAMPS\)/\S+)*): \$\(STAMPS\)/%:", (ROOT / "Makefile").read_text(), re.M
    )
    names = rule.replace("$(STAMPS)/", "").split()
    assert {"demo", "live-demo", "test", "dev"} <= set(names) <= extras.keys()
