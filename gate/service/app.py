"""The HTTP application: webhook with HMAC signatures, health, readiness, metrics, files."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import math
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from gate.deploy.store import ModelStore
from gate.errors import (
    EvidenceError,
    GateError,
    PastChanged,
    ServiceError,
    StorageError,
    Untrusted,
)
from gate.ledger.ledger import Ledger
from gate.mlflow_client.webhooks import EVENTS
from gate.registry.eligibility import TrustFile
from gate.service.monitoring import Reconcile, configure_logging
from gate.service.reconcile_loop import ReconcileLoop
from gate.service.reconciler import stored_head
from gate.service.settings import ServiceSettings, WebhookSecrets
from gate.storage.safe_text import EXAMPLE_MODEL, Redaction
from gate.storage.workspace import DEFAULT, ModelKey

# Results are cached for 2 s, so that frequent requests are cheap. A disk or database that hangs
# blocks one thread, never one that receives deliveries.
_CACHE_S = 2.0

_TIMEOUT_S = 3.0
"""Timeout of a check; load balancers wait only a few seconds."""

_log = logging.getLogger(__name__)


class ReadinessCheck:
    """A cached check of one dependency. `attempt` may block; it returns the problem or None."""

    def __init__(self, find_problem: Callable[[], str | None]) -> None:
        self._find_problem = find_problem
        self._started = 0.0
        self._running: asyncio.Task[str | None] | None = None

    async def problem(self) -> str | None:
        """Return the current or recent problem, or None."""
        now = time.monotonic()
        running = self._running
        if running is None or (running.done() and now - self._started > _CACHE_S):
            self._started = now
            running = self._running = asyncio.create_task(asyncio.to_thread(self._find_problem))
        await asyncio.wait({running}, timeout=max(0.0, self._started + _TIMEOUT_S - now))
        if running.done():
            return running.result()
        return f"has not answered for {time.monotonic() - self._started:.0f} s"


def ledger_problem(ledger: Ledger, trust: TrustFile) -> str | None:
    """Return why the ledger can't be used now, or None."""
    trust.follow(ledger)
    try:
        ledger.verify()
    except (EvidenceError, StorageError, Untrusted) as error:
        _log.warning("not ready: %s", error)
        if isinstance(error, PastChanged):
            return "was shortened or edited"
        if isinstance(error, Untrusted):
            return "is not signed by a trusted writer"
        return "is broken" if isinstance(error, EvidenceError) else "can't be read"
    return None


class RegistryCheck:
    """Checks whether the registry has answered within `CONTACT_S`. `reach` raises GateError."""

    def __init__(
        self, reach: Callable[[], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reach, self._clock = reach, clock
        self._answered = -math.inf

    def problem(self) -> str | None:
        """Contact the registry, which may block; return the problem or None."""
        try:
            self._reach()
        except GateError as error:
            if self._clock() - self._answered <= CONTACT_S:
                return None
            _log.warning("not ready: %s", error)
            return "does not answer"
        self._answered = self._clock()
        return None


def store_problem(settings: ServiceSettings) -> str | None:
    """Return why the deployed files can't be served now, or None."""
    store = ModelStore(settings.store)
    for model in settings.models:
        damage = store.damage(model)
        if damage is not None:
            _log.warning("not ready: the deployed files of %s are damaged: %s", model, damage)
            return "is damaged"
    return None


# MLflow's scheme: `X-MLflow-Signature: v1,<base64>` is the HMAC-SHA256, keyed with the UTF-8
# secret, of `<delivery id>.<timestamp>.<raw body>`. One signature, never several.
SIGNATURE_HEADER = "X-MLflow-Signature"
TIMESTAMP_HEADER = "X-MLflow-Timestamp"
DELIVERY_HEADER = "X-MLflow-Delivery-Id"

_HEADERS = {
    # No dot: otherwise the same signature would fit another split into ID, timestamp and body.
    DELIVERY_HEADER: re.compile(r"[A-Za-z0-9_-]{1,128}"),
    TIMESTAMP_HEADER: re.compile(r"[0-9]{1,12}"),
    SIGNATURE_HEADER: re.compile(r"v1,[A-Za-z0-9+/]{43}="),
}

# Invalid deliveries get 4xx; valid but irrelevant ones 2xx. Events of models that are not on the
# allow-list get 403: MLflow neither repeats nor shows them.
_STATUSES = {
    "accepted": 202, "ignored": 200, "test": 200, "malformed": 400, "gone": 400, "unsigned": 401,
    "stale": 401, "forged": 401, "foreign": 403, "slow": 408, "too_large": 413, "wrong_type": 415,
}  # fmt: skip
"""HTTP status by outcome. The outcome is the whole answer: a reason might help attackers."""


class DeliveryRefused(Exception):
    """A delivery is refused. The message is only for the log."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


@dataclass(frozen=True)
class Envelope:
    """The headers of a delivery: well formed and recent, but not verified."""

    delivery_id: str
    timestamp: str
    signature: str

    @classmethod
    def from_headers(
        cls, header: Callable[[str], Sequence[str]], *, now: float, window_s: float
    ) -> Envelope:
        """Read the headers before the body, so that the body of an invalid delivery is not read.

        `header`: all values of a header. `now`: seconds since the epoch. Raises DeliveryRefused.
        """
        fields: list[str] = []
        for name, pattern in _HEADERS.items():
            values = header(name)
            if len(values) != 1 or not pattern.fullmatch(values[0]):
                reason = f"is refused: expected {name} once, in MLflow's form"
                raise DeliveryRefused("unsigned", reason)
            fields.append(values[0])
        envelope = cls(*fields)
        age_s = now - int(envelope.timestamp)
        if not abs(age_s) <= window_s:
            reason = f"the timestamp is {age_s:.0f} s old, allowed are ±{window_s:.0f} s"
            raise DeliveryRefused("stale", f"is refused: {reason}")
        return envelope

    def verify_body(self, body: bytes, *, secrets: Iterable[str]) -> None:
        """Raise DeliveryRefused unless one of the secrets signed exactly this body.

        The duration does not depend on which secret matches, if any.
        """
        matches = False
        for secret in secrets:
            expected = sign_delivery(
                secret, delivery_id=self.delivery_id, timestamp=self.timestamp, body=body
            )
            matches |= hmac.compare_digest(expected.encode(), self.signature.encode())
        if not matches:
            raise DeliveryRefused("forged", "is refused: the signature fits none of the secrets")


def sign_delivery(secret: str, *, delivery_id: str, timestamp: str, body: bytes) -> str:
    """Return the signature header that MLflow sends."""
    signed = f"{delivery_id}.{timestamp}.".encode() + body
    digest = hmac.new(secret.encode(), signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


class _Event(BaseModel):
    """The fields of an event that are read: it only wakes the loop, which reads the registry."""

    model_config = ConfigDict(strict=True)

    entity: str
    action: str
    workspace: str | None = None
    """Present only if the server has workspaces."""
    data: Any = None


def read_event(body: bytes) -> tuple[str, ModelKey | None]:
    """Return the kind of an event, and its model; None for an event not in `EVENTS`.

    Raises DeliveryRefused for bytes that MLflow does not send.
    """
    try:
        event = _Event.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise DeliveryRefused("malformed", f"is malformed: {problem}") from error
    kind = f"{event.entity}.{event.action}"
    if kind not in EVENTS:
        return kind, None
    name = event.data.get("name") if isinstance(event.data, dict) else None
    if not isinstance(name, str) or not name:
        raise DeliveryRefused("malformed", "is malformed: data.name is not a model's name")
    return kind, ModelKey(None if event.workspace == DEFAULT else event.workspace, name)


class Receiver:
    """The webhook endpoint.

    Nothing is stored: an event wakes the loop, and the timer makes up for lost events.
    """

    def __init__(
        self, settings: ServiceSettings, worker: ReconcileLoop, keyring: WebhookSecrets
    ) -> None:
        self._settings = settings
        self._worker = worker
        self._keyring = keyring

    async def __call__(self, request: Request) -> Response:
        """Handle one request.

        After a refusal the connection is closed, because the body may not have been read.
        """
        fields: dict[str, object] = {}
        try:
            outcome, reason = await self._handle(request, fields)
        except DeliveryRefused as refusal:
            outcome, reason = refusal.outcome, str(refusal)
        status = _STATUSES[outcome]
        self._worker.metrics.deliveries.labels(outcome).inc()
        level = logging.INFO if status < 400 else logging.WARNING
        fields |= {"outcome": outcome, "status": status}
        _log.log(level, "delivery %s", reason, extra={"fields": fields})
        headers = _NO_STORE | ({"Connection": "close"} if status >= 400 else {})
        return JSONResponse({"outcome": outcome}, status, headers)

    async def _handle(self, request: Request, fields: dict[str, object]) -> tuple[str, str]:
        """Return the outcome and, for the log, the reason. Raises DeliveryRefused."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise DeliveryRefused("wrong_type", "is not application/json")
        envelope = Envelope.from_headers(
            request.headers.getlist, now=time.time(), window_s=self._settings.window_s
        )
        body = await _read_body(request, self._settings)
        envelope.verify_body(body, secrets=self._keyring.secrets)
        fields["delivery"] = envelope.delivery_id
        kind, key = read_event(body)
        if key is None:
            return "ignored", "is about nothing of ours"
        fields |= {"event": kind, "model": str(key)[:256]}
        if key.name == EXAMPLE_MODEL:
            return "test", "is a test of the server's"
        if str(key) not in self._settings.models:
            raise DeliveryRefused("foreign", "is about a model that is not allow-listed")
        self._worker.wake(str(key))
        return "accepted", "wakes the loop"


async def _read_body(request: Request, settings: ServiceSettings) -> bytes:
    """Return the body, using at most `body_cap` bytes plus one chunk of memory.

    Raises DeliveryRefused if the body is too large, too slow, or incomplete.
    """
    reason = "has no body that can be read"
    declared = request.headers.get("content-length", "0")
    body = bytearray()
    if declared.isdecimal() and int(declared[:20]) > settings.body_cap:
        raise DeliveryRefused("too_large", reason)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > settings.body_cap:
                    raise DeliveryRefused("too_large", reason)
    except TimeoutError as error:
        raise DeliveryRefused("slow", reason) from error
    except ClientDisconnect as error:
        raise DeliveryRefused("gone", reason) from error
    return bytes(body)


# POST /webhooks/mlflow   deliveries (gate.service.app)
# GET  /healthz           200 while the process answers
# GET  /readyz            200 if ledger and store are intact, the worker runs and the registry
#                         answered recently; else 503 with the failing component.
#                         A trust that can't be read is reported, but does not cause 503
# GET  /metrics           Prometheus
WEBHOOK_PATH = "/webhooks/mlflow"

CLOSE_S = 10.0
"""Time limit for running requests after SIGTERM."""

STOP_TIMEOUT_S = 12.0
"""Time limit for a running reconcile after that. The next start completes it."""

_EXIT_DEADLINE_S = 28
"""Seconds after SIGTERM at which the process ends even if a thread hangs."""

CONTACT_S = 10.0
"""Maximum age of the last answer of the registry."""

_NO_STORE = {"Cache-Control": "no-store"}


def create_app(
    settings: ServiceSettings,
    worker: ReconcileLoop,
    keyring: WebhookSecrets,
    *,
    mounts: Mapping[str, ASGIApp] | None = None,
    reach: Callable[[], None] = lambda: None,
) -> ASGIApp:
    """Return the ASGI application; its lifespan starts and stops the worker.

    `mounts`: other applications by path, such as the static store under `/models`. `reach`: raises
    GateError if the registry does not answer; it may block.
    """

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        worker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(worker.stop, timeout_s=STOP_TIMEOUT_S)

    async def read_metrics(_request: Request) -> Response:
        return Response(worker.metrics.text(), media_type="text/plain; version=0.0.4")

    routes: list[BaseRoute] = [
        Route(WEBHOOK_PATH, Receiver(settings, worker, keyring).__call__, methods=["POST"]),
        Route("/healthz", _alive),
        Route("/readyz", _readiness(settings, worker, reach)),
        Route("/metrics", read_metrics),
        *(Mount(path, app) for path, app in (mounts or {}).items()),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={500: _fault})
    app.router.redirect_slashes = False  # a redirected POST would be signed for another path
    return app


async def _alive(_request: Request) -> Response:
    return JSONResponse({"status": "alive"}, headers=_NO_STORE)


async def _fault(_request: Request, _error: Exception) -> Response:
    # The server logs the traceback; it is not sent to the client.
    return JSONResponse({"outcome": "fault"}, 500, _NO_STORE)


def _readiness(
    settings: ServiceSettings, worker: ReconcileLoop, reach: Callable[[], None]
) -> Callable[[Request], object]:
    ledger = Ledger(settings.state, stored_head=stored_head(settings.store))
    trust_file = TrustFile.named(settings.trust, policy=settings.policy)
    checks = {
        "ledger": ReadinessCheck(lambda: ledger_problem(ledger, trust_file)),
        "store": ReadinessCheck(lambda: store_problem(settings)),
        "registry": ReadinessCheck(RegistryCheck(reach).problem),
        "trust": ReadinessCheck(trust_file.problem),
    }

    async def ready(_request: Request) -> Response:
        results = await asyncio.gather(*(check.problem() for check in checks.values()))
        problems = dict(zip(checks, results, strict=True))
        problems["worker"] = worker.problem()
        # The service keeps serving without a trust, so a load balancer must not remove it.
        is_ready = not any(text for name, text in problems.items() if name != "trust")
        states = {name: problem or "ok" for name, problem in problems.items()}
        return JSONResponse({"ready": is_ready, **states}, 200 if is_ready else 503, _NO_STORE)

    return ready


def serve(
    settings: ServiceSettings,
    reconcile: Reconcile,
    *,
    mounts: Mapping[str, ASGIApp] | None = None,
    ready: Callable[[str], None] = lambda _address: None,
    reach: Callable[[], None] = lambda: None,
) -> None:
    """Run until SIGTERM or SIGINT, then finish running work and accept no more.

    The process ends within 30 s even if something hangs. `mounts`, `reach`: as for `create_app`.
    `ready` is called with `http://host:port` once connections are accepted. Raises ServiceError if
    the service can't start.
    """
    keyring = settings.keyring()
    worker = ReconcileLoop(reconcile, models=settings.models, interval_s=settings.interval_s)
    log = configure_logging(
        sys.stderr,
        log_format=settings.log_format,
        redaction=Redaction(lambda: keyring.all_secrets, addresses=settings.addresses),
    )
    try:
        with listening(settings.host, settings.port) as listener:
            address = f"http://{settings.host}:{listener.getsockname()[1]}"
            _log.info("listening", extra={"fields": {"address": address, "webhook": WEBHOOK_PATH}})
            ready(address)
            app = create_app(settings, worker, keyring, mounts=mounts, reach=reach)
            server(app).run(sockets=[listener])
    finally:
        if not worker.stop(timeout_s=0):
            _log.warning("a reconcile was interrupted and will be repeated at the next start")
        elif sys.platform != "win32":
            signal.alarm(0)
        logging.getLogger().removeHandler(log)


def server(app: ASGIApp) -> _Server:
    """Return a uvicorn server that sends no server header, and logs as the service does."""
    return _Server(
        uvicorn.Config(
            app,
            http=_Protocol,
            loop="asyncio",
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=int(CLOSE_S),
            ws="none",
        )
    )


_CONNECTIONS = 256
"""Largest number of connections. Each may use a socket and a file of the store; a process may open
1024 files by default."""

_IDLE_S = 10.0
"""Seconds for which a connection may stay without a complete request."""


class _Protocol(H11Protocol):
    """uvicorn's protocol with limits on connections and on the time for a complete request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _CONNECTIONS:
            transport.abort()
        else:
            self.loop.call_later(_IDLE_S, self._close_idle, self.cycle)

    def _close_idle(self, last_cycle: object) -> None:
        """Close a connection that has had no request since the last check."""
        if self.transport.is_closing():
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is last_cycle:
            self.transport.abort()
        else:
            self.loop.call_later(_IDLE_S, self._close_idle, self.cycle)


class _Server(uvicorn.Server):
    """Exits normally on a signal, which uvicorn would raise again afterwards."""

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        """Start the shutdown. Threads of libraries may hang, and Python would wait for them."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
        if sys.platform != "win32":
            signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
            signal.alarm(_EXIT_DEADLINE_S)


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections. Raises ServiceError if that is impossible."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ServiceError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. "
            "Choose another port with --port, or stop the process that uses it."
        ) from error
