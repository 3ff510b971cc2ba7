"""Headless Chromium, for tests of pages; they are skipped where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
MARKS = [pytest.mark.full, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def launched(folder: Path) -> Iterator[Any]:
    """A browser with a profile of its own in ``folder``, which nothing is sent for."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        environment = {**os.environ, "HOME": str(folder)}
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS), env=environment)
        yield browser
        browser.close()
