"""What the page is served: itself, onnxruntime-web, the file and batch after batch, from 127.0.0.1.

It is Chromium's proxy, too: whatever the page or Chromium itself asks of another host comes here,
and is refused. Chromium asks its maker for updates, for one.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_PAGE = b"<!doctype html><meta charset=utf-8><script type=module src=page.mjs></script>"
_SCRIPT = Path(__file__).with_name("page.mjs")
_TYPES = {".mjs": "text/javascript", ".wasm": "application/wasm", "": "text/html"}
_ISOLATED = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cache-Control": "no-store",
}
"""Without the first two a page gets no threads, and a coarse clock."""


@dataclass(frozen=True)
class OnDisk:
    """A file that is read when it is asked for."""

    path: Path


class PageServer:
    """Serves one page, below an address that nobody can guess."""

    def __init__(self) -> None:
        self._secret = secrets.token_urlsafe(16)
        self._served: dict[str, bytes | OnDisk] = {
            "": _PAGE, "page.mjs": _SCRIPT.read_bytes()
        }  # fmt: skip
        self._outputs: bytes | None = None
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.page = self
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def host(self) -> str:
        """`http://127.0.0.1:PORT`."""
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def address(self) -> str:
        """Of the page, with a slash at its end."""
        return f"{self.host}/{self._secret}/"

    def put(self, place: str, served: bytes | OnDisk) -> str:
        """Serve it at this place below the page, which is given back."""
        self._served[place] = served
        return place

    def remove(self, place: str) -> None:
        """Serve it no more."""
        self._served.pop(place, None)

    def take_outputs(self) -> bytes | None:
        """What the page sent last; None: nothing since it was asked the last time."""
        outputs, self._outputs = self._outputs, None
        return outputs

    def served(self, path: str) -> bytes | None:
        """What is at this path; None: nothing, or another page's."""
        found = self._served.get(self._place(path) or "")
        if self._place(path) is None or found is None:
            return None
        return found.path.read_bytes() if isinstance(found, OnDisk) else found

    def receive(self, path: str, body: bytes) -> bool:
        """Keep outputs; False: they are somebody else's."""
        if self._place(path) != "outputs":
            return False
        self._outputs = body
        return True

    def _place(self, path: str) -> str | None:
        start = f"/{self._secret}/"
        return path.removeprefix(start) if path.startswith(start) else None


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    page: PageServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    server: _Http

    def do_GET(self) -> None:
        try:
            body = self.server.page.served(self.path)
        except OSError:
            body = None
        self._answer(HTTPStatus.FORBIDDEN if body is None else HTTPStatus.OK, body or b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        taken = self.server.page.receive(self.path, body)
        self._answer(HTTPStatus.OK if taken else HTTPStatus.FORBIDDEN, b"")

    def do_CONNECT(self) -> None:
        self._answer(HTTPStatus.FORBIDDEN, b"")

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: ARG002 - it is quiet
        return

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        kind = _TYPES.get(Path(self.path).suffix if body is not _PAGE else "")
        self.send_header("Content-Type", kind or "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        for name, text in _ISOLATED.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
