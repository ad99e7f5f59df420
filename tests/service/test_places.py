"""Downloads have places of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from gate.service.connection import Connection
from tests.service.deliveries import Service, body, running, settings, until
from tests.service.test_connection import GET_MODEL, connected, endless, is_closed

MOST = 4


class Slow:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.going, self.waiting = threading.Event(), 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.waiting += 1
        await anyio.to_thread.run_sync(self.going.wait, 20)
        await PlainTextResponse("a model")(scope, receive, send)


@contextmanager
def serving(folder: Path, app: object) -> Iterator[Service]:
    with running(settings(folder, downloads=MOST), mounts={"/models": app}) as service:
        yield service


def test_more_are_told_to_come_again_and_deliveries_are_taken(tmp_path: Path) -> None:
    slow = Slow()
    with serving(tmp_path, slow) as service, connected(service, MOST, say=GET_MODEL) as first:
        until(lambda: slow.waiting == MOST)
        answer = service.get("/models/x")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert service.send(body()).status_code == 202
        assert service.get("/healthz").status_code == 200
        slow.going.set()
        assert all(b" 200 " in one.recv(1 << 16) for one in first)
        assert service.get("/models/x").status_code == 200


def test_deliveries_need_none_of_the_threads_of_others(tmp_path: Path) -> None:
    """There are forty of them by default."""
    slow = Slow()
    with (
        running(settings(tmp_path), mounts={"/models": slow}) as service,
        connected(service, 50, say=GET_MODEL),
    ):
        until(lambda: slow.waiting == 50)
        begun = time.monotonic()
        assert service.send(body()).status_code == 202
        assert service.get("/metrics").status_code == 200
        assert time.monotonic() - begun < 18  # they are held for twenty
        slow.going.set()


def test_who_does_not_read_makes_room(tmp_path: Path) -> None:
    with serving(tmp_path, endless) as service, connected(service, MOST, say=GET_MODEL) as unread:
        until(lambda: all(one.recv(1) for one in unread))
        with connected(service, 1, say=GET_MODEL) as (early,):
            assert b" 503 " in early.recv(1 << 10)  # they have not been silent for long
        until(lambda: _is_let_in(service))
        until(lambda: sum(map(is_closed, unread)) >= 1)
        assert service.send(body()).status_code == 202


def _is_let_in(service: Service) -> bool:
    time.sleep(0.1)
    with connected(service, 1, say=GET_MODEL) as (late,):
        return b" 200 " in late.recv(1 << 10)


def test_who_reads_keeps_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "stalled_s", lambda _self: 0.9)
    with serving(tmp_path, endless) as service, connected(service, MOST, say=GET_MODEL) as busy:
        until(lambda: all(one.recv(1) for one in busy))
        assert service.get("/models/x").status_code == 503
