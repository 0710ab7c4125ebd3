"""A gateway for tests: the real application under a real server on the loopback, over the stub engine or another."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import openai
import uvicorn

from trl_openclaw.live.engines import Engine
from trl_openclaw.live.engines.vllm import VllmEngine
from trl_openclaw.live.gateway.app import Gateway, create_app
from trl_openclaw.live.gateway.serve import listen
from trl_openclaw.live.store import Store

USER = {"role": "user", "content": "hi"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "times": {"type": "integer"}}},
    },
}


class RunningGateway:
    """A gateway that is up.

    Args:
        app: The application.
        store: Its store, for a test to look into.
        port: Where it listens.
    """

    def __init__(self, app: Any, store: Store, port: int):
        self.gateway: Gateway = app.state.gateway
        self.store = store
        self.port = port

    @property
    def url(self) -> str:
        """Its address, without a path."""
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "any", **kwargs: Any) -> openai.OpenAI:
        """The official client, which never tries again."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, "timeout": 30, **kwargs})

    def async_client(self, key: str = "any") -> openai.AsyncOpenAI:
        """The same for asyncio."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=300)

    def ask(self, text: str, **kwargs: Any) -> Any:
        """One reply to one message."""
        with self.client() as client:
            messages = [{"role": "user", "content": text}]
            return client.chat.completions.create(model=self.gateway.engine.model, messages=messages, **kwargs)

    def health(self, key: str = "any") -> dict[str, Any]:
        """What it says of itself."""
        with self.client(key) as client:
            return client.get("../health", cast_to=object)

    def turns(self, user: str = "default") -> list[Any]:
        """What the store holds, oldest first."""
        return list(self.store.all_turns(user))

    def metric(self, name: str, **labels: str) -> float:
        """A number of Prometheus."""
        return self.gateway.metrics.registry.get_sample_value(f"openclaw_{name}", labels) or 0.0


@contextmanager
def serving(folder: Path, engine: Engine, *, store: Store | None = None, **kwargs: Any) -> Iterator[RunningGateway]:
    """A gateway over an engine, with its store in a folder."""
    path = folder / "store.db"
    listening = listen("127.0.0.1", 0)
    app = create_app(store or Store(path, busy_seconds=1.0), engine, **kwargs)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started, what="the gateway")
        yield RunningGateway(app, Store(path), listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def serving_stub(
    folder: Path, stub: Any, *, logprobs: Literal["raw", "processed"] = "raw", **kwargs: Any
) -> Iterator[RunningGateway]:
    """A gateway over the stub engine."""
    with serving(folder, VllmEngine(stub.model, stub.base_url, logprobs=logprobs), **kwargs) as running:
        yield running


def wait_for(condition: Callable[[], Any], *, seconds: float = 20.0, what: str = "it") -> Any:
    """What a condition gives as soon as it gives something."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError(f"{what} did not happen within {seconds:g} s")


def save_adapter_stub(folder: Path, name: str) -> Path:
    """A folder that looks like an adapter to the stub."""
    path = folder / name
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    return path


def publish(store: Store, folder: Path, version: str, user: str = "default", parent: str = "base") -> None:
    """Publish a version as the learner does."""
    path = save_adapter_stub(folder, f"{user}-{version}")
    store.add_version(user, version, parent, str(path))
    store.publish(user, version)


def publish_adapter(store: Store, version: str, path: Path, user: str = "default") -> None:
    """Publish an adapter that lies somewhere."""
    store.add_version(user, version, "base", str(path))
    store.publish(user, version)


def run(coroutine: Any, seconds: float = 60.0) -> Any:
    """Run a coroutine, for at most so long."""

    async def limited() -> Any:
        async with asyncio.timeout(seconds):
            return await coroutine

    return asyncio.run(limited())
