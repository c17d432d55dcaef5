"""A real browser, and pages that are opened in it without a network."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def launched() -> Generator[Any]:
    """A running Chromium; skips the test where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if binary is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with api.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=binary, args=FLAGS)
        yield running
        running.close()


def opened(browser: Any, path: Path, width: int, **options: Any) -> tuple[Any, list[str]]:
    """A tab with a page, and a list that gets its errors, its messages, and whatever it loads from elsewhere."""
    context = browser.new_context(viewport={"width": width, "height": 800}, offline=True, **options)
    tab = context.new_page()
    trouble: list[str] = []
    tab.on("pageerror", lambda error: trouble.append(str(error)))
    tab.on("console", lambda message: trouble.append(message.text))
    tab.on("request", lambda r: trouble.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
    tab.goto(path.as_uri())
    return tab, trouble
