"""Fixtures with the real, small model."""

import importlib.util
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[1] / "recipes"


def load_smollm2_module():
    """Import `recipes/demo/smollm2.py`, which is a script and no part of a package."""
    spec = importlib.util.spec_from_file_location("recipes_demo_smollm2", RECIPES / "demo" / "smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched on first use and cached between runs."""
    return load_smollm2_module().fetch_smollm2()
