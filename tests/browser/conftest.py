"""Chromium, without network, and a page in it that a trace was saved to.

Each test here needs the machine's browser: ``nox -s browser``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shown import Shown

import streamflow as sf

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",  # CI runs as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)


def executable() -> str:
    chosen = os.environ.get("STREAMFLOW_TEST_BROWSER")
    found = [chosen] if chosen else [path for name in NAMES if (path := shutil.which(name))]
    if not found:
        pytest.fail(
            f"none of {', '.join(NAMES)} is on the PATH: install Debian's chromium, "
            "or name a browser by STREAMFLOW_TEST_BROWSER",
            pytrace=False,
        )
    return found[0]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # not installed where other tests run

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Any) -> Iterator[Callable[[Path], Shown]]:
    """Open a file; in the end, it must have asked for no other and complained of nothing."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800}, offline=True)
    wrong: list[str] = []

    def asked(request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "about:")):
            wrong.append(f"asked for {request.url}")

    def said(message: Any) -> None:
        if message.type in ("error", "warning"):
            wrong.append(message.text)

    def open_file(path: Path) -> Shown:
        page = context.new_page()
        page.on("request", asked)
        page.on("console", said)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(f"a dialog: {dialog.message}"))
        page.goto(path.as_uri())
        page.wait_for_function("window.streamflow")
        return Shown(page)

    yield open_file
    context.close()
    assert not wrong


@pytest.fixture
def show(opened: Callable[[Path], Shown], tmp_path: Path) -> Callable[[sf.Trace], Shown]:
    """Save a trace as a page and open that."""

    def save_and_open(trace: sf.Trace) -> Shown:
        path = tmp_path / "run.html"
        trace.save(path)
        return opened(path)

    return save_and_open
