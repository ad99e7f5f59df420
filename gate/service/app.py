"""The HTTP application: webhook with HMAC signatures, health, readiness, metrics, files."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import logging
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import FrameType

import anyio
import uvicorn
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
from gate.registry.eligibility import TrustFile
from gate.service import event as events
from gate.service.event import Event, MalformedEvent
from gate.service.monitoring import Reconcile, ServiceMetrics, configure_logging
from gate.service.reconcile_loop import ReconcileLoop
from gate.service.reconciler import kept_ledger
from gate.service.settings import ServiceSettings, WebhookSecrets
from gate.storage.safe_text import Redaction

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
            return "is not the one it was"
        if isinstance(error, Untrusted):
            return "is not signed by a trusted writer"
        return "is broken" if isinstance(error, EvidenceError) else "can't be read"
    return None


class RegistryContact:
    """Tracks when the registry last answered. `reach` raises GateError if it does not answer."""

    def __init__(
        self, reach: Callable[[], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reach = reach
        self._clock = clock
        self._since = -math.inf

    def problem(self) -> str | None:
        """Contact the registry; return the problem if the last answer is older than `CONTACT_S`.

        This method blocks.
        """
        try:
            self._reach()
        except GateError as error:
            silence = self._clock() - self._since
            if silence <= CONTACT_S:
                return None
            _log.warning("not ready: %s", error)
            return (
                "does not answer"
                if silence == math.inf
                else f"has not answered for {silence:.0f} s"
            )
        self._since = self._clock()
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


# No dot: otherwise the same signature would fit another split into ID, timestamp and body.
_DELIVERY_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_TIMESTAMP = re.compile(r"[0-9]{1,12}")
_SIGNATURE = re.compile(r"v1,[A-Za-z0-9+/]{43}=")


@dataclass(frozen=True)
class DeliveryResponse:
    """The response to the sender: one word and a status. The reason might help attackers."""

    outcome: str
    status: int
    reason: str
    """The reason, only for the log."""
    fields: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> Response:
        """Return the response as JSON.

        After a refusal the connection is closed, because the body may not have been read.
        """
        headers = {"Cache-Control": "no-store"}
        if self.status >= 400:
            headers["Connection"] = "close"
        return JSONResponse({"outcome": self.outcome}, self.status, headers)


class DeliveryRefused(Exception):
    """A delivery is refused."""

    def __init__(self, outcome: str, status: int, reason: str) -> None:
        super().__init__(reason)
        self.response = DeliveryResponse(outcome, status, reason)


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
        for name, pattern in (
            (DELIVERY_HEADER, _DELIVERY_ID),
            (TIMESTAMP_HEADER, _TIMESTAMP),
            (SIGNATURE_HEADER, _SIGNATURE),
        ):
            values = header(name)
            if len(values) != 1:
                reason = f"is refused: {name} is there {len(values)} times, expected once"
                raise DeliveryRefused("unsigned", 401, reason)
            if not pattern.fullmatch(values[0]):
                raise DeliveryRefused(
                    "unsigned", 401, f"is refused: {name} is not of MLflow's form"
                )
            fields.append(values[0])
        envelope = cls(*fields)
        age_s = now - int(envelope.timestamp)
        if not abs(age_s) <= window_s:
            reason = f"the timestamp is {age_s:.0f} s old, allowed are ±{window_s:.0f} s"
            raise DeliveryRefused("stale", 401, f"is refused: {reason}")
        return envelope

    def verify_body(self, body: bytes, *, secrets: Iterable[str]) -> None:
        """Raise DeliveryRefused unless one of the secrets signed exactly this body.

        The duration does not depend on which secret matches, if any.
        """
        matches, count = False, 0
        for secret in secrets:
            expected = sign_delivery(
                secret, delivery_id=self.delivery_id, timestamp=self.timestamp, body=body
            )
            matches |= hmac.compare_digest(expected.encode(), self.signature.encode())
            count += 1
        if not matches:
            reason = f"is refused: the signature fits none of {count} secrets"
            raise DeliveryRefused("forged", 401, reason)


def sign_delivery(secret: str, *, delivery_id: str, timestamp: str, body: bytes) -> str:
    """Return the signature header that MLflow sends."""
    signed = f"{delivery_id}.{timestamp}.".encode() + body
    digest = hmac.new(secret.encode(), signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


# Invalid deliveries get 4xx; valid but irrelevant ones 2xx. Events of models that are not on the
# allow-list get 403: MLflow neither repeats nor shows them. Nothing is stored: only the name of the
# model is used, and the timer's next reconcile makes up for lost events.
_NO_BODY = "has no body that can be read"


class Receiver:
    """The webhook endpoint. `wake` is called with the model of an event."""

    def __init__(
        self,
        settings: ServiceSettings,
        *,
        keyring: WebhookSecrets,
        metrics: ServiceMetrics,
        wake: Callable[[str], None],
    ) -> None:
        """Raises PolicyError if the policy, which names the review tag, can't be read."""
        self._settings = settings
        self._tag = settings.policy_in_force().review_tag
        self._keyring = keyring
        self._metrics = metrics
        self._wake = wake

    async def __call__(self, request: Request) -> Response:
        """Handle one request."""
        start = time.perf_counter()
        try:
            response = await self._handle(request)
        except DeliveryRefused as refusal:
            response = refusal.response
        self._metrics.deliveries.labels(response.outcome).inc()
        self._metrics.accept_seconds.observe(time.perf_counter() - start)
        level = logging.INFO if response.status < 400 else logging.WARNING
        fields = {"outcome": response.outcome, "status": response.status, **response.fields}
        _log.log(level, "delivery %s", response.reason, extra={"fields": fields})
        return response.to_json()

    async def _handle(self, request: Request) -> DeliveryResponse:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            return DeliveryResponse("wrong_type", 415, "is not application/json")
        envelope = Envelope.from_headers(
            request.headers.getlist, now=time.time(), window_s=self._settings.window_s
        )
        body = await _read_body(request, self._settings)
        envelope.verify_body(body, secrets=self._keyring.secrets)
        fields: dict[str, object] = {"delivery": envelope.delivery_id}
        try:
            event = events.read(body, self._tag)
        except MalformedEvent as error:
            return DeliveryResponse("malformed", 400, f"is malformed: {error}", fields)
        if event is None:
            return DeliveryResponse("ignored", 200, "is about nothing of ours", fields)
        return self._handle_event(event, fields)

    def _handle_event(self, event: Event, fields: dict[str, object]) -> DeliveryResponse:
        """Handle an event whose signature was verified."""
        fields |= {"event": event.kind, "model": event.model[:256]}
        if event.is_test:
            return DeliveryResponse("test", 200, "is a test of the server's", fields)
        if event.model not in self._settings.models:
            return DeliveryResponse(
                "foreign", 403, "is about a model that is not allow-listed", fields
            )
        if event.hint is not None:
            _log.warning("%s", event.hint, extra={"fields": fields})
        reason = events.ignore_reason(event, aliases=self._settings.aliases, tag=self._tag)
        if reason is not None:
            return DeliveryResponse("ignored", 200, f"changes nothing: {reason}", fields)
        self._wake(event.model)
        return DeliveryResponse("accepted", 202, "wakes the loop", fields)


async def _read_body(request: Request, settings: ServiceSettings) -> bytes:
    """Return the body, using at most `body_cap` bytes plus one chunk of memory.

    Raises DeliveryRefused if the body is too large, too slow, or incomplete.
    """
    declared = request.headers.get("content-length", "0")
    body = bytearray()
    if declared.isdecimal() and int(declared[:20]) > settings.body_cap:
        raise DeliveryRefused("too_large", 413, _NO_BODY)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > settings.body_cap:
                    raise DeliveryRefused("too_large", 413, _NO_BODY)
    except TimeoutError as error:
        raise DeliveryRefused("slow", 408, _NO_BODY) from error
    except ClientDisconnect as error:
        raise DeliveryRefused("gone", 400, _NO_BODY) from error
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

_SILENT_INTERVALS = 3
"""Number of timer intervals without an answer before the registry counts as silent."""

_NO_STORE = {"Cache-Control": "no-store"}


@dataclass(frozen=True)
class ServiceParts:
    """The components of the service."""

    settings: ServiceSettings
    keyring: WebhookSecrets
    metrics: ServiceMetrics
    worker: ReconcileLoop
    contact: RegistryContact


def create_app(parts: ServiceParts, *, mounts: Mapping[str, ASGIApp] | None = None) -> ASGIApp:
    """Return the ASGI application; its lifespan starts and stops the worker.

    `mounts`: other applications by path, such as the static store under `/models`.
    """
    receiver = Receiver(
        parts.settings,
        keyring=parts.keyring,
        metrics=parts.metrics,
        wake=parts.worker.wake,
    )

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


def _readiness(parts: ServiceParts) -> Callable[[Request], object]:
    checked_ledger = kept_ledger(parts.settings)
    trust_file = TrustFile.named(parts.settings.trust, policy=parts.settings.policy)
    trust_check = ReadinessCheck(trust_file.problem)
    ledger_check = ReadinessCheck(lambda: ledger_problem(checked_ledger, trust_file))
    store_check = ReadinessCheck(lambda: store_problem(parts.settings))
    registry_check = ReadinessCheck(parts.contact.problem)

    async def ready(_request: Request) -> Response:
        ledger, trust, store, registry = await asyncio.gather(
            *(check.problem() for check in (ledger_check, trust_check, store_check, registry_check))
        )
        problems = {
            "ledger": ledger,
            "store": store,
            "worker": None if parts.worker.alive else "is not running",
            "registry": registry or _registry_problem(parts),
        }
        is_ready = not any(problems.values())
        # The service keeps serving without a trust, so a load balancer must not remove it.
        states = {name: problem or "ok" for name, problem in (problems | {"trust": trust}).items()}
        return JSONResponse({"ready": is_ready, **states}, 200 if is_ready else 503, _NO_STORE)

    return ready


def _registry_problem(parts: ServiceParts) -> str | None:
    silence = parts.worker.registry_silence_s()
    if silence is None:
        return "has not answered yet"
    if silence > _SILENT_INTERVALS * parts.settings.interval_s:
        return f"has not answered for {silence:.0f} s"
    return None


def _metrics(metrics: ServiceMetrics) -> Callable[[Request], object]:
    limiter = anyio.CapacityLimiter(1)  # concurrent requests must leave threads for others

    async def read(_request: Request) -> Response:
        text = await anyio.to_thread.run_sync(metrics.text, limiter=limiter)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return read


def create_service(
    settings: ServiceSettings, reconcile: Reconcile, *, reach: Callable[[], None] = lambda: None
) -> ServiceParts:
    """Read the secrets and create the components. `reach`: see `RegistryContact`.

    Raises ServiceError if the service could not work.
    """
    keyring = settings.keyring()
    metrics = ServiceMetrics()
    worker = ReconcileLoop(
        reconcile, models=settings.models, metrics=metrics, interval_s=settings.interval_s
    )
    return ServiceParts(settings, keyring, metrics, worker, RegistryContact(reach))


def serve(
    settings: ServiceSettings,
    reconcile: Reconcile,
    *,
    mounts: Mapping[str, ASGIApp] | None = None,
    ready: Callable[[str], None] = lambda _address: None,
    reach: Callable[[], None] = lambda: None,
) -> None:
    """Run until SIGTERM or SIGINT, then finish running work and accept no more.

    The process ends within 30 s even if something hangs. `ready` is called with `http://host:port`
    once connections are accepted. Raises ServiceError if the service can't start.
    """
    parts = create_service(settings, reconcile, reach=reach)
    log = configure_logging(
        sys.stderr,
        log_format=settings.log_format,
        redaction=Redaction(lambda: parts.keyring.all_secrets, addresses=settings.addresses),
    )
    try:
        with listening(settings.host, settings.port) as listener:
            address = f"http://{settings.host}:{listener.getsockname()[1]}"
            _log.info("listening", extra={"fields": {"address": address, "webhook": WEBHOOK_PATH}})
            ready(address)
            server(create_app(parts, mounts=mounts)).run(sockets=[listener])
    finally:
        if not parts.worker.stop(timeout_s=0):
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

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the shutdown. Threads of libraries may hang, and Python would wait for them."""
        super().handle_exit(sig, frame)
        if sys.platform != "win32":
            signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
            signal.alarm(_EXIT_DEADLINE_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


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
