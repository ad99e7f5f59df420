"""A file as an HTTP answer: named by its digest, in ranges, never older than its tag says.

Starlette's own file response tags a file by its time and size, and answers 304 for bytes that
changed within them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from gate.deploy.proofs import Changed, Proofs
from gate.storage.digest import Digest

IMMUTABLE = "public, max-age=31536000, immutable"
NO_CACHE = "no-cache"
_CHUNK = 1 << 17
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.ASCII)
_log = logging.getLogger(__name__)


def etag(digest: Digest) -> str:
    """The strong tag of bytes with this digest."""
    return f'"sha256-{digest.hex}"'


@dataclass(frozen=True)
class ServedFile:
    """A file that may be served."""

    content: Path | bytes
    """Where it lies in the store, or what it holds."""
    digest: Digest
    """Of its bytes."""
    cache: str
    """`IMMUTABLE` or `NO_CACHE`."""
    media_type: str


class _Content(Protocol):
    @property
    def size(self) -> int: ...

    async def read(self, size: int, place: int) -> bytes: ...

    def close(self) -> None: ...


class _Held:
    """Bytes in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    async def read(self, size: int, place: int) -> bytes:
        return self._data[place : place + size]

    def close(self) -> None:
        pass


async def answer(request: Request, file: ServedFile, *, name: str, proofs: Proofs) -> Response:
    """The file's bytes; `name` is the deployed model that it belongs to. Raises as `Proofs.open`.

    304 where the client has it, 206 for one range, 416 for one that lies outside. Several ranges
    at once are answered with the whole file, as HTTP allows. HEAD and 304 read nothing.
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
    content: _Content
    if isinstance(file.content, bytes):
        content = _Held(file.content)
    else:
        prove = request.method != "HEAD"
        content = await proofs.open(file.content, file.digest, name=name, prove=prove)
    size = content.size
    part = _part(request, tag=tag, size=size)
    if part is not None and not part:
        content.close()
        refused = {"Content-Range": f"bytes */{size}", "Cache-Control": "no-store"}
        return PlainTextResponse("range not satisfiable", 416, refused)
    if part is not None:
        headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{size}"
    span = range(size) if part is None else part
    headers |= {"Content-Length": str(span.stop - span.start), "Content-Type": file.media_type}
    return _FileBody(content, span=span, status=200 if part is None else 206, headers=headers)


class _FileBody(Response):
    """Sends a part of an open file as long as somebody listens, and closes it."""

    def __init__(
        self, content: _Content, *, span: range, status: int, headers: Mapping[str, str]
    ) -> None:
        self._content = content
        self._span = span
        self.status_code = status
        self.background = None
        self.body = b""
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_gone(receive))
        try:
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            stop = self._span.stop
            place = stop if scope["method"] == "HEAD" else self._span.start
            while place < stop:
                data = await self._content.read(min(_CHUNK, stop - place), place)
                if gone.done():
                    return
                place += len(data)
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Changed as error:
            # What was sent was proven; the rest is not, and the connection must not look whole.
            _log.error("%s: the answer was broken off", error)
        finally:
            gone.cancel()
            self._content.close()


async def _gone(receive: Receive) -> None:
    """Ends when the client is gone: what is sent to it afterwards vanishes without an error."""
    while (await receive())["type"] != "http.disconnect":
        pass


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
