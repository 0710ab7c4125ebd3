"""What the status page looks like, as far as pixels can say: of its size, not blank, the heatmap in two colours."""

import io
import time

import pytest
from matplotlib import image
from status_harness import wait_for

from benchmarks.status_store import USER

SIZES = {"wide": (1280, 860), "narrow": (390, 800)}
COLOURFUL = 0.12


def shot(browser):
    """The window's pixels `(height, width, 3)`, from 0 to 1."""
    return image.imread(io.BytesIO(browser.driver.get_screenshot_as_png()))[:, :, :3]


def bounds(browser, selector):
    """Where an element is in the window: left, top, right, bottom."""
    box = "const r = document.querySelector(arguments[0]).getBoundingClientRect();"
    return [round(edge) for edge in browser.run(f"{box} return [r.left, r.top, r.right, r.bottom]", selector)]


def part(pixels, browser, selector):
    """The pixels of an element that is inside of the window."""
    left, top, right, bottom = bounds(browser, selector)
    return pixels[max(0, top) : bottom, max(0, left) : right]


def shot_of(browser, selector):
    """The window's pixels with an element in its middle, once what is drawn later has moved it no more."""

    def try_it():
        browser.run("document.querySelector(arguments[0]).scrollIntoView({ block: 'center' })", selector)
        before, first = bounds(browser, selector), shot(browser)
        time.sleep(0.2)
        again = shot(browser)
        return (again,) if bounds(browser, selector) == before and (first == again).all() else None

    return wait_for(try_it, what=f"a page at rest around {selector}")[0]


def shares(pixels):
    """Which part of the pixels is clearly blue, and which orange."""
    lean = pixels[..., 2] - pixels[..., 0]
    return (lean > COLOURFUL).mean(), (lean < -COLOURFUL).mean()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_looks_like_one(filled, store, browser, size, dark):
    session = next(turn.session_id for turn in store.turns(USER, state="trained") if turn.verdict.score == -1)
    browser.open(filled, f"#session={session}", size=SIZES[size], dark=dark)
    browser.one(".heatmap")
    wait_for(lambda: len(browser.all(".heatmap")) == 2, what="both replies")
    pixels = shot_of(browser, ".heatmap")
    width, height = SIZES[size]
    assert pixels.shape == (height, width, 3)
    assert pixels.std() > 0.04  # not blank
    behind = pixels[height // 2, 2:6].mean()
    assert behind < 0.15 if dark else behind > 0.9
    blue, orange = shares(part(pixels, browser, ".heatmap"))
    assert orange > 0.15  # a long reply that displeased
    assert 0.005 < blue < orange  # its end was right
    calm_blue, calm_orange = shares(part(pixels, browser, ".bar"))
    assert calm_blue + calm_orange < 0.05
    if size == "wide":
        drawn = part(pixels, browser, ".chart")
        assert drawn.std() > 0.02
        assert shares(part(pixels, browser, ".progress"))[0] > 0.3
    again = shot(browser)
    assert abs(pixels - again).mean() < 0.002  # nothing moves
