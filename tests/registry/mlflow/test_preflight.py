from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gate.errors import RegistryDenied, RegistryError, RegistryUnavailable
from gate.mlflow_client import connection
from gate.mlflow_client.connection import check_server
from tests import plain_http


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
def test_http_error_status_is_reported(status: int, error: type[Exception]) -> None:
    with (
        plain_http.serve_answers(lambda _path: (status, b"")) as uri,
        pytest.raises(error, match=r"127\.0\.0\.1"),
    ):
        check_server(uri)


def test_error_does_not_repeat_credentials() -> None:
    with pytest.raises(RegistryUnavailable) as caught:
        check_server("http://ann:secret@127.0.0.1:9")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("uri", ["mlruns", "file:///srv/mlruns", "sqlite://", "sqlite:///:memory:"])
def test_uri_without_a_registry_is_refused(uri: str) -> None:
    with pytest.raises(RegistryError, match=r"database|file"):
        check_server(uri)
