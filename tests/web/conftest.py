"""A Chromium to open pages in: Debian's, without a window."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

INSTALL = "web tests need Chromium and playwright: apt-get install chromium, pip install '.[web]'"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The browser; without one the tests fail and say what to install."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        found = None
    if found is None:
        pytest.fail(INSTALL, pytrace=False)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()
