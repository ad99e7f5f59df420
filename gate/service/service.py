"""The service put together and run until somebody ends it."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

import uvicorn
from starlette.types import ASGIApp

from gate.errors import ServiceError
from gate.service.app import STOP_TIMEOUT_S, WEBHOOK_PATH, Parts, application
from gate.service.connections import Connection
from gate.service.inbox import Inbox
from gate.service.logs import Redaction, set_up
from gate.service.metrics import Metrics
from gate.service.port import Reconcile
from gate.service.settings import Settings
from gate.service.worker import Rhythm, Worker

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
        redaction=Redaction(lambda: parts.keyring.all_secrets),
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
