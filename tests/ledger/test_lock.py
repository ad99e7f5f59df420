"""The ledger lock is a lease: a dead owner is replaced, and an owner that lost it cannot write."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
import sqlalchemy as sa

from gate.errors import PromotionConflict, StateUnavailable
from gate.ledger import lock
from gate.ledger.database import LOCKS
from gate.ledger.entry import LedgerEntry
from gate.ledger.ledger import Ledger, promotion_lock
from gate.ledger.lock import LockOwner
from tests.ledger.rows import holders, pending_moves
from tests.service.postgres import MISSING, Postgres, find_program, run_postgres


def entry(reason: str, *, operation: str | None = None) -> LedgerEntry:
    return LedgerEntry(
        action="promoted", registry="here", model="digits", reason=reason, version="1",
        operation=operation,
    )  # fmt: skip


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    _shorten_lease(monkeypatch.setattr)


def _shorten_lease(set_value: Callable[[object, str, float], None]) -> None:
    set_value(lock, "LEASE_S", 0.5)


def change_row(ledger: Ledger, **values: object) -> None:
    """Change the lock row as another process would."""
    with ledger.state.writing() as connection:
        assert connection.execute(sa.update(LOCKS).values(**values)).rowcount == 1


def reasons(ledger: Ledger) -> list[str]:
    return [line.reason for line in Ledger(ledger.state).entries()]


def _hold_lock(url: str, pipe: Connection, *, short_lease: bool) -> None:
    """Take the lock and begin a move; try to write after a message of the parent."""
    if short_lease:
        _shorten_lease(setattr)
    ledger = Ledger(url)
    with promotion_lock(ledger) as token:
        ledger.append(entry("of the child", operation="ab"))
        pipe.send("held")
        pipe.recv()
        for write in (
            lambda: ledger.append(entry("late")),
            lambda: ledger.append(entry("late, too", operation="cd")),
            lambda: token.clear_pending("ab"),
        ):
            try:
                write()
                pipe.send("written")
            except PromotionConflict as error:
                pipe.send(str(error))


@contextmanager
def run_lock_owner(url: str, *, short_lease: bool = False) -> Iterator[tuple[int, Connection]]:
    """Run another process that holds the lock."""
    context = multiprocessing.get_context("spawn")
    parent_pipe, child_pipe = context.Pipe()
    process = context.Process(
        target=_hold_lock, args=(url, child_pipe), kwargs={"short_lease": short_lease}
    )
    process.start()
    try:
        assert parent_pipe.poll(30)
        assert parent_pipe.recv() == "held"
        assert process.pid is not None
        yield process.pid, parent_pipe
    finally:
        process.kill()
        process.join()
        parent_pipe.close()
        child_pipe.close()


@pytest.mark.rows(2)
def test_lock_of_a_killed_process_is_taken_over_immediately(database_url: str) -> None:
    ledger = Ledger(database_url)
    with run_lock_owner(database_url) as (pid, _):
        with pytest.raises(PromotionConflict, match=f"process {pid} on "):
            promotion_lock(ledger).__enter__()
        os.kill(pid, signal.SIGKILL)  # a zombie counts as dead
        with promotion_lock(ledger, timeout_s=5.0) as token:
            assert token.pending() == ("ab",)  # the pending move of the killed process


@pytest.mark.rows(2)
@pytest.mark.usefixtures("short_lease")
def test_stopped_process_cannot_write_after_its_lease_expired(database_url: str) -> None:
    ledger = Ledger(database_url)
    with run_lock_owner(database_url, short_lease=True) as (pid, pipe):
        os.kill(pid, signal.SIGSTOP)
        with promotion_lock(ledger, timeout_s=10.0) as token:
            ledger.append(entry("ours", operation="ours"))
            os.kill(pid, signal.SIGCONT)
            pipe.send("go on")
            replies = [pipe.recv() for _ in range(3)]
            assert ["was lost" in reply for reply in replies] == [True] * 3
            assert token.pending() == ("ab", "ours")
        assert reasons(ledger) == ["of the child", "ours"]


class Clock:
    """A database clock that only the test advances, independent of the load of the machine."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self, _: sa.Connection) -> sa.ColumnElement[float]:
        return sa.literal(self.now, sa.Float)


def wait_until_renewed(ledger: Ledger, clock: Clock) -> None:
    """Wait until the owner has renewed its lease to the full length."""
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        with ledger.state.reading() as connection:
            until = connection.execute(sa.select(LOCKS.c.leased_until)).scalar_one()
        if until == pytest.approx(clock.now + lock.LEASE_S, abs=1e-3):
            return
        time.sleep(0.01)
    pytest.fail("the holder did not renew its lease")


@pytest.mark.usefixtures("short_lease")
def test_lease_is_renewed_while_the_owner_works(
    database_ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(lock, "_clock", clock)
    with promotion_lock(database_ledger):
        for _ in range(3):
            clock.now += 0.9 * lock.LEASE_S
            wait_until_renewed(database_ledger, clock)
        with pytest.raises(PromotionConflict):
            promotion_lock(Ledger(database_ledger.state), timeout_s=0.0).__enter__()
        database_ledger.append(entry("ours"))
    assert reasons(database_ledger) == ["ours"]
    assert holders(database_ledger.state) == {}


class TestAnotherHost:
    """An owner on another host, whose processes cannot be checked."""

    def take_over(self, ledger: Ledger, **values: object) -> None:
        owner = LockOwner(pid=1, host="elsewhere", since="2026-01-01", machine="another", start="1")
        change_row(ledger, token="theirs", holder=owner.to_json(), **values)

    def test_lease_of_another_host_is_respected(self, database_ledger: Ledger) -> None:
        with promotion_lock(database_ledger):
            self.take_over(database_ledger)
            with pytest.raises(PromotionConflict, match="process 1 on elsewhere since 2026"):
                promotion_lock(Ledger(database_ledger.state)).__enter__()
        assert list(holders(database_ledger.state)) == ["promotion"]  # our lock was lost

    def test_expired_lease_of_another_host_is_taken_over(self, database_ledger: Ledger) -> None:
        with promotion_lock(database_ledger):
            self.take_over(database_ledger, leased_until=time.time() - 1.0)
            with promotion_lock(Ledger(database_ledger.state)):
                with pytest.raises(PromotionConflict, match="was lost"):
                    database_ledger.append(entry("late"))
                assert "elsewhere" not in holders(database_ledger.state)["promotion"]

    @pytest.mark.parametrize("text", ["{", '{"pid": 1}', ""])
    def test_unreadable_owner_is_reported_as_unknown(
        self, database_ledger: Ledger, text: str
    ) -> None:
        with promotion_lock(database_ledger):
            change_row(database_ledger, token="theirs", holder=text)
            with pytest.raises(PromotionConflict, match="an unknown host"):
                promotion_lock(Ledger(database_ledger.state)).__enter__()


def test_owner_that_lost_the_lock_cannot_write(database_ledger: Ledger) -> None:
    with promotion_lock(database_ledger) as token:
        database_ledger.append(entry("one", operation="ab"))
        change_row(database_ledger, token="theirs")
        for write in (
            lambda: database_ledger.append(entry("two")), lambda: token.clear_pending("ab"), token.pending,
            lambda: database_ledger.append(entry("three", operation="cd")), token.renew,
        ):  # fmt: skip
            with pytest.raises(PromotionConflict, match="was lost"):
                write()
        assert pending_moves(database_ledger.state) == "ab"
    assert reasons(database_ledger) == ["one"]
    database_ledger.append(entry("without any lock"))
    assert reasons(database_ledger) == ["one", "without any lock"]


def test_lock_row_stays_while_a_move_is_pending(database_ledger: Ledger) -> None:
    with promotion_lock(database_ledger):
        database_ledger.append(entry("one", operation="ab"))
    with promotion_lock(database_ledger) as token:
        assert token.pending() == ("ab",)
        database_ledger.append(entry("two", operation="cd"))
        token.clear_pending("ab")
        assert token.pending() == ("cd",)
        token.clear_pending("cd")
    assert holders(database_ledger.state) == {}


def test_lease_longer_than_possible_is_ignored(database_ledger: Ledger) -> None:
    with promotion_lock(database_ledger):
        change_row(database_ledger, leased_until=time.time() + 3600.0)
        with (
            promotion_lock(Ledger(database_ledger.state)),
            pytest.raises(PromotionConflict, match="was lost"),
        ):
            database_ledger.append(entry("late"))


def test_expired_lease_that_nobody_took_is_still_valid(database_ledger: Ledger) -> None:
    with promotion_lock(database_ledger):
        change_row(database_ledger, leased_until=0.0)
        database_ledger.append(entry("one"))
        with pytest.raises(PromotionConflict):
            promotion_lock(Ledger(database_ledger.state)).__enter__()
    assert reasons(database_ledger) == ["one"]


def test_unused_ledger_releases_its_database(database_url: str) -> None:
    """Release at once, because connections to a server are limited."""
    ledger = Ledger(database_url)
    ledger.append(entry("one"))
    with promotion_lock(ledger) as token:
        token.pending()
    del token
    state = weakref.ref(ledger.state)
    gc.disable()
    try:
        del ledger
        assert state() is None
    finally:
        gc.enable()


class TestLockOwner:
    def test_missing_and_reused_process_ids_are_dead(self) -> None:
        me = LockOwner.this_process(since="now")
        assert not me.is_dead()
        assert me.start is not None
        assert me.model_copy(update={"start": "1"}).is_dead()
        assert me.model_copy(update={"pid": 2**22 + 1}).is_dead()

    @pytest.mark.parametrize("machine", [None, "another"])
    def test_process_of_another_machine_is_not_assumed_dead(self, machine: str | None) -> None:
        me = LockOwner.this_process(since="now")
        assert not me.model_copy(update={"pid": 2**22 + 1, "machine": machine}).is_dead()

    def test_process_is_not_assumed_dead_without_proc(self, monkeypatch, tmp_path) -> None:
        monkeypatch.setattr("gate.ledger.lock._PROC", tmp_path)
        assert not LockOwner.this_process(since="now").is_dead()


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """A separate server, whose recovery after a power cut does not replay the other tests."""
    if find_program("initdb") is None:
        pytest.skip(MISSING)
    with run_postgres() as started:
        yield started


class TestPostgresqlRestart:
    """PostgreSQL stops during an operation, as in a power cut."""

    @pytest.fixture
    def ledger(self, server: Postgres) -> Ledger:
        return Ledger(server.url)

    @pytest.mark.proof
    def test_restart_during_an_append(
        self, ledger: Ledger, server: Postgres, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def restart_server(*_: object) -> None:
            server.restart()

        before = reasons(ledger)
        with promotion_lock(ledger):
            ledger.append(entry("one"))
            with monkeypatch.context() as patched:
                patched.setattr("gate.ledger.ledger.sign", restart_server)
                with pytest.raises(StateUnavailable, match="can't be used now"):
                    ledger.append(entry("two"))
            assert reasons(ledger) == [*before, "one"]
            ledger.append(entry("two"))  # the lock is in the database and still valid
            with pytest.raises(PromotionConflict):
                promotion_lock(Ledger(ledger.state)).__enter__()
        assert reasons(ledger) == [*before, "one", "two"]
        assert holders(ledger.state) == {}

    @pytest.mark.proof
    def test_outage_longer_than_the_lease(
        self, ledger: Ledger, server: Postgres, caplog: pytest.LogCaptureFixture
    ) -> None:
        ledger.append(entry("one"))
        before = reasons(ledger)
        with promotion_lock(ledger):
            server.stop()
            with pytest.raises(StateUnavailable):
                ledger.append(entry("two"))
            server.start()
            change_row(ledger, token="theirs")
            with pytest.raises(PromotionConflict, match="was lost"):
                ledger.append(entry("two"))
            server.stop()
        assert "stays held for up to 15 s" in caplog.text
        with pytest.raises(StateUnavailable):
            promotion_lock(ledger).__enter__()
        server.start()
        assert reasons(ledger) == before
