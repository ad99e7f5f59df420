"""The ledger lock is a lease in the database: a dead owner is replaced, a late one is stopped."""

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
from tests.ledger.rows import holders, pending_in
from tests.service.postgres import MISSING, Postgres, postgres, program


def entry(reason: str, *, operation: str | None = None) -> LedgerEntry:
    return LedgerEntry(
        action="promoted", registry="here", model="digits", reason=reason, version="1",
        operation=operation,
    )  # fmt: skip


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    _shorten_lease(monkeypatch.setattr)


def _shorten_lease(put: Callable[[object, str, float], None]) -> None:
    for module in (lock, lock):
        put(module, "LEASE_S", 0.5)


def change_row(ledger: Ledger, **values: object) -> None:
    """Of the row, as another process would."""
    with ledger.state.writing() as connection:
        assert connection.execute(sa.update(LOCKS).values(**values)).rowcount == 1


def reasons(ledger: Ledger) -> list[str]:
    return [line.reason for line in Ledger(ledger.state).entries()]


def _hold_lock(url: str, pipe: Connection, *, briefly: bool) -> None:
    """Take the lock, begin a move; then write, and end the move, whenever the parent says so."""
    if briefly:
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
def other_process_holding(url: str, *, briefly: bool = False) -> Iterator[tuple[int, Connection]]:
    """Another process that has the lock."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold_lock, args=(url, theirs), kwargs={"briefly": briefly})
    process.start()
    try:
        assert ours.poll(30)
        assert ours.recv() == "held"
        assert process.pid is not None
        yield process.pid, ours
    finally:
        process.kill()
        process.join()
        ours.close()
        theirs.close()


@pytest.mark.rows(2)
def test_lock_of_a_killed_process_is_taken_over_immediately(both_urls: str) -> None:
    ledger = Ledger(both_urls)
    with other_process_holding(both_urls) as (pid, _):
        with pytest.raises(PromotionConflict, match=f"process {pid} on "):
            promotion_lock(ledger).__enter__()
        os.kill(pid, signal.SIGKILL)  # it is not waited for yet: a zombie is dead, too
        with promotion_lock(ledger, timeout_s=5.0) as token:
            assert token.pending() == ("ab",)  # what it had begun


@pytest.mark.rows(2)
@pytest.mark.usefixtures("short_lease")
def test_stopped_process_cannot_write_after_its_lease_expired(both_urls: str) -> None:
    ledger = Ledger(both_urls)
    with other_process_holding(both_urls, briefly=True) as (pid, pipe):
        os.kill(pid, signal.SIGSTOP)
        with promotion_lock(ledger, timeout_s=10.0) as token:
            ledger.append(entry("ours", operation="ours"))
            os.kill(pid, signal.SIGCONT)
            pipe.send("go on")
            answers = [pipe.recv() for _ in range(3)]
            assert ["was lost" in answer for answer in answers] == [True] * 3
            assert token.pending() == ("ab", "ours")
        assert reasons(ledger) == ["of the child", "ours"]


class Clock:
    """Stands for the database's clock: it goes on when the test says so, however busy the machine."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self, _: sa.Connection) -> sa.ColumnElement[float]:
        return sa.literal(self.now, sa.Float)


def wait_until_renewed(ledger: Ledger, clock: Clock) -> None:
    """Until the holder has the whole lease before it again."""
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
    both: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(lock, "_clock", clock)
    with promotion_lock(both):
        for _ in range(3):
            clock.now += 0.9 * lock.LEASE_S
            wait_until_renewed(both, clock)
        with pytest.raises(PromotionConflict):
            promotion_lock(Ledger(both.state), timeout_s=0.0).__enter__()
        both.append(entry("ours"))
    assert reasons(both) == ["ours"]
    assert holders(both.state) == {}


class TestAnotherHost:
    """Whose processes nobody here knows of."""

    def held(self, ledger: Ledger, **values: object) -> None:
        owner = LockOwner(pid=1, host="elsewhere", since="2026-01-01", machine="another", start="1")
        change_row(ledger, token="theirs", holder=owner.to_json(), **values)

    def test_lease_of_another_host_is_respected(self, both: Ledger) -> None:
        with promotion_lock(both):
            self.held(both)
            with pytest.raises(PromotionConflict, match="process 1 on elsewhere since 2026"):
                promotion_lock(Ledger(both.state)).__enter__()
        assert list(holders(both.state)) == ["promotion"]  # ours was lost: nothing to free

    def test_expired_lease_of_another_host_is_taken_over(self, both: Ledger) -> None:
        with promotion_lock(both):
            self.held(both, leased_until=time.time() - 1.0)
            with promotion_lock(Ledger(both.state)):
                with pytest.raises(PromotionConflict, match="was lost"):
                    both.append(entry("late"))
                assert "elsewhere" not in holders(both.state)["promotion"]

    @pytest.mark.parametrize("text", ["{", '{"pid": 1}', ""])
    def test_unreadable_owner_is_reported_as_unknown(self, both: Ledger, text: str) -> None:
        with promotion_lock(both):
            change_row(both, token="theirs", holder=text)
            with pytest.raises(PromotionConflict, match="an unknown host"):
                promotion_lock(Ledger(both.state)).__enter__()


def test_owner_that_lost_the_lock_cannot_write(both: Ledger) -> None:
    with promotion_lock(both) as token:
        both.append(entry("one", operation="ab"))
        change_row(both, token="theirs")
        for write in (
            lambda: both.append(entry("two")), lambda: token.clear_pending("ab"), token.pending,
            lambda: both.append(entry("three", operation="cd")), token.renew,
        ):  # fmt: skip
            with pytest.raises(PromotionConflict, match="was lost"):
                write()
        assert pending_in(both.state) == "ab"
    assert reasons(both) == ["one"]
    both.append(entry("without any lock"))
    assert reasons(both) == ["one", "without any lock"]


def test_lock_row_stays_while_a_move_is_pending(both: Ledger) -> None:
    with promotion_lock(both):
        both.append(entry("one", operation="ab"))
    with promotion_lock(both) as token:
        assert token.pending() == ("ab",)
        both.append(entry("two", operation="cd"))
        token.clear_pending("ab")
        assert token.pending() == ("cd",)
        token.clear_pending("cd")
    assert holders(both.state) == {}


def test_lease_longer_than_possible_is_ignored(both: Ledger) -> None:
    with promotion_lock(both):
        change_row(both, leased_until=time.time() + 3600.0)
        with promotion_lock(Ledger(both.state)), pytest.raises(PromotionConflict, match="was lost"):
            both.append(entry("late"))


def test_expired_lease_that_nobody_took_is_still_valid(both: Ledger) -> None:
    with promotion_lock(both):
        change_row(both, leased_until=0.0)
        both.append(entry("one"))
        with pytest.raises(PromotionConflict):
            promotion_lock(Ledger(both.state)).__enter__()
    assert reasons(both) == ["one"]


def test_unused_ledger_releases_its_database(both_urls: str) -> None:
    """At once: connections to a server are few."""
    ledger = Ledger(both_urls)
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
    def test_this_process_is_alive(self) -> None:
        assert not LockOwner.this_process(since="now").is_dead()

    def test_reused_process_id_is_dead(self) -> None:
        me = LockOwner.this_process(since="now")
        assert me.start is not None
        assert me.model_copy(update={"start": "1"}).is_dead()

    def test_missing_process_id_is_dead(self) -> None:
        me = LockOwner.this_process(since="now")
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
    """Of its own: after a power cut it goes through all that others did before."""
    if program("initdb") is None:
        pytest.skip(MISSING)
    with postgres() as started:
        yield started


class TestPostgresqlRestart:
    """PostgreSQL goes away in the middle, as in a power cut."""

    @pytest.fixture
    def ledger(self, server: Postgres) -> Ledger:
        return Ledger(server.url)

    @pytest.mark.proof
    def test_restart_during_an_append(
        self, ledger: Ledger, server: Postgres, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def cut_off(*_: object) -> None:
            server.restart()

        before = reasons(ledger)
        with promotion_lock(ledger):
            ledger.append(entry("one"))
            with monkeypatch.context() as once:
                once.setattr("gate.ledger.ledger.sign", cut_off)
                with pytest.raises(StateUnavailable, match="can't be used now"):
                    ledger.append(entry("two"))
            assert reasons(ledger) == [*before, "one"]
            ledger.append(entry("two"))  # the lock is in the database, and still ours
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
