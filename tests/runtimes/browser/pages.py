"""Helpers of the browser tests: a skip mark and changes of the page's script."""

from __future__ import annotations

import psutil
import pytest

from gate.runtimes import browser_page
from gate.runtimes.browser import BrowserWasmRuntime, WasmOptions

ABSENT = BrowserWasmRuntime().absent_reason(WasmOptions())
BROWSER = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))


@pytest.fixture
def in_this_process(monkeypatch):
    """Serve the page from this process, so that monkeypatching has an effect."""
    monkeypatch.setattr(BrowserWasmRuntime, "isolated", False)


def change_script(monkeypatch, tmp_path, old, new):
    """Serve the page with one line of its script replaced."""
    script = browser_page._SCRIPT.read_text()
    assert old in script
    path = tmp_path / "lying.mjs"
    path.write_text(script.replace(old, new))
    monkeypatch.setattr(browser_page, "_SCRIPT", path)


def chromium_processes():
    """Return the Chromium processes below this process."""
    result = psutil.Process().children(recursive=True)
    return [process for process in result if "chrom" in process.name()]
