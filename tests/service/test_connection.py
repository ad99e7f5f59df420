"""Strangers who connect and say nothing, not enough, or do not listen, keep nobody else out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gate.service.connection import Connection
from gate.service.inbox import Delivery
from gate.service.intake import Intake
from tests.service.deliveries import Service, body, headers, running, settings, until

LIMIT = 20
IDLE = 40


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Service]:
    with running(settings(tmp_path, connections=LIMIT)) as started:
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
        until(lambda: all(is_closed(one) for one in (*silent, *slow)), seconds=30)


def test_dribbling_wins_no_time(small: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "head_timeout_s", 0.5)
    begun = time.monotonic()
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: "
    with connected(small, 1, say=head) as (one,), contextlib.suppress(OSError):
        while time.monotonic() - begun < 10:
            one.sendall(b"x")
            time.sleep(0.05)
    assert time.monotonic() - begun < 9


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


def _begun(*, length: int = 2, **options: Any) -> bytes:
    """A delivery whose body has not come."""
    sent = "".join(f"{name}: {value}\r\n" for name, value in headers(b"{}", **options).items())
    head = f"POST /webhooks/mlflow HTTP/1.1\r\nHost: x\r\n{sent}Content-Length: {length}\r\n\r\n"
    return head.encode()


def test_bodies_that_do_not_come_keep_no_delivery_out(small: Service) -> None:
    with connected(small, IDLE, say=_begun()) as strangers:
        for number in range(5):
            assert small.send(body(), delivery=f"d-{number}").status_code == 202
        until(lambda: sum(map(is_closed, strangers)) >= IDLE - LIMIT)
        # Those that were waited for the longest had to go.
        assert not is_closed(strangers[-1])


def test_a_delivery_that_is_whole_keeps_its_place(
    small: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More are told to come again, which MLflow does."""
    going, receive, whole = threading.Event(), small.parts.inbox.receive, Counter[str]()

    def slow(rows: Sequence[Delivery]) -> list[Literal["new", "seen"]]:
        going.wait(20)
        return receive(rows)

    taken = Intake.receive

    async def counted(intake: Intake, row: Delivery) -> Literal["new", "seen"]:
        whole[row.model] += 1
        return await taken(intake, row)

    monkeypatch.setattr(small.parts.inbox, "receive", slow)
    monkeypatch.setattr(Intake, "receive", counted)
    with ThreadPoolExecutor(LIMIT) as pool:
        sent = [pool.submit(small.send, body(), delivery=f"d-{n}") for n in range(LIMIT)]
        until(lambda: whole.total() == LIMIT)
        assert small.get("/healthz").status_code == 503
        for _ in range(3):
            with connected(small, 1, say=_begun()) as (stranger,):
                assert b" 503 " in stranger.recv(1 << 16)
        going.set()
        assert [one.result().status_code for one in sent] == [202] * LIMIT


async def _zeros() -> AsyncIterator[bytes]:
    while True:
        yield bytes(65536)
        await asyncio.sleep(0)


async def endless(scope: Scope, receive: Receive, send: Send) -> None:
    await StreamingResponse(_zeros())(scope, receive, send)


GET_MODEL = b"GET /models/x HTTP/1.1\r\nHost: x\r\n\r\n"


def test_who_reads_nothing_is_cut_off(tmp_path: Path) -> None:
    chosen = settings(tmp_path, write_timeout_s=0.5)
    with (
        running(chosen, mounts={"/models": endless}) as service,
        connected(service, 3, say=GET_MODEL) as unread,
        connected(service, 1, say=GET_MODEL) as (reader,),
    ):
        begun = time.monotonic()
        while time.monotonic() - begun < 2:  # whoever reads goes on for longer than that
            assert reader.recv(1 << 20)
        for one in unread:
            until(lambda one=one: is_closed(one))
        assert reader.recv(1 << 20)
        reader.close()


@pytest.mark.parametrize(
    ("said", "status"),
    [
        # Refused for its length while its body is on the way, in the middle of it, at its begin.
        (lambda: _begun(length=1 << 20) + b"x" * 10, b" 413 "),  # signed now, not at collection
        (
            lambda: (
                _begun().replace(b"Content-Length: 2", b"Transfer-Encoding: chunked") + b"zz\r\n"
            ),
            b" 400 ",
        ),
        (
            lambda: b"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
            b"",
        ),
        (lambda: b"\x16\x03\x01 no HTTP at all\r\n\r\n", b" 400 "),
        (
            lambda: GET_MODEL.replace(
                b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"
            ),
            b"",
        ),
    ],
)
def test_what_is_no_http_costs_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: Callable[[], bytes], status: bytes
) -> None:
    with running(settings(tmp_path), mounts={"/models": endless}) as service:
        with connected(service, 1, say=said()) as (one,):
            assert status in one.recv(1 << 10)
            with contextlib.suppress(OSError):
                one.sendall(b"no chunk\r\n" * 3)
            until(lambda: is_closed(one))
        assert service.get("/healthz").status_code == 200
    assert "Traceback" not in caplog.text
    assert all(record.exc_info is None for record in caplog.records)
    assert "Fatal error" not in caplog.text
