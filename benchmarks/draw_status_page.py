"""Screenshots of the live status page, taken in a headless Chromium.

    python benchmarks/draw_status_page.py --folder docs/images
    python benchmarks/draw_status_page.py --folder docs/images --live_dir runs/live-demo --session chat-1

Without `--live_dir` the page shows a store that is filled by hand (`benchmarks/status_store.py`); its numbers are made
up. Needs `chromium` and `chromedriver` (Debian: apt-get install chromium chromium-driver) and nothing else: no model is
loaded and nobody is asked.

Writes `live-status.png`, the page, and `live-status-turn.png`, one turn with the numbers of a token. The last line is
JSON: the files.
"""

import argparse
import base64
import json
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import uvicorn
from selenium.webdriver import Chrome

from benchmarks.headless import NoBrowserError, set_look, start_chromium
from benchmarks.status_store import fill
from trl_openclaw.live.engines import Delta, EngineRequest
from trl_openclaw.live.gateway.app import create_app
from trl_openclaw.live.gateway.serve import listen
from trl_openclaw.live.status import status_router
from trl_openclaw.live.store import STORE_FILE, Store

SIZE = (1360, 880)
SCALE = 1.5
START = 1_750_000_000.0
WAIT = 20.0


class StillEngine:
    """An engine of which nothing is asked but its name."""

    name = "none"
    where = "nowhere"
    waiting = None
    features: frozenset[Any] = frozenset()

    def __init__(self, model: str):
        self.model = model

    async def stream(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        """Nothing."""
        yield Delta(finish_reason="stop")

    async def load(self, adapter: str, path: Path) -> None:
        """Nothing is loaded."""

    async def loaded(self) -> list[str]:
        """There are none."""
        return []

    async def unload(self, adapter: str) -> None:
        """Nothing is unloaded."""

    async def check(self) -> None:
        """It is always well."""

    async def aclose(self) -> None:
        """There is nothing to close."""


@contextmanager
def serving(store: Store, model: str) -> Iterator[str]:
    """The page over a store, at the address that this gives."""
    listening = listen("127.0.0.1", 0)
    app = create_app(store, StillEngine(model), routers=[status_router(store)])
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(WAIT)


def wait_until(browser: Chrome, script: str) -> Any:
    """What a script returns as soon as it returns something."""
    until = time.monotonic() + WAIT
    while not (found := browser.execute_script(script)):
        if time.monotonic() > until:
            raise SystemExit(f"The page does not show what is to be drawn: {script}")
        time.sleep(0.05)
    return found


# The token that shows most of those near the beginning.
POINT = """
const turn = [...document.querySelectorAll('.turn')].find((one) => one.querySelector('.token'));
document.getElementById('turns').scrollTop = turn.offsetTop - 80;
const strength = (one) => Number(one.style.getPropertyValue('--strength') || 0);
const tokens = [...turn.querySelectorAll('.token')].slice(0, 24);
tokens.sort((a, b) => strength(b) - strength(a))[0].focus();
"""
CLIP = """
const [a, b] = [document.querySelector('.turn:has(.token:focus)'), document.getElementById('peek')]
  .map((one) => one.getBoundingClientRect());
return [Math.min(a.left, b.left) - 12, Math.min(a.top, b.top) - 12,
        Math.max(a.right, b.right) + 12, Math.max(a.bottom, b.bottom) + 12];
"""


def draw(browser: Chrome, url: str, session: str, folder: Path) -> list[str]:
    """Take both pictures."""
    set_look(browser, SIZE, scale=SCALE)
    browser.get(f"{url}/#session={session}")
    wait_until(browser, "return document.querySelectorAll('.heatmap').length")
    folder.mkdir(parents=True, exist_ok=True)
    browser.execute_script("document.getElementById('turns').scrollTop = 0")
    save(browser, folder / "live-status.png")
    browser.execute_script(POINT)
    left, top, right, bottom = browser.execute_script(CLIP)
    clip = {"x": left, "y": top, "width": right - left, "height": bottom - top, "scale": 1}
    save(browser, folder / "live-status-turn.png", clip=clip)
    return [str(folder / name) for name in ("live-status.png", "live-status-turn.png")]


def save(browser: Chrome, path: Path, **options: Any) -> None:
    """Save what the browser shows."""
    data = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", **options})["data"]
    path.write_bytes(base64.b64decode(data))


def copy_store(source: Path, target: Path) -> None:
    """Copy a store that others may be writing to, which stays as it is."""
    if not source.is_file():
        raise SystemExit(f"There is no store {source}.")
    address = f"{source.resolve().as_uri()}?mode=ro"
    with closing(sqlite3.connect(address, uri=True)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)


def coloured_session(store: Store, user: str) -> str:
    """The newest conversation with two turns or more that has token scores."""
    for turn in store.turns(user, state="trained", limit=500):
        if store.token_scores(turn.turn_id) and len(store.turns(user, turn.session_id)) > 1:
            return turn.session_id
    raise SystemExit("No turn has token scores yet: nothing was trained.")


def main() -> None:
    """Fill or open a store, serve its page, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("docs/images"), help="where the pictures go")
    parser.add_argument("--live_dir", type=Path, help="show a real store; by default one that is filled by hand")
    parser.add_argument("--session", help="the conversation to show; by default the newest that was trained")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / STORE_FILE
        if args.live_dir is not None:
            copy_store(args.live_dir / STORE_FILE, path)
        store = Store(path)
        if args.live_dir is None:
            fill(store, START)
        newest = store.turns(limit=1)
        if not newest:
            raise SystemExit(f"{args.live_dir} holds no turns.")
        session = args.session or coloured_session(store, newest[0].user)
        try:
            browser = start_chromium(["--lang=en-GB"])
        except NoBrowserError as error:
            raise SystemExit(f"No picture can be taken: {error}.") from error
        with serving(store, newest[0].model) as url:
            try:
                files = draw(browser, url, session, args.folder)
            finally:
                browser.quit()
    print(json.dumps({"files": files}))


if __name__ == "__main__":
    main()
