"""Strangers who connect and say nothing, or not enough, keep nobody else out."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gate.service import service as made
from gate.service.service import Connection
from tests.service.deliveries import Service, body, headers, running, settings, until

LIMIT = 20
IDLE = 40


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(made, "_CONNECTIONS", LIMIT)
    with running(settings(tmp_path)) as started:
        yield started


@contextlib.contextmanager
def connected(service: Service, count: int, *, say: bytes = b"") -> Iterator[list[socket.socket]]:
    host, port = service.address.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            opened.append(stack.enter_context(socket.create_connection((host, int(port)))))
            with contextlib.suppress(OSError):
                opened[-1].sendall(say)
        yield opened


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@pytest.mark.parametrize("say", [b"", b"POST /webhooks/mlflow HTTP/1.1\r\nHost: x\r\n"])
def test_silent_connections_keep_no_delivery_out(small: Service, say: bytes) -> None:
    with connected(small, IDLE, say=say):
        for number in range(5):
            assert small.send(body(), delivery=f"d-{number}").status_code == 202


def test_a_silent_connection_is_closed(small: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "head_timeout_s", 0.3)
    with connected(small, 3) as silent, connected(small, 3, say=b"GET /heal") as slow:
        until(lambda: all(is_closed(one) for one in (*silent, *slow)), seconds=10)


def test_dribbling_wins_no_time(small: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "head_timeout_s", 0.5)
    begun = time.monotonic()
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: "
    with connected(small, 1, say=head) as (one,), contextlib.suppress(OSError):
        while time.monotonic() - begun < 10:
            one.sendall(b"x")
            time.sleep(0.05)
    assert time.monotonic() - begun < 5


def test_after_an_answer_the_next_head_has_its_time(
    small: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "head_timeout_s", 0.5)
    asked = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    with connected(small, 1, say=asked) as (one,):
        assert b"200 OK" in one.recv(1 << 16)
        one.sendall(b"GET /heal")
        until(lambda: is_closed(one), seconds=4)  # before uvicorn's five seconds


def test_a_request_may_take_longer_than_its_head(
    small: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "head_timeout_s", 0.3)
    head = b"POST /webhooks/mlflow HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with httpx.Client() as client:
        for _ in range(3):
            assert client.get(small.address + "/healthz").status_code == 200
    with connected(small, 1, say=head + b"Content-Length: 2\r\n\r\n") as (one,):
        # Refused for its missing signature, but as a request, whatever its body does.
        assert one.recv(1 << 16).startswith(b"HTTP/1.1 4")


def test_when_all_are_busy_more_are_told_so(small: Service) -> None:
    """Connections whose request has begun keep their place."""
    sent = "".join(f"{name}: {value}\r\n" for name, value in headers(b"{}").items())
    head = f"POST /webhooks/mlflow HTTP/1.1\r\nHost: x\r\n{sent}Content-Length: 2\r\n\r\n"
    with connected(small, LIMIT - 1, say=head.encode()) as busy:
        until(lambda: small.get("/healthz").status_code == 503)
        assert not any(is_closed(one) for one in busy)
