"""A proxy in front of an MLflow server that injects faults."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, get_args
from urllib.parse import urlsplit

Fault = Literal[
    "500", "503", "refused", "hang", "slow", "truncated", "page", "flipped", "lost",
]  # fmt: skip
FAULTS: tuple[Fault, ...] = get_args(Fault)
PAGE = b"<!doctype html><html><head><title>Sorry</title></head><body>Back soon.</body></html>"
_FILES = "/mlflow-artifacts/artifacts/"
_FILE_FAULTS: tuple[Fault, ...] = ("flipped", "truncated", "page")
"""Faults of artifact downloads only: a flipped bit in the server's JSON could not be detected."""
_HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "host")
_SLOW_S = 0.1


@dataclass
class Proxy:
    """A proxy that applies `fault` to new requests; None: no fault."""

    upstream: str
    address: str = ""
    fault: Fault | None = None
    spared: int = 0
    """Number of matching requests that pass before the fault begins."""
    requests: int = 0
    """Number of matching requests since the fault was set."""
    cleared: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def inject(self, fault: Fault, *, spared: int = 0) -> Iterator[None]:
        """Inject a fault until the block ends."""
        self.cleared.clear()
        self.fault, self.spared, self.requests = fault, spared, 0
        try:
            yield
        finally:
            self.fault = None
            self.cleared.set()

    def fault_for(self, path: str) -> Fault | None:
        """Return the fault of this request, and count the request."""
        if self.fault is None or (self.fault in _FILE_FAULTS and _FILES not in path):
            return None
        self.requests += 1
        return self.fault if self.requests > self.spared else None


class _Handler(BaseHTTPRequestHandler):
    run_proxy: Proxy
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        """Answer a request of any method."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.proxy.fault_for(self.path)
        self.close_connection = True
        if fault == "refused":
            self._reset()
        elif fault == "hang":
            self.proxy.cleared.wait(30)
            self._reset()
        elif fault in ("500", "503"):
            self._answer(int(fault), {}, b"{}")
        elif fault == "page":
            self._answer(200, {"Content-Type": "text/html"}, PAGE)
        else:
            self._forward(body, fault)

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = answer  # noqa: N815

    def _forward(self, body: bytes, fault: Fault | None) -> None:
        server = urlsplit(self.proxy.upstream)
        assert server.hostname is not None
        connection = http.client.HTTPConnection(server.hostname, server.port, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP}
        connection.request(self.command, self.path, body or None, headers)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if fault == "lost":
            self._reset()
            return
        if fault == "slow":
            self.proxy.cleared.wait(_SLOW_S)
        if fault == "flipped" and data and self.command == "GET":
            index = 7 * self.proxy.requests % len(data)  # each fault flips another position
            data = data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]
        response_headers = {k: v for k, v in answer.getheaders() if k.lower() not in _HOP_BY_HOP}
        self._answer(answer.status, response_headers, data, cut=fault == "truncated")

    def _answer(
        self, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)

    def _reset(self) -> None:
        """Reset the connection, as a host does when no process listens on the port."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error of a disconnected client."""


@contextmanager
def run_proxy(upstream: str) -> Iterator[Proxy]:
    """Run a proxy without faults on 127.0.0.1 in front of the server at `upstream`."""
    created = Proxy(upstream)
    handler = type("Handler", (_Handler,), {"proxy": created})
    server = _Server(("127.0.0.1", 0), handler)
    created.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield created
    finally:
        created.cleared.set()
        server.shutdown()
        server.server_close()
        thread.join()
