"""A Chromium to open pages in, Debian's, without a window; a server in Ray's processes."""

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
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


@contextlib.contextmanager
def opened(browser: Any, address: str, width: int, scheme: str) -> Iterator[Any]:
    """A page at a width and in a colour scheme, with all that it `told` and `asked` for."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.told, page.asked = [], []
    page.on("console", lambda message: page.told.append(message.text))
    page.on("pageerror", lambda error: page.told.append(str(error)))
    page.on("request", lambda asked: page.asked.append(asked.url))
    page.goto(address)
    yield page
    page.close()


@pytest.fixture
def open_page(browser: Any) -> Any:
    return functools.partial(opened, browser)


class Served:
    """The server of the zoo's network in four parts, each of four groups."""

    deadline = 2.0

    def __init__(self, address: str, process: Any) -> None:
        self.address, self.process = address, process

    def predict(self, files: list, **form: str) -> httpx2.Response:
        return httpx2.post(f"{self.address}/predict", files=files, data=form, timeout=60)

    def replica(self, part: int) -> int:
        """The process of a part."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if re.match(rb"ray::ServeReplica:hsvit-.*-%d:" % part, path.read_bytes()):
                    return int(path.parent.name)
            except OSError:  # it has just ended
                continue
        raise LookupError(f"part {part} has no process")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    command = [sys.executable, "-m", "hsvit_jax", "serve", "zoo:c2a2-digits", "--port=0"]
    command += ["--parts=4", "--batch=16", f"--deadline={Served.deadline}"]
    # As a user starts it: tests' own settings slow its programs down.
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stderr=pipe, text=True, env=environment) as process:
        found = None
        for line in process.stderr:
            if found := re.search(r"c2a2 at (http://\S+)", line):
                break
        try:
            assert found, "the server has not started: pip install '.[ray]'"
            yield Served(found[1], process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
