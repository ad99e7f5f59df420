"""HTTP: immutable digest URLs, revalidated names, range requests."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple

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
from gate.storage.untrusted_files import MACHINE_ERRORS, read_untrusted

IMMUTABLE = "public, max-age=31536000, immutable"
NO_CACHE = "no-cache"
_CHUNK = 1 << 17
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.ASCII)

_log = logging.getLogger(__name__)


def etag(digest: Digest) -> str:
    """Return the strong ETag of content with this digest.

    Starlette's FileResponse derives it from time and size, which may stay the same after a change.
    """
    return f'"sha256-{digest.hex}"'


@dataclass(frozen=True)
class ServedContent:
    """A file to serve."""

    content: Path | bytes
    """The path in the store, or the content."""
    digest: Digest
    """Digest of the content."""
    cache: str
    """`IMMUTABLE` or `NO_CACHE`."""
    media_type: str


async def file_response(
    request: Request, file: ServedContent, *, name: str, proofs: VerifiedFiles
) -> Response:
    """Return a response with the content of a file of the deployed model `name`.

    304 if the client has it, 206 for one range, 416 for a range outside the file. A request for
    several ranges gets the whole file, as HTTP allows. HEAD and 304 read nothing. Raises the
    exceptions of `VerifiedFiles.open`.
    """
    tag = etag(file.digest)
    headers = {"ETag": tag, "Cache-Control": file.cache, "X-Content-Type-Options": "nosniff"}
    if _is_current(request.headers.get("if-none-match"), tag):
        return Response(status_code=304, headers=headers)
    if isinstance(file.content, bytes):
        return Response(file.content, headers=headers, media_type=file.media_type)
    # Opened before the response starts: a file that is removed later is still sent completely.
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
    headers |= {
        "Accept-Ranges": "bytes",
        "Content-Length": str(len(span)),
        "Content-Type": file.media_type,
    }
    return _FileBody(content, span=span, status=200 if part is None else 206, headers=headers)


class _FileBody(Response):
    """Sends a part of an open file while the client is connected, and closes it."""

    def __init__(
        self, content: OpenFile, *, span: range, status: int, headers: Mapping[str, str]
    ) -> None:
        self._content = content
        self._span = span
        self.status_code = status
        self.background = None
        self.body = b""
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnected = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            stop = self._span.stop
            offset = stop if scope["method"] == "HEAD" else self._span.start
            while offset < stop:
                data = await self._content.read(min(_CHUNK, stop - offset), offset)
                if disconnected.done():
                    return
                offset += len(data)
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Changed as error:
            # The remaining bytes are not verified. Without the last message the client sees an
            # incomplete response.
            _log.error("%s: the response was aborted", error)
        finally:
            disconnected.cancel()
            self._content.close()


async def _wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected. Sending to it raises no error."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_current(header: str | None, tag: str) -> bool:
    """Return whether If-None-Match has the tag, by weak comparison: a proxy may add `W/`."""
    if header is None:
        return False
    names = [name.strip().removeprefix("W/") for name in header.split(",")]
    return tag in names or names == ["*"]


def _part(request: Request, *, tag: str, size: int) -> range | None:
    """Return the requested range, empty if it is outside the file; None for the whole file."""
    match = _RANGE.fullmatch(request.headers.get("range", ""))
    if match is None or request.headers.get("if-range") not in (None, tag):
        return None
    first, last = match.groups()
    backwards = first and last and int(last) < int(first)
    if backwards or not (first or last):
        return None
    if not first:  # `bytes=-N`: the last N bytes
        return range(max(size - int(last), 0), size)
    return range(int(first), min(int(last) + 1, size) if last else size)


# A file is hashed at its first request, once for concurrent requests, and again if its identity
# changed: inode, size or times, of which users can't set the change time. The file is read from the
# descriptor whose identity was compared, and the identity is compared again after every read.
_TICK_NS = 50_000_000
"""Above the resolution of a file system's change time, which is at most 10 ms."""

_MAX_PROOFS = 4096
"""Number of verified files to remember. A few releases have some hundred files."""

_LINKS = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR)


class Changed(DigestMismatch):
    """A file does not, or no longer, match its digest."""


class _Identity(NamedTuple):
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def from_stream(cls, stream: FileIO) -> _Identity:
        stat = os.fstat(stream.fileno())
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@dataclass(frozen=True)
class _Proof:
    identity: _Identity
    is_intact: bool


class OpenFile:
    """An open file with the identity that it had when it was opened."""

    def __init__(self, stream: FileIO, threads: CapacityLimiter) -> None:
        self._stream = stream
        self._threads = threads
        self.identity = _Identity.from_stream(stream)

    @property
    def size(self) -> int:
        """Return the size of the file in bytes."""
        return self.identity.size

    async def read(self, size: int, offset: int) -> bytes:
        """Read `size` bytes at `offset`. Raises Changed if the file has changed."""
        return await to_thread.run_sync(self._read, size, offset, limiter=self._threads)

    def _read(self, size: int, offset: int) -> bytes:
        data = os.pread(self._stream.fileno(), size, offset)
        if len(data) < size or _Identity.from_stream(self._stream) != self.identity:
            raise Changed(f"the file changed before byte {offset + size} of it was sent")
        return data

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class VerifiedFiles:
    """Opens files of a store and verifies their digests.

    threads: limits opening and reading. Hashing has its own limit, so that it does not delay other
    files. damaged: called once per damaged file with the name of the deployed model.
    """

    def __init__(
        self, store: ModelStore, *, threads: CapacityLimiter, damaged: Callable[[str], None]
    ) -> None:
        self._store = store
        self._threads = threads
        self._hashing = CapacityLimiter(2)
        self._damaged = damaged
        self._proofs: dict[tuple[Path, Digest], _Proof] = {}
        self._running: dict[tuple[Path, Digest], asyncio.Task[_Proof]] = {}
        self._reported: set[Path] = set()

    async def open(self, path: Path, digest: Digest, *, name: str, prove: bool = True) -> OpenFile:
        """Open a file and verify its digest. `prove=False` never hashes, but refuses a file that is
        known to differ. Raises Changed if it differs or a part of its path is a link; OSError."""
        try:
            stream = await to_thread.run_sync(self._store.open, path, limiter=self._threads)
        except OSError as error:
            if error.errno in _LINKS:
                raise self.refuse(path, name, f"is not a file: {error.strerror}") from error
            raise
        opened = OpenFile(stream, self._threads)
        try:
            proof = self._proofs.get((path, digest))
            if proof is None or proof.identity != opened.identity:
                if not prove:
                    return opened
                proof = await self._verify(path, digest)
            if proof.identity != opened.identity:
                raise Changed(f"{path} was replaced while it was verified")
            if not proof.is_intact:
                raise self.refuse(path, name, f"has other bytes than {digest}")
        except BaseException:
            opened.close()
            raise
        self.mark_readable(path)
        return opened

    async def _verify(self, path: Path, digest: Digest) -> _Proof:
        """Hash a file, once for concurrent requests."""
        key = path, digest
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = asyncio.create_task(self._prove(path, digest))
            running.add_done_callback(lambda _task: self._running.pop(key))
        return await asyncio.shield(running)

    async def _prove(self, path: Path, digest: Digest) -> _Proof:
        proof = await to_thread.run_sync(self._compute_proof, path, digest, limiter=self._hashing)
        if len(self._proofs) >= _MAX_PROOFS:
            self._proofs.clear()
        self._proofs[path, digest] = proof
        return proof

    def _compute_proof(self, path: Path, digest: Digest) -> _Proof:
        with self._store.open(path) as stream:
            identity = _Identity.from_stream(stream)
            if abs(time.time_ns() - identity.changed_ns) < _TICK_NS:
                time.sleep(_TICK_NS / 1e9)  # A change in the same tick would not be detected.
            is_intact = Digest.from_stream(stream) == digest
            return _Proof(identity, is_intact and _Identity.from_stream(stream) == identity)

    def mark_readable(self, path: Path) -> None:
        """Note that a file was read, so that the next failure is reported again."""
        self._reported.discard(path)

    def refuse(self, path: Path, name: str, problem: str) -> Changed:
        """Return the error for a file of the deployed model `name`; report it unless reported."""
        message = (
            f"{path} {problem}: it is not served. The next reconciliation of {name} repairs the "
            "store; find out who can write to it."
        )
        if path not in self._reported:
            self._reported.add(path)
            _log.error("%s", message)
            self._damaged(name)
        return Changed(message)


# /<name>/manifest.json        the live manifest; clients revalidate it each time, by its ETag
# /<name>/model.onnx           the slot `exact` of the live release, likewise
# /<name>/<slot>/<file>        any file of a slot of the live release, likewise
# /<name>/sha256/<hex>/<file>  the content with this digest, which caches may keep for a year
#
# The parts of a multi-file release have only URLs with digests: a client that requests them by name
# one after the other could get parts of two releases.
_BINARY, _JSON = "application/octet-stream", "application/json"

_TRIES = 3
"""Attempts: a new release may remove a file between finding and opening it."""

_THREADS = 8
"""Maximum number of threads that open and read."""

_MANIFEST_LIMIT = 1 << 20
"""Maximum size in bytes. Typical manifests have a few thousand bytes."""

_RETRY_AFTER_S = 30


_PathParams = Mapping[str, str]
"""The path parameters of a request."""

_Find = Callable[[ModelStore, _PathParams], ServedContent | None]


def store_app(
    store: ModelStore,
    *,
    cors_origins: Sequence[str] = (),
    damaged: Callable[[str], None] = lambda _name: None,
) -> Starlette:
    """Return an application that serves `store`, to be mounted, for example at `/models`.

    GET and HEAD only. Models that are not deployed get 404, damaged ones 503. cors_origins: other
    origins whose pages may load models (`*`: all). damaged: called once with the name of a
    damaged model.
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
        Route(path, partial(serving.answer, find=find))
        for path, find in (
            ("/{name}/manifest.json", _manifest),
            ("/{name}/model.onnx", _stable),
            ("/{name}/sha256/{hex}/{file:path}", _by_digest),
            ("/{name}/{slot}/{file:path}", _in_slot),
        )
    ]
    app = Starlette(routes=routes, middleware=middleware)
    app.router.redirect_slashes = False  # It would redirect to the Host header of the request.
    return app


class _Serving:
    """The endpoints of a store. They open only files named in a manifest, never a path from a
    URL."""

    def __init__(self, store: ModelStore, damaged: Callable[[str], None]) -> None:
        self._store = store
        self._threads = CapacityLimiter(_THREADS)
        self._proofs = VerifiedFiles(store, threads=self._threads, damaged=damaged)

    async def answer(self, request: Request, *, find: _Find) -> Response:
        params, failure = request.path_params, None
        name = params["name"]
        try:
            check_deployed_name(name)
        except StorageError:
            return _absent()
        live = self._store.live_link(name) / find.__name__
        for _ in range(_TRIES):
            path = live
            try:
                file = await to_thread.run_sync(find, self._store, params, limiter=self._threads)
                self._proofs.mark_readable(live)
                if file is None:
                    return _absent()
                path = file.content if isinstance(file.content, Path) else live
                return await file_response(request, file, name=name, proofs=self._proofs)
            except (OSError, GateError) as error:
                # The file was removed meanwhile, or the release is damaged.
                failure = error
        assert failure is not None
        if not isinstance(failure, Changed) and not _is_machine_error(failure):
            self._proofs.refuse(path, name, f"can't be read: {failure}")
        headers = {"Cache-Control": "no-store", "Retry-After": str(_RETRY_AFTER_S)}
        return PlainTextResponse("can't be served now", 503, headers)


def _absent() -> Response:
    return PlainTextResponse("not found", 404, {"Cache-Control": NO_CACHE})


def _is_machine_error(error: Exception) -> bool:
    """Return whether the cause is this machine's own state, not the file."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in MACHINE_ERRORS


def _manifest(store: ModelStore, params: _PathParams) -> ServedContent | None:
    live = store.live(params["name"])
    if live is None:
        return None
    folder = store.releases(params["name"]).get(live.release)
    if folder is None:
        raise ReleaseDamaged(f"the folder of the live release {live.release} is missing")
    data = read_untrusted(folder / MANIFEST, limit=_MANIFEST_LIMIT)
    if Manifest.from_untrusted(data, label=MANIFEST) != live:
        raise ReleaseDamaged(
            f"{folder} differs from the live manifest. Deploy {params['name']} again."
        )
    return ServedContent(data, Digest.from_bytes(data), NO_CACHE, _JSON)


def _stable(store: ModelStore, params: _PathParams) -> ServedContent | None:
    live = store.live(params["name"])
    if live is None or live.slots[EXACT].parts:
        return None
    slot = live.slots[EXACT]
    return _slot_content(store, slot, file=slot.model.name, cache=NO_CACHE)


def _in_slot(store: ModelStore, params: _PathParams) -> ServedContent | None:
    live = store.live(params["name"])
    slot = live.slots.get(params["slot"]) if live is not None else None
    if slot is None or slot.parts:
        return None
    return _slot_content(store, slot, file=params["file"], cache=NO_CACHE)


def _by_digest(store: ModelStore, params: _PathParams) -> ServedContent | None:
    """Return a file by its digest, from the live release or an earlier one of the model."""
    live = store.live(params["name"])  # Raises if damaged: it may be the one with this digest.
    for number in sorted(store.releases(params["name"]), reverse=True):
        try:
            slots = store.release(params["name"], number).slots
        except ReleaseDamaged:
            if live is not None and number == live.release:
                raise
            continue
        for slot in slots.values():
            if slot.sha256.hex == params["hex"]:
                return _slot_content(store, slot, file=params["file"], cache=IMMUTABLE)
            if slot.golden_sha256 is not None and slot.golden_sha256.hex == params["hex"]:
                return _golden_content(store, slot.golden_sha256, params["file"])
    return None


def _slot_content(store: ModelStore, slot: Slot, *, file: str, cache: str) -> ServedContent | None:
    for entry in slot.files:
        if entry.name == file:
            return ServedContent(store.file(slot.sha256, entry), entry.sha256, cache, _BINARY)
    return None


def _golden_content(store: ModelStore, digest: Digest, file: str) -> ServedContent | None:
    folder = store.content(digest)
    if file == GOLDEN_JSON:
        return ServedContent(folder / GOLDEN_JSON, digest, IMMUTABLE, _JSON)
    golden, _ = read_record(folder, sha256=digest)
    sha256 = golden.files.get(file)
    return ServedContent(folder / file, sha256, IMMUTABLE, _BINARY) if sha256 is not None else None
