"""The service put together and run until somebody ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from gate.errors import ServiceError
from gate.service.app import STOP_TIMEOUT_S, WEBHOOK_PATH, Parts, application
from gate.service.inbox import Inbox
from gate.service.logs import set_up
from gate.service.metrics import Metrics
from gate.service.port import Reconcile
from gate.service.settings import Settings
from gate.service.worker import Rhythm, Worker
from gate.storage.redaction import Redaction

_BACKLOG = 512
_CONNECTIONS = 512
"""With a request at once; more get 503, so that bodies of strangers fill no memory."""
_log = logging.getLogger(__name__)


def assemble(settings: Settings, reconcile: Reconcile) -> Parts:
    """Open secrets and inbox. Raises ServiceError where the service could not do its work."""
    keyring = settings.keyring()
    inbox = Inbox(settings.inbox_url)
    metrics = Metrics(inbox)
    rhythm = Rhythm(settings.models, interval_s=settings.interval_s, keep_s=settings.keep_s)
    return Parts(
        settings, keyring, inbox, metrics, Worker(inbox, reconcile, rhythm=rhythm, metrics=metrics)
    )


def serve(
    settings: Settings,
    reconcile: Reconcile,
    *,
    mounts: Mapping[str, ASGIApp] | None = None,
    ready: Callable[[str], None] = lambda _address: None,
) -> None:
    """Run until SIGTERM or SIGINT; then what was begun is finished and nothing new is taken.

    `ready` is called with `http://host:port` as soon as connections are taken. Raises
    ServiceError where the service can't start.
    """
    parts = assemble(settings, reconcile)
    log = set_up(
        sys.stderr,
        log_format=settings.log_format,
        redaction=Redaction(lambda: parts.keyring.all_secrets, addresses=settings.addresses),
    )
    try:
        with listening(settings.host, settings.port) as listener:
            address = f"http://{settings.host}:{listener.getsockname()[1]}"
            _log.info("listening", extra={"fields": {"address": address, "webhook": WEBHOOK_PATH}})
            ready(address)
            server(application(parts, mounts=mounts)).run(sockets=[listener])
    finally:
        parts.worker.stop(timeout_s=0)
        parts.inbox.close()
        logging.getLogger().removeHandler(log)


def server(app: ASGIApp) -> _Server:
    """A uvicorn server that tells nobody what it is, and logs as we do."""
    return _Server(
        uvicorn.Config(
            app,
            http=Connection,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_CONNECTIONS,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=int(STOP_TIMEOUT_S),
            ws="none",
        )
    )


class _Server(uvicorn.Server):
    """Ends well on a signal, which uvicorn would raise anew afterwards."""

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


class Connection(H11Protocol):
    """One connection; while it owes us the head of a request it is only tolerated.

    Uvicorn bounds how long a connection may be silent between two requests only, so a few hundred
    that never say anything would take every place that there is. Here silent ones are closed, and
    make room when it is needed.
    """

    head_timeout_s = 10.0
    """Within which the head of a request must have arrived, from its first silence on."""

    _overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place; the one that has been silent the longest loses its own if all are taken."""
        super().connection_made(transport)
        self._watch()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            others = [other for other in self.connections if isinstance(other, Connection)]
            silent = [other for other in others if other is not self and other._overdue]
            if silent:
                min(silent, key=Connection._deadline)._give_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is owed any more."""
        self._rest()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Look whether a request has begun or ended meanwhile."""
        super().handle_events()
        self._watch()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._rest()
        elif self._overdue is None and not self.transport.is_closing():
            self._overdue = self.loop.call_later(self.head_timeout_s, self._give_up)

    def on_response_complete(self) -> None:
        """The next request is awaited, within its own time."""
        super().on_response_complete()
        self._watch()

    def _deadline(self) -> float:
        return self._overdue.when() if self._overdue is not None else 0.0

    def _rest(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _give_up(self) -> None:
        self._rest()
        self.connections.discard(self)
        self.transport.abort()


def listening(host: str, port: int) -> socket.socket:
    """A socket that takes connections already. Raises ServiceError where it can't be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ServiceError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. "
            "Choose another with --port, or end the process that holds it."
        ) from error
