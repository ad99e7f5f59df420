"""The service put together and run until somebody ends it."""

from __future__ import annotations

import contextlib
import functools
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
from gate.service.connection import Connection
from gate.service.inbox import Inbox, Memory
from gate.service.logs import set_up
from gate.service.metrics import Metrics
from gate.service.port import Reconcile
from gate.service.settings import Settings, replayable_s
from gate.service.worker import Rhythm, Worker
from gate.storage.redaction import Redaction

_FILES = 128
"""That the service itself needs to have open: its database, its log, what it deploys."""
_FEWEST = 16
_log = logging.getLogger(__name__)


def assemble(settings: Settings, reconcile: Reconcile) -> Parts:
    """Open secrets and inbox. Raises ServiceError where the service could not do its work."""
    keyring = settings.keyring()
    inbox = Inbox(settings.state)
    metrics = Metrics(inbox)
    memory = Memory(
        settings.keep_s, rows=settings.inbox_rows, least_s=replayable_s(settings.window_s)
    )
    rhythm = Rhythm(settings.models, interval_s=settings.interval_s, memory=memory)
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
            server(application(parts, mounts=mounts), settings).run(sockets=[listener])
    finally:
        parts.worker.stop(timeout_s=0)
        parts.inbox.close()
        logging.getLogger().removeHandler(log)


def server(app: ASGIApp, settings: Settings) -> _Server:
    """A uvicorn server that tells nobody what it is, and logs as we do."""
    places = _places(settings)
    connection = functools.partial(
        Connection,
        places=places,
        write_timeout_s=settings.write_timeout_s,
        webhook=WEBHOOK_PATH,
    )
    return _Server(
        uvicorn.Config(
            app,
            http=connection,  # type: ignore[arg-type]
            loop="asyncio",  # others have no bound on what is read at once
            log_config=None,
            server_header=False,
            proxy_headers=False,
            backlog=places,  # so many are accepted before the first of them gets a place
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


def _places(settings: Settings) -> int:
    """For how many connections there are files to open, among them those that were just accepted.

    A process that has none left accepts nobody for a second, and can't write its database.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = settings.downloads + _FILES
    wanted = 2 * settings.connections + others
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            places = max(_FEWEST, (soft - others) // 2)
            _log.warning(
                "this process may open %d files, %d connections need %d: it takes %d at once. "
                "Raise the limit (ulimit -n, LimitNOFILE), or lower --connections.",
                soft, settings.connections, wanted, places,
            )  # fmt: skip
            return places
    return settings.connections


def listening(host: str, port: int) -> socket.socket:
    """A socket that takes connections already. Raises ServiceError where it can't be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ServiceError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. "
            "Choose another with --port, or end the process that holds it."
        ) from error
