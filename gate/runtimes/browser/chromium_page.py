"""One page of headless Chromium, for as long as a file is open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from gate.bounded.chromium import FLAGS, chromium_path
from gate.errors import EvidenceError, first_line
from gate.runtimes.browser.server import PageServer
from gate.storage.temporary import temporary_folder

_GPU = ("--enable-unsafe-webgpu", "--enable-features=Vulkan", "--ignore-gpu-blocklist")
_SOFTWARE = ("--use-webgpu-adapter=swiftshader",)


class ChromiumPage:
    """Runs functions of `page.mjs`, and notes what the page asks of others."""

    def __init__(self, context: Any, page: Any, server: PageServer) -> None:
        self._page = page
        self._server = server
        self.strange: list[str] = []
        """Addresses beyond 127.0.0.1 that the page, or a worker of it, asked for."""
        context.on("request", lambda request: self._note(request.url))
        self.version = str(context.new_cdp_session(page).send("Browser.getVersion")["product"])
        """Of Chromium."""

    def call(self, function: str, argument: Any = None) -> Any:
        """What the function gives, as JSON. Raises EvidenceError where it throws, or the page
        crashes."""
        from playwright.sync_api import Error

        try:
            return self._page.evaluate(f"(given) => gate.{function}(given)", argument)
        except Error as error:
            words = first_line(error).removeprefix("Page.evaluate: ")
            raise EvidenceError(
                f"the page in Chromium broke while it was to {function}: {words}. Open the file in "
                "a page of your own by onnxruntime-web to see more."
            ) from error

    def _note(self, url: str) -> None:
        if not url.startswith((f"{self._server.host}/", "blob:", "data:", "about:")):
            self.strange.append(url)


@contextlib.contextmanager
def opened_page(server: PageServer, *, gpu: bool, software: bool) -> Iterator[ChromiumPage]:
    """The page that the server has. `gpu`: with WebGPU; `software`: by an adapter that computes
    on the CPU. Raises EvidenceError where Chromium does not start."""
    from playwright.sync_api import Error, sync_playwright

    with contextlib.ExitStack() as stack:
        profile = stack.enter_context(temporary_folder())
        try:
            playwright = stack.enter_context(sync_playwright())
            context = playwright.chromium.launch_persistent_context(
                profile, executable_path=chromium_path(), args=_flags(server, gpu, software)
            )
            stack.callback(context.close)
            page = context.pages[0] if context.pages else context.new_page()
            opened = ChromiumPage(context, page, server)
            page.goto(server.address)
        except Error as error:
            raise EvidenceError(
                f"Chromium does not show a page: {first_line(error)}. See whether it runs alone: "
                f"{chromium_path()} --headless --no-sandbox --dump-dom about:blank"
            ) from error
        yield opened


def _flags(server: PageServer, gpu: bool, software: bool) -> Sequence[str]:
    """Whatever is not for the server itself goes to it as the proxy, which refuses."""
    proxy = (f"--proxy-server={server.host}", "--proxy-bypass-list=127.0.0.1")
    if not gpu:
        return (*FLAGS, *proxy)
    plain = (flag for flag in FLAGS if flag != "--disable-gpu")
    return (*plain, *proxy, *_GPU, *(_SOFTWARE if software else ()))
