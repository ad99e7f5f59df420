"""HTTP: immutable digest URLs, revalidated names, range requests."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Protocol

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gate.deploy.store import (
    EXACT,
    MANIFEST,
    Manifest,
    ModelStore,
    ReleaseDamaged,
    Slot,
    check_deployed_name,
)
from gate.errors import DigestMismatch, GateError, StorageError
from gate.golden.folder import GOLDEN_JSON, read_record
from gate.storage.digest import Digest
from gate.storage.untrusted_files import OURS, read_untrusted

# Starlette's own file response tags a file by its time and size, and answers 304 for bytes that
# changed within them.
IMMUTABLE = "public, max-age=31536000, immutable"
NO_CACHE = "no-cache"
_CHUNK = 1 << 17
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.ASCII)

_log = logging.getLogger(__name__)


def etag(digest: Digest) -> str:
    """The strong tag of bytes with this digest."""
    return f'"sha256-{digest.hex}"'


@dataclass(frozen=True)
class StoredFileResponse:
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


async def file_response(
    request: Request, file: StoredFileResponse, *, name: str, proofs: VerifiedFiles
) -> Response:
    """Return a response with the file's bytes; `name` is the deployed model that it belongs to.

    Raises what `VerifiedFiles.open` raises.

    304 where the client has it, 206 for one range, 416 for one that lies outside. Several ranges at
    once are answered with the whole file, as HTTP allows. HEAD and 304 read nothing.
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
    """Sends a part of an open file while the client is connected, and closes it."""

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
            # The bytes that were sent are verified; the rest is not, and the connection must not
            # look complete.
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


# A file is hashed when it is first asked for, once for all who ask meanwhile, and again when it is
# not the same any more: other size, place on the disk or times, of which nobody can set the change
# time. It is read from the descriptor that was compared, and compared again after every part.
_TICK_NS = 50_000_000
"""The change time of a file system is as coarse as the tick of its clock, 10 ms at most."""

_MOST = 4096
"""Files that are remembered; those of a few releases are some hundred."""

_LINKS = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR)


class Changed(DigestMismatch):
    """A file is not, or not any more, what was proven."""


class _Identity(NamedTuple):
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, stream: FileIO) -> _Identity:
        found = os.fstat(stream.fileno())
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True)
class _Proof:
    identity: _Identity
    good: bool


class OpenFile:
    """An open file, as it was when it was opened."""

    def __init__(self, stream: FileIO, threads: CapacityLimiter) -> None:
        self._stream = stream
        self._threads = threads
        self.identity = _Identity.of(stream)

    @property
    def size(self) -> int:
        """Return the size of the file in bytes."""
        return self.identity.size

    async def read(self, size: int, place: int) -> bytes:
        """`size` bytes from `place` on. Raises Changed where the file is not what it was."""
        return await to_thread.run_sync(self._read, size, place, limiter=self._threads)

    def _read(self, size: int, place: int) -> bytes:
        data = os.pread(self._stream.fileno(), size, place)
        if len(data) < size or _Identity.of(self._stream) != self.identity:
            raise Changed(f"the file changed before byte {place + size} of it was sent")
        return data

    def close(self) -> None:
        """Close it."""
        self._stream.close()


class VerifiedFiles:
    """Opens files of a store. `damaged` is called with what was asked for, once for a damage.

    `threads`: for opening and reading; hashing has its own, so that it holds up no other file.
    """

    def __init__(
        self, store: ModelStore, *, threads: CapacityLimiter, damaged: Callable[[str], None]
    ) -> None:
        self._store = store
        self._threads = threads
        self._hashing = CapacityLimiter(2)
        self._damaged = damaged
        self._proofs: dict[tuple[Path, Digest], _Proof] = {}
        self._running: dict[tuple[Path, Digest], asyncio.Task[None]] = {}
        self._reported: set[Path] = set()

    async def open(self, path: Path, digest: Digest, *, name: str, prove: bool = True) -> OpenFile:
        """The file, proven; with `prove=False` only not known to be another, and never hashed.

        Raises Changed where its bytes are others, or a link is on the way to it; OSError.
        """
        try:
            stream = await to_thread.run_sync(self._store.open, path, limiter=self._threads)
        except OSError as error:
            if error.errno in _LINKS:
                raise self._refused(path, name, f"is no plain file: {error.strerror}") from error
            raise
        opened = OpenFile(stream, self._threads)
        try:
            proof = self._proofs.get((path, digest))
            if prove and (proof is None or proof.identity != opened.identity):
                await self._proven(path, digest)
                proof = self._proofs.get((path, digest))
            if not prove and (proof is None or proof.identity != opened.identity):
                return opened
            if proof is None:  # forgotten at once, among thousands
                raise Changed(f"{path} was not proven in time")
            if proof.identity != opened.identity:
                raise Changed(f"{path} was exchanged meanwhile")
            if not proof.good:
                raise self._refused(path, name, f"has other bytes than {digest}")
        except BaseException:
            opened.close()
            raise
        self._reported.discard(path)
        return opened

    async def _proven(self, path: Path, digest: Digest) -> None:
        key = path, digest
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = asyncio.create_task(self._prove(path, digest))
            running.add_done_callback(lambda _task: self._running.pop(key))
        await asyncio.shield(running)

    async def _prove(self, path: Path, digest: Digest) -> None:
        proof = await to_thread.run_sync(self._hashed, path, digest, limiter=self._hashing)
        if len(self._proofs) >= _MOST:
            self._proofs.clear()
        self._proofs[path, digest] = proof

    def _hashed(self, path: Path, digest: Digest) -> _Proof:
        with self._store.open(path) as stream:
            identity = _Identity.of(stream)
            if abs(time.time_ns() - identity.changed_ns) < _TICK_NS:
                time.sleep(_TICK_NS / 1e9)  # or a change within the same tick could not be seen
            good = Digest.of_stream(stream) == digest
            return _Proof(identity, good and _Identity.of(stream) == identity)

    def mark_readable(self, place: Path) -> None:
        """It could be read: the next time that it can't be is reported again."""
        self._reported.discard(place)

    def lost(self, place: Path, name: str, trouble: Exception) -> None:
        """Report what is missing of what is live as `name`."""
        self._refused(place, name, f"can't be read: {trouble}")

    def _refused(self, path: Path, name: str, why: str) -> Changed:
        message = (
            f"{path} {why}: it is not served. The next look at {name} puts right what is live; "
            "find out who can write to the store."
        )
        if path not in self._reported:
            self._reported.add(path)
            _log.error("%s", message)
            self._damaged(name)
        return Changed(message)


# /<name>/manifest.json        the live manifest; clients revalidate it each time, by its digest
# /<name>/model.onnx           the slot `exact` of the live release, likewise
# /<name>/<slot>/<file>        any file of a slot of the live release, likewise
# /<name>/sha256/<hex>/<file>  the bytes with this digest, which a cache may keep for a year
#
# The parts of a release have addresses by digest only: a client that requested them by name, one
# after the other, could get the parts of two releases.
_BINARY, _JSON = "application/octet-stream", "application/json"

_TRIES = 3
"""What is found may be removed before it is opened, if several releases follow in a moment."""

_THREADS = 8
"""That open and read; no others wait for them."""

_MANIFEST_LIMIT = 1 << 20
"""Bytes; ours have a few thousand."""

_RETRY_AFTER_S = 30


_Given = Mapping[str, str]
"""The parameters of an address."""

_Find = Callable[[ModelStore, _Given], StoredFileResponse | None]


def store_app(
    store: ModelStore,
    *,
    cors_origins: Sequence[str] = (),
    damaged: Callable[[str], None] = lambda _name: None,
) -> Starlette:
    """An application that serves `store`, to be mounted, at `/models` for example.

    `cors_origins`: pages of these origins may load models too (`*`: of any); else only those of
    the same origin. Only GET and HEAD; what is not deployed is a 404. What is not whole is a 503,
    and `damaged` is called with the deployed model's name, once.
    """
    middleware = []
    if cors_origins:
        middleware = [
            Middleware(
                CORSMiddleware,
                allow_origins=list(cors_origins),
                allow_methods=["GET", "HEAD"],
                allow_headers=["Range", "If-None-Match", "If-Range"],
                expose_headers=["ETag", "Content-Length", "Content-Range", "Accept-Ranges"],
            )
        ]
    serving = _Serving(store, damaged)
    routes = [
        Route("/{name}/manifest.json", serving.endpoint(_manifest)),
        Route("/{name}/model.onnx", serving.endpoint(_stable)),
        Route("/{name}/sha256/{hex}/{file:path}", serving.endpoint(_by_digest)),
        Route("/{name}/{slot}/{file:path}", serving.endpoint(_in_slot)),
    ]
    app = Starlette(routes=routes, middleware=middleware)
    app.router.redirect_slashes = False  # it would send clients to any host in the request
    return app


class _Serving:
    """The endpoints of a store. They open only files in a manifest; no address becomes a path."""

    def __init__(self, store: ModelStore, damaged: Callable[[str], None]) -> None:
        self._store = store
        self._threads = CapacityLimiter(_THREADS)
        self._proofs = VerifiedFiles(store, threads=self._threads, damaged=damaged)

    def endpoint(self, find: _Find) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            return await self._answer(request, find)

        return serve

    async def _answer(self, request: Request, find: _Find) -> Response:
        given, trouble = request.path_params, None
        try:
            check_deployed_name(given["name"])
        except StorageError:
            return _absent()
        live = self._store.live_link(given["name"]) / find.__name__
        for _ in range(_TRIES):
            place = live
            try:
                found = await to_thread.run_sync(find, self._store, given, limiter=self._threads)
                self._proofs.mark_readable(live)
                if found is None:
                    return _absent()
                place = found.content if isinstance(found.content, Path) else live
                return await file_response(request, found, name=given["name"], proofs=self._proofs)
            except (OSError, GateError) as error:
                # Removed since it was found, or the release is not whole.
                trouble = error
        assert trouble is not None
        if not isinstance(trouble, Changed) and not _is_ours(trouble):
            self._proofs.lost(place, given["name"], trouble)
        headers = {"Cache-Control": "no-store", "Retry-After": str(_RETRY_AFTER_S)}
        return PlainTextResponse("can't be served now", 503, headers)


def _absent() -> Response:
    return PlainTextResponse("not found", 404, {"Cache-Control": NO_CACHE})


def _is_ours(trouble: Exception) -> bool:
    """Return whether this machine can't read now, which says nothing about the file."""
    cause = trouble if isinstance(trouble, OSError) else trouble.__cause__
    return isinstance(cause, OSError) and cause.errno in OURS


def _manifest(store: ModelStore, given: _Given) -> StoredFileResponse | None:
    live = store.live(given["name"])
    if live is None:
        return None
    folder = store.releases(given["name"]).get(live.release)
    if folder is None:
        raise ReleaseDamaged(f"release {live.release} is live, and its folder is not there")
    data = read_untrusted(folder / MANIFEST, limit=_MANIFEST_LIMIT)
    if Manifest.from_untrusted(data, what=MANIFEST) != live:
        raise ReleaseDamaged(f"{folder} is not what is live. Deploy {given['name']} anew.")
    return StoredFileResponse(data, Digest.of_bytes(data), NO_CACHE, _JSON)


def _stable(store: ModelStore, given: _Given) -> StoredFileResponse | None:
    live = store.live(given["name"])
    if live is None or live.slots[EXACT].parts:
        return None
    slot = live.slots[EXACT]
    return _of_slot(store, slot, file=slot.model.name, cache=NO_CACHE)


def _in_slot(store: ModelStore, given: _Given) -> StoredFileResponse | None:
    live = store.live(given["name"])
    slot = live.slots.get(given["slot"]) if live is not None else None
    if slot is None or slot.parts:
        return None
    return _of_slot(store, slot, file=given["file"], cache=NO_CACHE)


def _by_digest(store: ModelStore, given: _Given) -> StoredFileResponse | None:
    """Return a file by its digest, from the live release or an earlier one of the model."""
    live = store.live(given["name"])  # where that is damaged, it may name these very bytes
    for number in sorted(store.releases(given["name"]), reverse=True):
        try:
            slots = store.release(given["name"], number).slots
        except ReleaseDamaged:
            if live is not None and number == live.release:
                raise
            continue
        for slot in slots.values():
            if slot.sha256.hex == given["hex"]:
                return _of_slot(store, slot, file=given["file"], cache=IMMUTABLE)
            if slot.golden_sha256 is not None and slot.golden_sha256.hex == given["hex"]:
                return _of_golden(store, slot.golden_sha256, given["file"])
    return None


def _of_slot(store: ModelStore, slot: Slot, *, file: str, cache: str) -> StoredFileResponse | None:
    for entry in slot.files:
        if entry.name == file:
            return StoredFileResponse(store.file(slot.sha256, entry), entry.sha256, cache, _BINARY)
    return None


def _of_golden(store: ModelStore, digest: Digest, file: str) -> StoredFileResponse | None:
    folder = store.content(digest)
    if file == GOLDEN_JSON:
        return StoredFileResponse(folder / GOLDEN_JSON, digest, IMMUTABLE, _JSON)
    golden, _ = read_record(folder, sha256=digest)
    sha256 = golden.files.get(file)
    return (
        StoredFileResponse(folder / file, sha256, IMMUTABLE, _BINARY)
        if sha256 is not None
        else None
    )
