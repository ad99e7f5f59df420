"""Readiness: what a delivery would meet, over real HTTP, on real disks and databases."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gate.deploy.deploy import deploy
from gate.deploy.store import ModelStore
from gate.errors import RegistryUnavailable
from gate.ledger import entry
from gate.ledger.entry import LedgerEntry
from gate.ledger.ledger import Ledger
from gate.mlflow_client.connection import reach
from gate.service import app
from gate.service.app import ReadinessCheck, RegistryContact
from gate.service.inbox import Inbox
from tests.deploy import models
from tests.ledger.rows import lines, put, put_lines, replace, rows
from tests.service.deliveries import Service, body, running, settings, until
from tests.service.places import fill

SOON_S = 10.0
"""Within which an operator has an answer, whatever hangs: on a busy machine, too."""


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patient: what does not hang answers, on a busy machine, too."""
    monkeypatch.setattr(app, "_FRESH_S", 0.0)
    monkeypatch.setattr(app, "_PATIENCE_S", SOON_S / 2)


@pytest.fixture
def _hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_PATIENCE_S", 0.5)


@contextmanager
def ready(folder: Path, **given: Any) -> Iterator[Service]:
    """A service that was ready."""
    with running(settings(folder, **given)) as service:
        until(lambda: service.get("/readyz").status_code == 200)
        yield service


def troubles(service: Service) -> dict[str, str]:
    """What `/readyz` says is wrong, soon; the process is alive all the while."""
    start = time.monotonic()
    answer = service.get("/readyz")
    assert time.monotonic() - start < SOON_S
    states: dict[str, Any] = answer.json()
    good = states.pop("ready")
    found = {name: state for name, state in states.items() if state != "ok"}
    assert (answer.status_code, good) == ((503, False) if found else (200, True))
    assert service.get("/healthz").json() == {"status": "alive"}
    return found


def test_a_full_disk_under_the_inbox(tmp_path: Path, disk: Path) -> None:
    with ready(tmp_path, state=f"sqlite:///{disk}/state.db") as service:
        fill(disk)
        until(lambda: service.send(body()).status_code == 503)
        assert troubles(service) == {"inbox": "can't be written"}
        (disk / "rest").unlink()
        assert troubles(service) == {}
        assert service.send(body()).status_code == 202


def test_an_inbox_whose_file_was_removed(tmp_path: Path) -> None:
    """A delivery that went into a file without a name would be lost with the process."""
    path = tmp_path / "state.db"
    with ready(tmp_path) as service:
        path.rename(tmp_path / "kept")
        for _ in range(2):
            assert troubles(service) == {"inbox": "can't be written"}
            assert service.send(body()).status_code == 503
        assert not path.exists()
        (tmp_path / "kept").rename(path)
        assert troubles(service) == {}
        assert service.send(body(), delivery="d-1").status_code == 202
        until(lambda: service.recorder.causes == ["delivery d-1"])


def test_an_inbox_in_whose_place_another_file_was_put(tmp_path: Path) -> None:
    path, made = tmp_path / "state.db", tmp_path / "made" / "state.db"
    with ready(tmp_path) as service:
        path.unlink()
        path.touch()
        assert troubles(service) == {"inbox": "can't be written"}
        assert service.send(body()).status_code == 503
        Inbox(f"sqlite:///{made}").close()
        made.replace(path)
        assert troubles(service) == {}
        assert service.send(body(), delivery="d-1").status_code == 202
        until(lambda: service.recorder.causes == ["delivery d-1"])
    with ready(tmp_path) as service:
        assert service.send(body(), delivery="d-1").json() == {"outcome": "seen"}


@pytest.mark.usefixtures("_hangs")
def test_an_inbox_that_another_holds_locked(tmp_path: Path) -> None:
    with ready(tmp_path) as service:
        other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        for _ in range(3):
            assert "has not answered for" in troubles(service)["inbox"]
        other.execute("ROLLBACK")
        other.close()
        until(lambda: troubles(service) == {})


def removed_line(path: Path) -> None:
    put(path, rows(path)[1:])


def edited_line(path: Path) -> None:
    replace(path, b"the first", b"the worst")


def no_json(path: Path) -> None:
    put_lines(path, [b"{", *lines(path)])


def deep(path: Path) -> None:
    put_lines(path, [b"[" * 200_000])


def no_database(path: Path) -> None:
    path.write_bytes(b"no database, but text" * 100)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


SPOILED = {
    removed_line: "is broken",
    edited_line: "is broken",
    no_json: "is broken",
    deep: "is broken",
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_ledger_by_which_nothing_can_be_decided(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], None],
) -> None:
    monkeypatch.setattr(entry, "_REHASH_S", -1.0)  # older lines are hashed again from time to time
    ledger = Ledger(tmp_path / "state.db")
    for reason in ("the first", "the second"):
        line = LedgerEntry(action="conflict", registry="r", model="digits", reason=reason)
        ledger.append(line)
    with ready(tmp_path) as service:
        spoil(Path(ledger.place))
        assert troubles(service) == {"ledger": SPOILED[spoil]}
        assert service.send(body()).status_code == 202  # it is kept until the ledger is mended
    assert ledger.place in caplog.text


@pytest.mark.parametrize("spoil", [no_database, a_folder])
def test_a_file_that_is_no_database_any_more(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """The inbox lies in it, too."""
    path = tmp_path / "state.db"
    Ledger(path).append(
        LedgerEntry(action="conflict", registry="r", model="digits", reason="the first")
    )
    with ready(tmp_path) as service:
        spoil(path)
        assert troubles(service)["ledger"] == "can't be read"
        if spoil is a_folder:  # a connection to the other one is open, and writes beside it
            assert troubles(service)["inbox"] == "can't be written"
            assert service.send(body()).status_code == 503


def test_a_store_that_is_not_whole(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store")
    source = models.source(tmp_path)
    deploy(store, "digits", {"exact": source})
    with ready(tmp_path) as service:
        (store.live_link("digits") / "manifest.json").unlink()
        assert troubles(service) == {"store": "is damaged"}
        deploy(store, "digits", {"exact": source})
        assert troubles(service) == {}


def test_the_last_answer_of_the_registry_counts_for_ten_seconds() -> None:
    now, up = 100.0, False

    def reach() -> None:
        if not up:
            raise RegistryUnavailable("no answer")

    contact = RegistryContact(reach, clock=lambda: now)
    assert contact.trouble() == "does not answer"
    up = True
    assert contact.trouble() is None
    up, now = False, 110.0
    assert contact.trouble() is None
    now = 110.1
    assert contact.trouble() == "has not answered for 10 s"
    up = True
    assert contact.trouble() is None


def test_a_registry_that_stops_answering(tmp_path: Path) -> None:
    with ready(tmp_path) as service:
        service.parts.contact._reach = lambda: reach("http://127.0.0.1:1")
        service.parts.contact._since = -math.inf
        assert troubles(service) == {"registry": "does not answer"}


def test_the_probe_leaves_nothing_behind(database: str) -> None:
    inbox = Inbox(database)
    for _ in range(3):
        inbox.probe()
    with inbox._reading() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM gate_inbox").scalar() == 0
    inbox.close()


@pytest.mark.usefixtures("_hangs")
def test_one_try_at_a_time_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun = threading.Event(), []

    def attempt() -> str | None:
        begun.append(threading.current_thread())
        go_on.wait(10)
        return None

    async def ask() -> None:
        need = ReadinessCheck(attempt)
        answers = await asyncio.gather(*(need.trouble() for _ in range(200)))
        assert len(begun) == 1
        assert all(answer is not None and "has not answered" in answer for answer in answers)
        go_on.set()
        while await need.trouble() is not None:
            await asyncio.sleep(0.01)

    asyncio.run(ask())


def test_an_answer_counts_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_FRESH_S", 0.2)
    answers = iter(["one", "two"])

    async def ask() -> None:
        need = ReadinessCheck(lambda: next(answers))
        assert [await need.trouble() for _ in range(50)] == ["one"] * 50
        await asyncio.sleep(0.25)
        assert await need.trouble() == "two"

    asyncio.run(ask())
