from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from gate.errors import RegistryDenied, RegistryError, RegistryUnavailable
from gate.mlflow_client import connection
from gate.mlflow_client.connection import check_server


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_closed_port_is_unavailable() -> None:
    with pytest.raises(RegistryUnavailable, match=r"127\.0\.0\.1:9.*make ui"):
        check_server("http://127.0.0.1:9")


def test_server_that_never_answers_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(RegistryUnavailable, match="unset MLFLOW_TRACKING_URI"):
            check_server(f"http://127.0.0.1:{port}")


@pytest.fixture
def status_server() -> Iterator[Any]:
    """A server that answers every request with the same status."""

    class Handler(BaseHTTPRequestHandler):
        status = 200

        def do_GET(self) -> None:
            self.send_response(self.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", Handler
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (404, RegistryUnavailable),
        (500, RegistryUnavailable),
        (503, RegistryUnavailable),
        (401, RegistryDenied),
        (403, RegistryDenied),
    ],
)
def test_http_error_status_is_reported(
    status_server: Any, status: int, error: type[Exception]
) -> None:
    uri, handler = status_server
    handler.status = status
    with pytest.raises(error, match=r"127\.0\.0\.1"):
        check_server(uri)


def test_error_does_not_repeat_credentials() -> None:
    with pytest.raises(RegistryUnavailable) as caught:
        check_server("http://ann:secret@127.0.0.1:9")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("uri", ["mlruns", "file:///srv/mlruns", "sqlite://", "sqlite:///:memory:"])
def test_uri_without_a_registry_is_refused(uri: str) -> None:
    with pytest.raises(RegistryError, match=r"database|file"):
        check_server(uri)
