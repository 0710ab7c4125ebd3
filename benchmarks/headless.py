"""A headless Chromium, for pictures of the status page and for its tests."""

import shutil
from collections.abc import Sequence
from typing import Any

from selenium import webdriver

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    "chromium and chromedriver are not both installed (Debian and Ubuntu: apt-get install chromium chromium-driver)"
)


class NoBrowserError(Exception):
    """There is no browser on this machine."""


def start_chromium(arguments: Sequence[str] = (), **capabilities: Any) -> webdriver.Chrome:
    """Start one that reaches nothing but the loopback. `quit()` ends it with all its processes.

    Args:
        arguments: More of its options.
        capabilities: What its driver is asked for.

    Raises:
        NoBrowserError: When there is none.
    """
    binary, driver = next(filter(None, map(shutil.which, BROWSERS)), None), shutil.which("chromedriver")
    if binary is None or driver is None:
        raise NoBrowserError(MISSING)
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in (
        "--headless=new",
        "--no-sandbox",  # it opens nothing but our own page, and the sandbox does not run as root
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
        *arguments,
    ):
        options.add_argument(argument)
    for name, value in capabilities.items():
        options.set_capability(name, value)
    return webdriver.Chrome(options, webdriver.ChromeService(driver))


def set_look(browser: webdriver.Chrome, size: tuple[int, int], *, dark: bool = False, scale: float = 1.0) -> None:
    """Set the window's size in CSS pixels, its colour scheme and dots per pixel, and let it have the focus."""
    browser.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": scale, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
