"""The service's HTTP side: the webhook, and what operators look at.

POST /webhooks/mlflow   deliveries (gate.service.receiver)
GET  /healthz           200 while the process answers
GET  /readyz            200 if the inbox takes, the ledger is whole, the worker works and the
                        registry answered lately; else 503, and which of them is in trouble. Whether
                        the trust can be read is said, and takes nothing offline
GET  /metrics           Prometheus
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp

from gate.registry.trusted import TrustFile
from gate.service.inbox import Inbox
from gate.service.keeper import kept_ledger
from gate.service.keyring import Keyring
from gate.service.metrics import Metrics
from gate.service.places import Places
from gate.service.readiness import Need, inbox_trouble, ledger_trouble
from gate.service.receiver import Receiver
from gate.service.settings import Settings
from gate.service.worker import Worker

WEBHOOK_PATH = "/webhooks/mlflow"
STOP_TIMEOUT_S = 60.0
_SILENT_INTERVALS = 3
"""The registry may be silent for so many rounds of the timer."""
_NO_STORE = {"Cache-Control": "no-store"}


@dataclass(frozen=True)
class Parts:
    """What the service is made of."""

    settings: Settings
    keyring: Keyring
    inbox: Inbox
    metrics: Metrics
    worker: Worker


def application(parts: Parts, *, mounts: Mapping[str, ASGIApp] | None = None) -> ASGIApp:
    """The ASGI application; its lifespan starts and stops the worker.

    `mounts`: other applications by path, such as the static store under `/models`; each answers
    so many requests at once as the settings allow downloads.
    """
    receiver = Receiver(
        parts.settings,
        keyring=parts.keyring,
        inbox=parts.inbox,
        metrics=parts.metrics,
        received=parts.worker.wake,
    )

    downloads = parts.settings.downloads

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        parts.worker.start()
        try:
            yield
        finally:
            await anyio.to_thread.run_sync(lambda: parts.worker.stop(timeout_s=STOP_TIMEOUT_S))

    routes: list[BaseRoute] = [
        Route(WEBHOOK_PATH, receiver.__call__, methods=["POST"]),
        Route("/healthz", _alive),
        Route("/readyz", _readiness(parts)),
        Route("/metrics", _metrics(parts.metrics)),
        *(Mount(path, Places(app, most=downloads)) for path, app in (mounts or {}).items()),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={500: _fault})
    app.router.redirect_slashes = False  # a redirected POST would be signed for another path
    return app


async def _alive(_request: Request) -> Response:
    return JSONResponse({"status": "alive"}, headers=_NO_STORE)


async def _fault(_request: Request, _error: Exception) -> Response:
    # The server logs the traceback; the sender learns nothing.
    return JSONResponse({"outcome": "fault"}, 500, _NO_STORE)


def _readiness(parts: Parts) -> Callable[[Request], object]:
    ledger = kept_ledger(parts.settings)
    trusted = TrustFile.named(parts.settings.trust, policy=parts.settings.policy)
    trust_is_read = Need(trusted.trouble)
    inbox_works = Need(lambda: inbox_trouble(parts.inbox))
    ledger_is_whole = Need(lambda: ledger_trouble(ledger, trusted))

    async def ready(_request: Request) -> Response:
        needs = (inbox_works, ledger_is_whole, trust_is_read)
        inbox, whole, trust = await asyncio.gather(*(need.trouble() for need in needs))
        troubles = {
            "inbox": inbox,
            "ledger": whole,
            "worker": None if parts.worker.alive else "is not running",
            "registry": _registry_trouble(parts),
        }
        good = not any(troubles.values())
        # What serves goes on serving without it: no load balancer shall take it away.
        states = {name: trouble or "ok" for name, trouble in (troubles | {"trust": trust}).items()}
        return JSONResponse({"ready": good, **states}, 200 if good else 503, _NO_STORE)

    return ready


def _registry_trouble(parts: Parts) -> str | None:
    silence = parts.worker.registry_silence_s()
    if silence is None:
        return "has not answered yet"
    if silence > _SILENT_INTERVALS * parts.settings.interval_s:
        return f"has not answered for {silence:.0f} s"
    return None


def _metrics(metrics: Metrics) -> Callable[[Request], object]:
    one = anyio.CapacityLimiter(1)  # many who ask leave the threads and the inbox to others

    async def read(_request: Request) -> Response:
        text = await anyio.to_thread.run_sync(metrics.text, limiter=one)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return read
