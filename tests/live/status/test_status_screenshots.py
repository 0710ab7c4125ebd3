"""What the status page looks like, as far as pixels can say: of its size, not blank, the heatmap in two colours."""

import io

import pytest
from matplotlib import image
from status_harness import wait_for

from benchmarks.status_store import USER

SIZES = {"wide": (1280, 860), "narrow": (390, 800)}
COLOURFUL = 0.12


def shot(browser):
    """The window's pixels `(height, width, 3)`, from 0 to 1."""
    return image.imread(io.BytesIO(browser.driver.get_screenshot_as_png()))[:, :, :3]


def part(pixels, browser, selector):
    """The pixels of an element that is inside of the window."""
    bounds = "const r = document.querySelector(arguments[0]).getBoundingClientRect();"
    box = browser.run(f"{bounds} return [r.left, r.top, r.right, r.bottom]", selector)
    left, top, right, bottom = (round(edge) for edge in box)
    return pixels[max(0, top) : bottom, max(0, left) : right]


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
    browser.run("document.querySelector('.heatmap').scrollIntoView({ block: 'center' })")
    pixels = shot(browser)
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
