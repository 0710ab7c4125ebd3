"""Pages of other origins in a real browser: those that are allowed use the API, and no other one does."""

import functools
import http.server
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from live.gateway_harness import serving_stub
from status_harness import Browser

from trl_openclaw.live.gateway.app import GatewayOptions
from trl_openclaw.live.gateway.guard import LOCAL_NAMES

CHAT = """
const [url, done] = arguments;
const body = JSON.stringify({ model: "stub", messages: [{ role: "user", content: "hi" }] });
const headers = {
  "Content-Type": "application/json", Authorization: "Bearer any", "X-Session-Id": "mine", "X-Stainless-Lang": "js",
};
fetch(`${url}/v1/chat/completions`, { method: "POST", headers, body }).then(
  async (answer) => done([(await answer.json()).choices[0].message.content, answer.headers.get("x-request-id")]),
  (error) => done([error.name, null]),
);
"""
MODELS = """
const [url, done] = arguments;
fetch(`${url}/v1/models`).then(async (answer) => done((await answer.json()).data[0].id), (error) => done(error.name));
"""


@contextmanager
def page_at(folder: Path):
    """The origin of an empty page at a port of its own."""
    (folder / "index.html").write_text("<!doctype html><title>Another page</title>")
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("kind", ["http", "null"])
def test_a_page_of_another_origin(tmp_path, stub, any_browser: Browser, allowed, kind):
    folder = tmp_path / "page"
    folder.mkdir()
    with page_at(folder) as origin:
        named, address = (origin, f"{origin}/") if kind == "http" else ("null", (folder / "index.html").as_uri())
        options = GatewayOptions(hosts=LOCAL_NAMES, origins=(named,) if allowed else ("app://obsidian.md",))
        with serving_stub(tmp_path, stub, options=options) as gateway:
            any_browser.driver.get(address)
            said, request_id = any_browser.driver.execute_async_script(CHAT, gateway.url)
            models = any_browser.driver.execute_async_script(MODELS, gateway.url)
            turns = gateway.turns()
    any_browser.forget()
    if allowed:
        assert (said, models) == ("stub: hi", "stub")
        assert [(turn.turn_id, turn.session_id) for turn in turns] == [(request_id, "mine")]
    else:
        assert (said, request_id, models, turns) == ("TypeError", None, "TypeError", [])
