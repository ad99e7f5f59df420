"""The store over HTTP, so that no browser ever shows a stale model.

/<name>/manifest.json          what serves; asked for anew each time, by its digest
/<name>/model.onnx             the slot `exact` of what serves, likewise
/<name>/<slot>/<file>          any file of a slot of what serves, likewise
/<name>/sha256/<hex>/<file>    these very bytes, which a cache may keep for a year

The parts of a release have addresses by digest only: whoever asks for them by their names, one
after the other, could get those of two releases.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gate.deploy.body import IMMUTABLE, NO_CACHE, ServedFile, answer
from gate.deploy.manifest import EXACT, MANIFEST, Manifest, Slot
from gate.deploy.proofs import Proofs
from gate.deploy.store import Store
from gate.errors import DigestMismatch, GateError, StorageError
from gate.golden.folder import GOLDEN_JSON, read_record
from gate.storage.digest import Digest
from gate.storage.foreign import OURS, read_foreign

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
_Find = Callable[[Store, _Given], ServedFile | None]


def store_app(
    store: Store,
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
    app.router.redirect_slashes = False  # it would send clients to whatever host they named
    return app


class _Serving:
    """Only what a manifest names is ever opened; nothing of the address becomes a path."""

    def __init__(self, store: Store, damaged: Callable[[str], None]) -> None:
        self._store = store
        self._threads = CapacityLimiter(_THREADS)
        self._proofs = Proofs(store, threads=self._threads, damaged=damaged)

    def endpoint(self, find: _Find) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            return await self._answer(request, find)

        return serve

    async def _answer(self, request: Request, find: _Find) -> Response:
        given, trouble = request.path_params, None
        for _ in range(_TRIES):
            try:
                found = await to_thread.run_sync(find, self._store, given, limiter=self._threads)
                if found is None:
                    break
                return await answer(request, found, name=given["name"], proofs=self._proofs)
            except (OSError, GateError) as error:
                # Removed since it was found; a name that none can have, a damaged manifest.
                trouble = error
        if trouble is not None and _passes(trouble):
            headers = {"Cache-Control": "no-store", "Retry-After": str(_RETRY_AFTER_S)}
            return PlainTextResponse("can't be served now", 503, headers)
        return PlainTextResponse("not found", 404, {"Cache-Control": NO_CACHE})


def _passes(trouble: Exception) -> bool:
    """Whether it is there, and can't be had now: it is not whole, or this machine can't read."""
    cause = trouble if isinstance(trouble, OSError) else trouble.__cause__
    ours = isinstance(cause, OSError) and cause.errno in OURS
    return ours or isinstance(trouble, DigestMismatch)


def _manifest(store: Store, given: _Given) -> ServedFile | None:
    live = store.live(given["name"])
    folder = store.releases(given["name"]).get(live.release) if live is not None else None
    if folder is None:
        return None
    data = read_foreign(folder / MANIFEST, limit=_MANIFEST_LIMIT)
    if Manifest.from_foreign(data, what=MANIFEST) != live:
        raise StorageError(f"{folder} is not what is live. Deploy {given['name']} anew.")
    return ServedFile(data, Digest.of_bytes(data), NO_CACHE, _JSON)


def _stable(store: Store, given: _Given) -> ServedFile | None:
    live = store.live(given["name"])
    if live is None or live.slots[EXACT].parts:
        return None
    slot = live.slots[EXACT]
    return _of_slot(store, slot, file=slot.model.name, cache=NO_CACHE)


def _in_slot(store: Store, given: _Given) -> ServedFile | None:
    live = store.live(given["name"])
    slot = live.slots.get(given["slot"]) if live is not None else None
    if slot is None or slot.parts:
        return None
    return _of_slot(store, slot, file=given["file"], cache=NO_CACHE)


def _by_digest(store: Store, given: _Given) -> ServedFile | None:
    """Of the live release, and of those that a client's manifest may still name."""
    for number in sorted(store.releases(given["name"]), reverse=True):
        for slot in store.release(given["name"], number).slots.values():
            if slot.sha256.hex == given["hex"]:
                return _of_slot(store, slot, file=given["file"], cache=IMMUTABLE)
            if slot.golden_sha256 is not None and slot.golden_sha256.hex == given["hex"]:
                return _of_golden(store, slot.golden_sha256, given["file"])
    return None


def _of_slot(store: Store, slot: Slot, *, file: str, cache: str) -> ServedFile | None:
    for entry in slot.files:
        if entry.name == file:
            return ServedFile(store.file(slot.sha256, entry), entry.sha256, cache, _BINARY)
    return None


def _of_golden(store: Store, digest: Digest, file: str) -> ServedFile | None:
    folder = store.content(digest)
    if file == GOLDEN_JSON:
        return ServedFile(folder / GOLDEN_JSON, digest, IMMUTABLE, _JSON)
    golden, _ = read_record(folder, sha256=digest)
    sha256 = golden.files.get(file)
    return ServedFile(folder / file, sha256, IMMUTABLE, _BINARY) if sha256 is not None else None
