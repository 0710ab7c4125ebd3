"""Runs of several processes, which take seconds to start: what several tests look at is run once for all of them."""

import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
from filelock import FileLock
from rank_runs import Run, run_all


@pytest.fixture(scope="session")
def run_once(tmp_path_factory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Calls a function with a new folder, unless that was done for this name before, by whichever of pytest's workers.

    Gives the folder. A function that raises is not called again: what it left is there for all.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def once(name: str, run: Callable[[Path], None]) -> Path:
        folder = shared / name
        with FileLock(shared / f"{name}.lock"):
            if not folder.exists():
                folder.mkdir()
                run(folder)
        return folder

    return once


@pytest.fixture(scope="session")
def ranks_under(run_once) -> Callable[[str], Run]:
    """What processes find under a config of `accelerate_configs`; see `rank_runs`."""

    @cache
    def found(config: str) -> Run:
        return Run(config, run_once(f"ranks-{config}", partial(run_all, config)))

    return found
