"""Fixtures around the stub chat server."""

from collections.abc import Iterator

import pytest
from stub_chat_server import StubChatServer


@pytest.fixture
def chat_server() -> Iterator[StubChatServer]:
    """A running stub server; set `chat_server.script` to choose its answers."""
    with StubChatServer() as server:
        yield server


@pytest.fixture
def dead_url() -> str:
    """An address at which nothing listens."""
    server = StubChatServer()
    url = server.base_url
    server._server.server_close()
    return url
