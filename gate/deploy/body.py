"""A file as an HTTP answer: named by its digest, in ranges, never older than its tag says.

Starlette's own file response tags a file by its time and size, and answers 304 for bytes that
changed within them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from gate.storage.digest import Digest

IMMUTABLE = "public, max-age=31536000, immutable"
NO_CACHE = "no-cache"
_CHUNK = 1 << 18
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.ASCII)


def etag(digest: Digest) -> str:
    """The strong tag of bytes with this digest."""
    return f'"sha256-{digest.hex}"'


@dataclass(frozen=True)
class ServedFile:
    """A file that may be served."""

    path: Path
    digest: Digest
    """Of its bytes."""
    cache: str
    """`IMMUTABLE` or `NO_CACHE`."""
    media_type: str


def answer(request: Request, file: ServedFile) -> Response:
    """The file's bytes; raises OSError if it is not there.

    304 where the client has it, 206 for one range, 416 for one that lies outside. Several ranges
    at once are answered with the whole file, as HTTP allows.
    """
    tag = etag(file.digest)
    headers = {
        "ETag": tag,
        "Cache-Control": file.cache,
        "Accept-Ranges": "bytes",
        "X-Content-Type-Options": "nosniff",
    }
    if _is_current(request.headers.get("if-none-match"), tag):
        return Response(status_code=304, headers=headers)
    # Opened here: a file that is removed from now on is still sent whole.
    stream = file.path.open("rb", buffering=0)
    size = os.fstat(stream.fileno()).st_size
    part = _part(request, tag=tag, size=size)
    if part is not None and not part:
        stream.close()
        refused = {"Content-Range": f"bytes */{size}", "Cache-Control": "no-store"}
        return PlainTextResponse("range not satisfiable", 416, refused)
    if part is not None:
        headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{size}"
    span = range(size) if part is None else part
    headers |= {"Content-Length": str(span.stop - span.start), "Content-Type": file.media_type}
    return _FileBody(stream, span=span, status=200 if part is None else 206, headers=headers)


class _FileBody(Response):
    """Sends a part of an open file, and closes it."""

    def __init__(
        self, stream: FileIO, *, span: range, status: int, headers: Mapping[str, str]
    ) -> None:
        self._stream = stream
        self._span = span
        self.status_code = status
        self.background = None
        self.body = b""
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            stop = self._span.stop
            place = stop if scope["method"] == "HEAD" else self._span.start
            while place < stop:
                size = min(_CHUNK, stop - place)
                data = await to_thread.run_sync(os.pread, self._stream.fileno(), size, place)
                if not data:  # shorter than a moment ago: the connection must not look whole
                    raise OSError(f"the file ended at byte {place} of {stop}")
                place += len(data)
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._stream.close()


def _is_current(header: str | None, tag: str) -> bool:
    """If-None-Match: weak comparison, so a proxy's `W/` in front means the same."""
    if header is None:
        return False
    names = [name.strip().removeprefix("W/") for name in header.split(",")]
    return tag in names or names == ["*"]


def _part(request: Request, *, tag: str, size: int) -> range | None:
    """The one range that the client wants of these very bytes, empty where it lies outside of the
    file; None: it wants all of them."""
    found = _RANGE.fullmatch(request.headers.get("range", ""))
    if found is None or request.headers.get("if-range") not in (None, tag):
        return None
    first, last = found.groups()
    backwards = first and last and int(last) < int(first)
    if backwards or not (first or last):
        return None
    if not first:  # the last so many bytes
        return range(max(size - int(last), 0), size)
    return range(int(first), min(int(last) + 1, size) if last else size)
