"""Take screenshots of pages with Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page, sync_playwright

from gate.errors import GateError

TELEPHONE, LAPTOP, SCREEN, PAPER = (390, 844), (1280, 800), (1920, 1080), (794, 1123)
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
_TIMEOUT_MS = 60_000
_SETTLED_MS = 1_500
"""Wait time in milliseconds, because MLflow renders its pages in steps."""


class BrowserMissing(GateError):
    """No Chromium is installed."""


@dataclass(frozen=True)
class Picture:
    """A screenshot."""

    path: Path
    size: tuple[int, int]
    words: str


@dataclass
class Camera:
    """Takes screenshots into a folder."""

    browser: Browser
    folder: Path
    pictures: list[Picture] = field(default_factory=list)

    def report(
        self,
        name: str,
        report: Path,
        *,
        size: tuple[int, int],
        scheme: Literal["light", "dark"] = "light",
        full_page: bool = False,
    ) -> None:
        """Take a screenshot of a report: the visible part, or all of it with `full_page`."""
        with self._page(size, scheme) as page:
            page.goto(report.as_uri())
            words = (
                f"{name}, {size[0]} px, {scheme}, {'whole page' if full_page else 'first screen'}"
            )
            self._take(page, words, full_page=full_page)

    def print(self, name: str, report: Path) -> None:
        """Take a screenshot of the printed report, and save its PDF."""
        with self._page(PAPER, "light") as page:
            page.goto(report.as_uri())
            page.emulate_media(media="print")
            page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
            self._take(page, f"{name}, printed", full_page=True)
            page.pdf(path=self.folder / f"{_file_name(name)}.pdf", format="A4")

    def server(self, name: str, address: str, *, awaited_text: str, size: tuple[int, int]) -> None:
        """Take a screenshot of an MLflow page after `awaited_text` appears."""
        with self._page(size, "light") as page:
            page.goto(address)
            page.get_by_text(awaited_text).first.wait_for()
            page.wait_for_timeout(_SETTLED_MS)
            assistant_panel = page.locator(
                "[data-component-id='mlflow.assistant.chat_panel.close']"
            )
            if assistant_panel.count():  # It opens by itself in a new browser profile.
                assistant_panel.first.click()
                page.wait_for_timeout(_SETTLED_MS)
            self._take(page, f"{name}, {size[0]} px", full_page=False)

    @contextmanager
    def _page(self, size: tuple[int, int], scheme: Literal["light", "dark"]) -> Iterator[Page]:
        viewport = {"width": size[0], "height": size[1]}
        page = self.browser.new_page(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
        page.set_default_timeout(_TIMEOUT_MS)
        try:
            yield page
        finally:
            page.close()

    def _take(self, page: Page, words: str, *, full_page: bool) -> None:
        path = self.folder / f"{_file_name(words)}.png"
        page.screenshot(path=path, full_page=full_page)
        size = page.viewport_size
        assert size is not None
        picture = Picture(path, (size["width"], size["height"]), words)
        self.pictures.append(picture)
        print(f"  {path.name:<64} {path.stat().st_size / 1e3:6.0f} kB", flush=True)


@contextmanager
def open_camera(folder: Path) -> Iterator[Camera]:
    """Open a camera with a new browser. Raises BrowserMissing."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise BrowserMissing(
            "Found no chromium. Expected Debian's chromium or Google Chrome: make packages "
            "installs it as root, else apt install chromium."
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=_FLAGS)
        try:
            yield Camera(browser, folder)
        finally:
            browser.close()


def _file_name(words: str) -> str:
    return words.replace(",", "").replace(" ", "-")
