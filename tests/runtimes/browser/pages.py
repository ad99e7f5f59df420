"""What tests of the browser need: a mark, pages that lie, and servers that give other bytes."""

from __future__ import annotations

import psutil
import pytest

from gate.runtimes import browser_page
from gate.runtimes.browser import BrowserWasmRuntime, WasmOptions

ABSENT = BrowserWasmRuntime().absent_reason(WasmOptions())
BROWSER = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))


@pytest.fixture
def in_this_process(monkeypatch):
    """So that what a test changes is changed where the page is served."""
    monkeypatch.setattr(BrowserWasmRuntime, "isolated", False)


def change_script(monkeypatch, tmp_path, old, new):
    """Serve the page with another line of script in it."""
    script = browser_page._SCRIPT.read_text()
    assert old in script
    path = tmp_path / "lying.mjs"
    path.write_text(script.replace(old, new))
    monkeypatch.setattr(browser_page, "_SCRIPT", path)


def chromium_processes():
    """Below this one."""
    result = psutil.Process().children(recursive=True)
    return [process for process in result if "chrom" in process.name()]
