"""httpx for servers on 127.0.0.1, without TLS, and a server with given answers.

Each client of httpx reads all root certificates, which takes 40 ms of CPU time (httpx 0.28).
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx

_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

get = partial(httpx.get, verify=_NO_CERTIFICATES)
post = partial(httpx.post, verify=_NO_CERTIFICATES)
request = partial(httpx.request, verify=_NO_CERTIFICATES)
client = partial(httpx.Client, verify=_NO_CERTIFICATES)


@contextmanager
def serve_answers(answer: Callable[[str], tuple[int, bytes]]) -> Iterator[str]:
    """Run a server that answers each GET of a path with a status and a body; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path.partition("?")[0])
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
