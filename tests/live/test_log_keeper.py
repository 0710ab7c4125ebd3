"""The store's log is moved into its file beside the replies, and a learner's changes are on the disk."""

import asyncio
import shutil
import uuid

import pytest
from learner_harness import make_learner
from live.gateway_harness import wait_for
from live_traffic import record

from trl_openclaw.errors import StoreError
from trl_openclaw.live.gateway import serve
from trl_openclaw.live.gateway.log_keeper import LOG_PAGES, LogKeeper
from trl_openclaw.live.store import Store


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store.db", log_pages=LOG_PAGES)
    for _ in range(200):
        record(store)
    return store


def in_the_file(store, folder) -> int:
    """Turns that the file has without its log."""
    copy = folder / f"{uuid.uuid4()}.db"
    shutil.copy(store.path, copy)
    return len(list(Store(copy).all_turns("default")))


def test_writers_leave_the_log_alone_and_it_is_shortened_beside_them(store, tmp_path):
    assert in_the_file(store, tmp_path) == 0
    record(store)
    store.shorten_log()
    assert in_the_file(store, tmp_path) == 201


def test_it_is_done_again_and_again(store, tmp_path):
    async def keep():
        keeper = LogKeeper(store, pause=0.05)
        task = asyncio.create_task(keeper.run())
        try:
            for turns in (200, 201):
                await asyncio.to_thread(wait_for, lambda n=turns: in_the_file_or_none(store, tmp_path) == n)
                record(store)
        finally:
            task.cancel()
            await keeper.aclose()

    asyncio.run(keep())


def in_the_file_or_none(store, folder):
    try:
        return in_the_file(store, folder)
    except StoreError:
        return None


def test_the_gateway_has_it_done(capsys, monkeypatch):
    asked = {}

    def refuse(path, **settings):
        asked.update(settings)
        raise StoreError("no")

    monkeypatch.setattr(serve, "Store", refuse)
    assert serve.main(["--model", "m", "--engine", "vllm", "--port", "0"]) == 2
    assert asked["log_pages"] == LOG_PAGES


def test_a_learner_s_changes_outlive_the_machine_s_power(tmp_path):
    full, normal = 2, 1
    for made, found in ((make_learner(tmp_path).at_desk.store._store, full), (Store(tmp_path / "store.db"), normal)):
        assert made._connection.execute("PRAGMA synchronous").fetchone()[0] == found
