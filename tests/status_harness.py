"""A gateway with its status page under a real server, and a real browser that looks at it."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from live.gateway_harness import RunningGateway, serving_stub, wait_for
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys as Key
from selenium.webdriver.remote.webelement import WebElement

from benchmarks.headless import NoBrowserError, set_look, start_chromium
from trl_openclaw.live.gateway.auth import Keys
from trl_openclaw.live.status import status_router
from trl_openclaw.live.store import Store

NO_BROWSER = "THE STATUS PAGE IS NOT TESTED IN A BROWSER: {}."
WIDE = (1280, 860)


@contextmanager
def serving_page(folder: Path, stub: Any, store: Store, *, keys: Keys | None = None) -> Iterator[RunningGateway]:
    """A gateway over the stub engine, with a store that a test has filled."""
    with serving_stub(folder, stub, store=store, keys=keys, routers=[status_router(store)]) as running:
        yield running


def call(
    running: RunningGateway, path: str, body: Any = None, *, key: str | None = None, **headers: str
) -> tuple[int, Any, Any]:
    """Ask as a program does: the status, the headers, and the body, read as JSON where it is any.

    Args:
        running: The gateway.
        path: What to ask for, with a slash.
        body: Sent as JSON by POST, where there is one.
        key: The user's.
        headers: More headers, with underscores for dashes.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(running.url + path, data)
    if data is not None:
        request.add_header("Content-Type", "application/json")
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    for name, value in headers.items():
        request.add_header(name.replace("_", "-"), value)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            status, found, text = answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        status, found, text = error.code, error.headers, error.read()
    is_json = found.get("Content-Type", "").startswith("application/json")
    return status, found, json.loads(text) if is_json else text.decode()


class Browser:
    """A headless Chromium that reaches nothing but the loopback, and remembers what it asked for and complained of.

    Raises:
        pytest.skip.Exception: Where there is none.
    """

    def __init__(self):
        try:
            self.driver = start_chromium(**{"goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}})
        except NoBrowserError as error:
            pytest.skip(NO_BROWSER.format(error))
        self.log: list[str] = []
        self.requests: list[tuple[str, int | None]] = []

    def close(self) -> None:
        """End it, with its processes."""
        self.driver.quit()

    def open(self, running: RunningGateway, place: str = "", **look: Any) -> None:
        """Look at the page, in a new tab with nothing in its storage, and wait for its data."""
        self.start(running, place, **look)
        wait_for(lambda: self.text("#connection") != "Loading", what="the page")

    def start(self, running: RunningGateway, place: str = "", **look: Any) -> None:
        """The same without waiting."""
        before = self.driver.window_handles
        self.driver.switch_to.new_window("tab")
        here = self.driver.current_window_handle
        for other in before:
            self.driver.switch_to.window(other)
            self.driver.close()
        self.driver.switch_to.window(here)
        self.look(**look)
        self.forget()
        self.driver.get(f"{running.url}/{place}")

    def forget(self) -> None:
        """Forget what was asked for and complained of."""
        self._read_logs()
        self.log.clear()
        self.requests.clear()

    def look(self, size: tuple[int, int] = WIDE, dark: bool = False) -> None:
        """Change the window's size and colour scheme."""
        set_look(self.driver, size, dark=dark)

    def all(self, selector: str) -> list[WebElement]:
        """The elements that a CSS selector finds now."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str, says: str = "") -> WebElement:
        """The first that says this, as soon as there is one."""
        script = "return [...document.querySelectorAll(arguments[0])].find((e) => e.textContent.includes(arguments[1]))"
        return wait_for(lambda: self.run(script, selector, says), what=f"{selector} {says!r}")

    def text(self, selector: str) -> str:
        """The text of the first element, hidden parts included; empty where there is none."""
        return next(iter(self.texts(selector)), "")

    def texts(self, selector: str) -> list[str]:
        """The texts of all. Half an emoji is U+FFFD, since the driver takes none."""
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent.toWellFormed())"
        return self.run(script, selector)

    def run(self, script: str, *args: Any) -> Any:
        """What JavaScript returns, from outside of the page's own rules."""
        return self.driver.execute_script(script, *args)

    def press(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def focused(self) -> str:
        """The text or label of what has the focus."""
        return self.run(
            "const e = document.activeElement; return e.getAttribute('aria-label') ?? e.id + ' ' + e.textContent.trim()"
        )

    def _read_logs(self) -> None:
        self.log += [f"{entry['level']} {entry['message']}" for entry in self.driver.get_log("browser")]
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.requests.append((message["params"]["request"]["url"], None))
            elif message["method"] == "Network.responseReceived":
                response = message["params"]["response"]
                self.requests.append((response["url"], response["status"]))

    def complaints(self) -> list[str]:
        """What the console says, errors and warnings."""
        self._read_logs()
        return [line for line in self.log if line.startswith(("SEVERE", "WARNING"))]

    def asked(self) -> list[str]:
        """Every address that was asked for."""
        self._read_logs()
        return [url for url, status in self.requests if status is None]

    def answers(self, path: str) -> list[int]:
        """The statuses of the answers under a path."""
        self._read_logs()
        return [status for url, status in self.requests if status is not None and re.search(path, url)]


__all__ = ["Browser", "Key", "RunningGateway", "call", "serving_page", "wait_for"]
