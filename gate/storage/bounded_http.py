"""HTTP exchanges that end within a time limit."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

_WATCH_S = 0.2
"""Interval at which running exchanges are checked."""

_STREAMS = ("connect_tcp.complete", "start_tls.complete")


class BoundedHttp:
    """A client that follows no redirect, keeps no cookie, decompresses nothing, and cuts its
    connections once an exchange takes longer than a limit.

    httpx limits each read alone, and a server may send one byte of a header after the other. A
    cookie would tie all requests to one of several servers. A small compressed body may be huge.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        ca: str | None = None,
        connections: int = 1,
        retries: int = 0,
        proxy: str | None = None,
    ) -> None:
        """`ca`: a file of certificates to trust in place of the system's and certifi's. `retries`:
        to connect. Raises OSError for certificates that can't be loaded."""
        import ssl

        import httpx

        if ca is None:
            context = httpx.create_ssl_context()
            context.load_default_certs()
        else:
            context = ssl.create_default_context(cafile=ca)
        limits = httpx.Limits(max_connections=connections)
        self._limit_s, self._has_cut = limit_s, False
        self._transport = httpx.HTTPTransport(
            verify=context, retries=retries, limits=limits, proxy=proxy
        )
        self._ends: dict[int, float] = {}
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()
        self._numbers = itertools.count()
        self._headers = {
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            "User-Agent": f"parity-gate/{metadata.version('parity-gate')}",
        }
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="gate-http-watchdog", daemon=True).start()

    @contextlib.contextmanager
    def exchange(
        self, method: str, url: str, content: bytes | None, headers: Mapping[str, str]
    ) -> Iterator[Any]:
        """Yield the `httpx.Response`, whose body is read within the `with` block by `iter_raw`.

        Raises TimeoutError if the block does not end within the limit, httpx.HTTPError and
        httpx.InvalidURL if there is no answer.
        """
        import httpx

        request = httpx.Request(
            method,
            url,
            content=content,
            headers={**self._headers, **headers},
            extensions={
                "timeout": dict.fromkeys(("connect", "read", "write", "pool"), self._limit_s),
                "trace": self._trace,
            },
        )
        number, end = next(self._numbers), time.monotonic() + self._limit_s
        self._ends[number] = end
        try:
            with contextlib.closing(self._transport.handle_request(request)) as response:
                yield response
        except httpx.TransportError as error:
            if self._has_cut or isinstance(error, httpx.TimeoutException):
                raise self._slow() from error
            raise
        finally:
            del self._ends[number]
        if time.monotonic() > end:  # a body that was cut may look whole
            raise self._slow()

    def close(self) -> None:
        """Close the connections."""
        self._closed.set()
        self._transport.close()

    def _slow(self) -> TimeoutError:
        return TimeoutError(f"no whole answer came within {self._limit_s:g} s")

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Store each new connection. Called by the extension `trace` of httpx."""
        if event.endswith(_STREAMS):
            self._streams.add(info["return_value"])

    def _watch(self) -> None:
        while not self._closed.wait(_WATCH_S):
            if any(end < time.monotonic() for end in list(self._ends.values())):
                self._has_cut = True
                for stream in list(self._streams):
                    with contextlib.suppress(OSError):
                        stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
