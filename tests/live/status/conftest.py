"""A store that a test fills, a gateway over it, and a browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from live.stub_engine import StubEngine
from status_harness import Browser, RunningGateway, serving_page

from benchmarks.status_store import fill
from trl_openclaw.live.store import Store

START = 1_700_000_000.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store.db", busy_seconds=1.0)


@pytest.fixture
def page(tmp_path: Path, stub: StubEngine, store: Store) -> Iterator[RunningGateway]:
    """A gateway over a store that is still empty."""
    with serving_page(tmp_path, stub, store) as running:
        yield running


@pytest.fixture
def filled(store: Store, request: pytest.FixtureRequest) -> RunningGateway:
    """The same over a store with conversations in all states."""
    fill(store, START)
    return request.getfixturevalue("page")


@pytest.fixture(scope="session")
def any_browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def browser(any_browser: Browser) -> Iterator[Browser]:
    """A browser. Whatever a test does with it, the page complains of nothing and asks nobody else."""
    yield any_browser
    origin = any_browser.run("return location.origin")
    assert [url for url in any_browser.asked() if not url.startswith(f"{origin}/")] == []
    assert any_browser.complaints() == []
