"""The page of `hsvit serve` in a browser: upload, draw, take parts away."""

import io
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import numpy as np
import pytest
from PIL import Image
from support.data_files import encoded

from hsvit_jax import artifacts, data
from hsvit_jax.serve import app

pytestmark = pytest.mark.web


@pytest.fixture(scope="module")
def address():
    command = [sys.executable, "-m", "hsvit_jax", "serve", "zoo:c2a2-digits", "--port=0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        found = next(filter(None, (re.search(r"http://\S+", line) for line in process.stderr)))
        yield found[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def seven():
    """A seven that is not square, as the bytes of a PNG."""
    split = data.load("digits").test
    image = np.pad(split.images[list(split.labels).index(7), ..., 0], ((0, 0), (9, 9)))
    picture = encoded(Image.fromarray(image).resize((400, 256)))
    return {"name": "seven.png", "mimeType": "image/png", "buffer": picture}


@pytest.fixture(params=[(390, "light"), (1400, "dark")], ids=str)
def page(request, open_page, address):
    with open_page(address, *request.param) as page:
        page.locator("#parts li").nth(15).wait_for()
        yield page
    own = (address, f"blob:{address}", "data:")
    assert page.told == [] and not [url for url in page.asked if not url.startswith(own)]


def votes(page, text):
    """Waits for the line of the answer."""
    page.locator("#votes", has_text=re.compile(text)).wait_for()


def test_an_uploaded_image(page, seven):
    page.set_input_files("#file", seven)
    votes(page, r"^7 \d+ % \(16 of 16 groups answered, \d+ chose it\) in \d+ ms$")
    bars = page.locator("#classes progress").evaluate_all("all => all.map(one => one.value)")
    assert len(bars) == 5 and bars == sorted(bars, reverse=True) and bars[0] > 0.5
    assert page.locator("#maps figure").count() == 17
    for group in (0, 3, 9):
        page.locator("#parts input").nth(group).click()
    votes(page, r"\(13 of 16 groups answered, \d+ chose it\) in \d+ ms$")
    assert page.locator("#parts li.off").count() == 3
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    sizes = "[...document.querySelectorAll('p, li, figcaption, label')]"
    sizes += ".map(one => parseFloat(getComputedStyle(one).fontSize))"
    assert min(page.evaluate(sizes)) >= 12


def test_a_drawn_digit(page):
    box = page.locator("#draw").bounding_box()
    page.mouse.move(box["x"] + 112, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 112, box["y"] + 194, steps=8)
    page.mouse.up()
    votes(page, r"^1 \d+ % \(16 of 16 groups answered, \d+ chose it\) in \d+ ms$")


def test_the_keyboard_is_enough(page):
    page.locator("#draw").focus()
    for key in ["ArrowUp"] * 10 + ["Shift+ArrowDown"] * 20:
        page.keyboard.press(key)
    votes(page, r"^1 \d+ % \(16 of 16 groups answered, \d+ chose it\) in \d+ ms$")
    page.locator("#parts input").first.focus()
    page.keyboard.press("Space")
    votes(page, r"\(15 of 16 groups answered, \d+ chose it\) in \d+ ms$")


def test_an_image_that_no_browser_shows(page, seven):
    out = io.BytesIO()
    Image.open(io.BytesIO(seven["buffer"])).save(out, "tiff")
    page.set_input_files("#file", {**seven, "name": "seven.tif", "buffer": out.getvalue()})
    votes(page, r"^7 \d+ % \(16 of 16 groups answered, \d+ chose it\) in \d+ ms$")
    page.wait_for_timeout(300)
    assert page.locator("#status").inner_text() == "" and page.locator("#maps-section").is_hidden()


LONE = {"name": "network", "groups": 1}
TOWERS = [{"name": f"tower {number}", "groups": 4} for number in range(2)]
GROUPS = [{"name": f"group {number}", "groups": 1} for number in range(3)]


@pytest.mark.parametrize(
    ("channels", "parts", "said"),
    [
        (1, [LONE], "a 39 %"),
        (3, TOWERS, "a 39 % (8 of 8 groups answered, 1 of 2 parts chose it)"),
        (3, GROUPS, "a 39 % (3 of 3 groups answered, 1 chose it)"),
    ],
)
def test_what_a_network_of_other_parts_and_channels_says(
    browser, address, seven, channels, parts, said
):
    page = browser.new_page()
    count = sum(part["groups"] for part in parts)
    votes = [
        {**part, "milliseconds": 1.0 + number, "top": {"label": "ab"[number > 0], "probability": 1}}
        for number, part in enumerate(parts)
    ]
    top = [{"label": "a", "probability": 0.39}]
    answer = {"top": top, "votes": {"voted": count, "of": count}, "parts": votes, "maps": []}

    about = httpx2.get(f"{address}/healthz").json() | {"channels": channels, "parts": parts}
    html = artifacts.filled(Path(app.__file__).with_name("page.html"), **about)
    page.route(f"{address}/", lambda route: route.fulfill(body=html, content_type="text/html"))
    page.route("**/explain", lambda route: route.fulfill(json=answer))
    page.goto(address)
    assert page.locator("#board").is_visible() == (channels == 1)
    page.set_input_files("#file", seven)
    page.locator("#votes", has_text="39").wait_for()
    assert page.locator("#votes").inner_text().removesuffix(" in 1 ms") == said
    page.close()


def test_a_file_that_is_no_image(page):
    page.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": b"no"})
    page.locator("#status", has_text="not an image").wait_for()
    # The browser itself reports the refusal; nothing else.
    assert [page.told.pop()] and page.told == []
