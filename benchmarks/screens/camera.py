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
_PATIENCE_MS = 60_000
_SETTLED_MS = 1_500
"""MLflow draws its pages in steps, and says of none that it is the last."""


class BrowserMissing(GateError):
    """There is no Chromium here."""


@dataclass(frozen=True)
class Picture:
    """One that was taken."""

    path: Path
    size: tuple[int, int]
    words: str


@dataclass
class Camera:
    """Takes pictures into a folder."""

    browser: Browser
    folder: Path
    taken: list[Picture] = field(default_factory=list)

    def report(
        self,
        name: str,
        report: Path,
        *,
        size: tuple[int, int],
        scheme: Literal["light", "dark"] = "light",
        whole: bool = False,
    ) -> None:
        """A report's page: what is on the screen, or `whole`, its length."""
        with self._page(size, scheme) as page:
            page.goto(report.as_uri())
            words = f"{name}, {size[0]} px, {scheme}, {'whole page' if whole else 'first screen'}"
            self._take(page, words, whole=whole)

    def print(self, name: str, report: Path) -> None:
        """A report on paper, and its PDF."""
        with self._page(PAPER, "light") as page:
            page.goto(report.as_uri())
            page.emulate_media(media="print")
            page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
            self._take(page, f"{name}, printed", whole=True)
            page.pdf(path=self.folder / f"{_file(name)}.pdf", format="A4")

    def server(self, name: str, address: str, *, shows: str, size: tuple[int, int]) -> None:
        """A page of MLflow, as soon as it `shows` a text."""
        with self._page(size, "light") as page:
            page.goto(address)
            page.get_by_text(shows).first.wait_for()
            page.wait_for_timeout(_SETTLED_MS)
            aside = page.locator("[data-component-id='mlflow.assistant.chat_panel.close']")
            if aside.count():  # it opens by itself in a browser that was never here
                aside.first.click()
                page.wait_for_timeout(_SETTLED_MS)
            self._take(page, f"{name}, {size[0]} px", whole=False)

    @contextmanager
    def _page(self, size: tuple[int, int], scheme: Literal["light", "dark"]) -> Iterator[Page]:
        viewport = {"width": size[0], "height": size[1]}
        page = self.browser.new_page(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
        page.set_default_timeout(_PATIENCE_MS)
        try:
            yield page
        finally:
            page.close()

    def _take(self, page: Page, words: str, *, whole: bool) -> None:
        path = self.folder / f"{_file(words)}.png"
        page.screenshot(path=path, full_page=whole)
        size = page.viewport_size
        assert size is not None
        made = Picture(path, (size["width"], size["height"]), words)
        self.taken.append(made)
        print(f"  {path.name:<64} {path.stat().st_size / 1e3:6.0f} kB", flush=True)


@contextmanager
def camera(folder: Path) -> Iterator[Camera]:
    """A camera with a browser of its own. Raises BrowserMissing."""
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


def _file(words: str) -> str:
    return words.replace(",", "").replace(" ", "-")
