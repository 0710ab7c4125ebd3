"""Importing the package is cheap, and every public name is really there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import trl_openclaw

HEAVY = ("torch", "transformers", "trl", "accelerate", "datasets", "openai", "peft", "numpy", "pandas")


def fresh(code: str) -> str:
    """Run code in a new interpreter and return what it printed."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def loaded_by(statement: str) -> set[str]:
    return set(json.loads(fresh(f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))")))


@pytest.mark.parametrize(
    "statement",
    [
        "import trl_openclaw",
        "import trl_openclaw; dir(trl_openclaw)",
        "from trl_openclaw import Turn, NextState, Vote, Verdict, Feedback",
        "from trl_openclaw import insert_hint",
        "import trl_openclaw.cli",
    ],
)
def test_stays_clear_of_heavy_libraries(statement):
    assert loaded_by(statement).isdisjoint(HEAVY)


def test_judges_and_next_states_need_no_torch():
    statement = "from trl_openclaw import Judge, RuleJudge, LLMJudge, FunctionNextState, Persona, PERSONAS"
    assert loaded_by(statement).isdisjoint({"torch", "transformers", "trl", "accelerate", "datasets"})


def test_import_costs_little_more_than_the_standard_library():
    measure = "import time; t = time.perf_counter(); import {0}; print(time.perf_counter() - t)"
    best = lambda modules: min(float(fresh(measure.format(modules))) for _ in range(5))  # noqa: E731
    assert best("trl_openclaw") < 3 * best("dataclasses, json, importlib.metadata")


@pytest.mark.parametrize("name", trl_openclaw.__all__)
def test_public_name_resolves(name):
    assert getattr(trl_openclaw, name) is not None
    assert name in dir(trl_openclaw)


def test_lists_of_public_names_agree():
    assert len(set(trl_openclaw.__all__)) == len(trl_openclaw.__all__)
    assert set(trl_openclaw.__all__) - {"__version__"} == set(trl_openclaw._MODULES)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'OPDTrainr'"):
        _ = trl_openclaw.OPDTrainr


def test_type_checkers_see_the_same_names():
    source = Path(trl_openclaw.__file__).read_text(encoding="utf-8")
    block = source.split("if TYPE_CHECKING:\n")[1].split("\n\n\n")[0]
    namespace: dict = {}
    exec("\n".join(line.removeprefix("    ") for line in block.splitlines()), namespace)
    del namespace["__builtins__"]
    assert namespace == {name: getattr(trl_openclaw, name) for name in trl_openclaw._MODULES}
