"""The report in a browser: no error, nothing fetched, nothing wider than the window."""

import pytest
from support import reports

pytestmark = pytest.mark.web


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    return reports.written(tmp_path_factory.mktemp("run")).as_uri()


@pytest.fixture(params=[(390, "light"), (390, "dark"), (1400, "light"), (1400, "dark")], ids=str)
def page(request, open_page, address):
    with open_page(address, *request.param) as page:
        page.wait_for_load_state()
        yield page


def test_a_page_is_shown_whole(page, address):
    assert page.told == []
    assert {url for url in page.asked if not url.startswith("data:")} == {address}
    pictures = page.evaluate("[...document.images].map(i => i.complete && i.naturalWidth > 0)")
    assert len(pictures) > 60 and all(pictures)
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wide = page.evaluate(
        """limit => [...document.querySelectorAll('body *')].filter(e =>
        !e.closest('.wide, pre, details') && e.getBoundingClientRect().right > limit + 1)
        .map(e => e.outerHTML.slice(0, 80))""",
        width,
    )
    assert wide == []
    text = page.evaluate(
        "[...document.querySelectorAll('p, td, li, text')].map(e => parseFloat("
        "getComputedStyle(e).fontSize))"
    )
    assert min(text) >= 11
    assert page.title() == page.locator("h1").inner_text() != "taken"


def test_colours_follow_the_scheme(page):
    """Text contrasts with its ground by 4.5 to 1 and more (WCAG 2.1, AA), whatever the scheme."""
    lightness = """element => {
        const [r, g, b] = getComputedStyle(element.closest('.card') ?? document.body)
            .backgroundColor.match(/[0-9.]+/g).map(Number);
        const [x, y, z] = getComputedStyle(element).color.match(/[0-9.]+/g).map(Number);
        const light = (...rgb) => rgb.map(c => c / 255)
            .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
            .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
        return [light(r, g, b), light(x, y, z)];
    }"""
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    for selector in ("h1", "figcaption", ".card .soft", ".card .wrong", "option"):
        ground, ink = page.locator(selector).first.evaluate(lightness)
        assert (ground < 0.5) == dark, selector
        assert (max(ground, ink) + 0.05) / (min(ground, ink) + 0.05) >= 4.5, selector


def test_the_filter_shows_one_class(page):
    cards = page.locator(".card")
    every = cards.count()
    page.select_option("#filter", "2")
    shown = page.locator(".card:visible")
    assert 0 < shown.count() < every
    for card in shown.all():
        assert "2" in card.get_attribute("data-classes").split()
    assert page.locator(".confusion tbody tr:visible th").all_inner_texts() == [reports.NAMES[2]]
    counts = [int(text.split()[0]) for text in page.locator("output").all_inner_texts()]
    assert sum(counts) == shown.count()
    page.select_option("#filter", "")
    assert page.locator(".card:visible").count() == every
    assert page.told == []
