"""The lock is a lease in the database: a dead holder is replaced, and one that lost it is stopped."""

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
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    _be_short(monkeypatch.setattr)


def _be_short(put: Callable[[object, str, float], None]) -> None:
    for module in (lock, lock):
        put(module, "LEASE_S", 0.5)


def change(ledger: Ledger, **values: object) -> None:
    """Of the row, as another process would."""
    with ledger.state.writing() as connection:
        assert connection.execute(sa.update(LOCKS).values(**values)).rowcount == 1


def reasons(ledger: Ledger) -> list[str]:
    return [line.reason for line in Ledger(ledger.state).entries()]


def _hold(url: str, pipe: Connection, *, briefly: bool) -> None:
    """Take the lock, begin a move; then write, and end the move, whenever the parent says so."""
    if briefly:
        _be_short(setattr)
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
def holding(url: str, *, briefly: bool = False) -> Iterator[tuple[int, Connection]]:
    """Another process that has the lock."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(url, theirs), kwargs={"briefly": briefly})
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
def test_who_was_killed_is_replaced_at_once(both_urls: str) -> None:
    ledger = Ledger(both_urls)
    with holding(both_urls) as (pid, _):
        with pytest.raises(PromotionConflict, match=f"process {pid} on "):
            promotion_lock(ledger).__enter__()
        os.kill(pid, signal.SIGKILL)  # it is not waited for yet: a zombie is dead, too
        with promotion_lock(ledger, patience_s=5.0) as token:
            assert token.pending() == ("ab",)  # what it had begun


@pytest.mark.rows(2)
@pytest.mark.usefixtures("short")
def test_who_was_stopped_and_comes_back_writes_nothing(both_urls: str) -> None:
    ledger = Ledger(both_urls)
    with holding(both_urls, briefly=True) as (pid, pipe):
        os.kill(pid, signal.SIGSTOP)
        with promotion_lock(ledger, patience_s=10.0) as token:
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


@pytest.mark.usefixtures("short")
def test_who_works_for_longer_than_the_lease_keeps_it(
    both: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(lock, "_clock", clock)
    with promotion_lock(both):
        for _ in range(3):
            clock.now += 0.9 * lock.LEASE_S
            wait_until_renewed(both, clock)
        with pytest.raises(PromotionConflict):
            promotion_lock(Ledger(both.state), patience_s=0.0).__enter__()
        both.append(entry("ours"))
    assert reasons(both) == ["ours"]
    assert holders(both.state) == {}


class TestAnotherHost:
    """Whose processes nobody here knows of."""

    def held(self, ledger: Ledger, **values: object) -> None:
        stranger = LockOwner(
            pid=1, host="elsewhere", since="2026-01-01", machine="another", start="1"
        )
        change(ledger, token="theirs", holder=stranger.to_json(), **values)

    def test_its_lease_is_waited_for(self, both: Ledger) -> None:
        with promotion_lock(both):
            self.held(both)
            with pytest.raises(PromotionConflict, match="process 1 on elsewhere since 2026"):
                promotion_lock(Ledger(both.state)).__enter__()
        assert list(holders(both.state)) == ["promotion"]  # ours was lost: nothing to free

    def test_it_is_replaced_when_that_is_over(self, both: Ledger) -> None:
        with promotion_lock(both):
            self.held(both, leased_until=time.time() - 1.0)
            with promotion_lock(Ledger(both.state)):
                with pytest.raises(PromotionConflict, match="was lost"):
                    both.append(entry("late"))
                assert "elsewhere" not in holders(both.state)["promotion"]

    @pytest.mark.parametrize("text", ["{", '{"pid": 1}', ""])
    def test_one_that_does_not_say_its_name(self, both: Ledger, text: str) -> None:
        with promotion_lock(both):
            change(both, token="theirs", holder=text)
            with pytest.raises(PromotionConflict, match="an unknown host"):
                promotion_lock(Ledger(both.state)).__enter__()


def test_whoever_lost_it_writes_nothing(both: Ledger) -> None:
    with promotion_lock(both) as token:
        both.append(entry("one", operation="ab"))
        change(both, token="theirs")
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


def test_the_row_stays_while_a_move_is_pending(both: Ledger) -> None:
    with promotion_lock(both):
        both.append(entry("one", operation="ab"))
    with promotion_lock(both) as token:
        assert token.pending() == ("ab",)
        both.append(entry("two", operation="cd"))
        token.clear_pending("ab")
        assert token.pending() == ("cd",)
        token.clear_pending("cd")
    assert holders(both.state) == {}


def test_a_lease_from_before_the_clock_was_set_back_does_not_count(both: Ledger) -> None:
    with promotion_lock(both):
        change(both, leased_until=time.time() + 3600.0)
        with promotion_lock(Ledger(both.state)), pytest.raises(PromotionConflict, match="was lost"):
            both.append(entry("late"))


def test_a_lease_that_was_over_and_that_nobody_took_is_still_ours(both: Ledger) -> None:
    with promotion_lock(both):
        change(both, leased_until=0.0)
        both.append(entry("one"))
        with pytest.raises(PromotionConflict):
            promotion_lock(Ledger(both.state)).__enter__()
    assert reasons(both) == ["one"]


def test_a_ledger_that_nobody_uses_any_more_lets_go_of_the_database(both_urls: str) -> None:
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


class TestHolder:
    def test_this_process_lives(self) -> None:
        assert not LockOwner.this_process(since="now").is_dead()

    def test_a_process_that_has_its_number_now_is_another(self) -> None:
        me = LockOwner.this_process(since="now")
        assert me.start is not None
        assert me.model_copy(update={"start": "1"}).is_dead()

    def test_no_process_has_its_number(self) -> None:
        me = LockOwner.this_process(since="now")
        assert me.model_copy(update={"pid": 2**22 + 1}).is_dead()

    @pytest.mark.parametrize("machine", [None, "another"])
    def test_of_another_machine_nobody_knows(self, machine: str | None) -> None:
        me = LockOwner.this_process(since="now")
        assert not me.model_copy(update={"pid": 2**22 + 1, "machine": machine}).is_dead()

    def test_without_proc_nobody_knows(self, monkeypatch, tmp_path) -> None:
        monkeypatch.setattr("gate.ledger.lock._PROC", tmp_path)
        assert not LockOwner.this_process(since="now").is_dead()


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """Of its own: after a power cut it goes through all that others did before."""
    if program("initdb") is None:
        pytest.skip(MISSING)
    with postgres() as started:
        yield started


class TestRestart:
    """PostgreSQL goes away in the middle, as in a power cut."""

    @pytest.fixture
    def ledger(self, server: Postgres) -> Ledger:
        return Ledger(server.url)

    @pytest.mark.proof
    def test_in_a_line(
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
    def test_for_longer_than_the_lease(
        self, ledger: Ledger, server: Postgres, caplog: pytest.LogCaptureFixture
    ) -> None:
        ledger.append(entry("one"))
        before = reasons(ledger)
        with promotion_lock(ledger):
            server.stop()
            with pytest.raises(StateUnavailable):
                ledger.append(entry("two"))
            server.start()
            change(ledger, token="theirs")
            with pytest.raises(PromotionConflict, match="was lost"):
                ledger.append(entry("two"))
            server.stop()
        assert "stays held for up to 15 s" in caplog.text
        with pytest.raises(StateUnavailable):
            promotion_lock(ledger).__enter__()
        server.start()
        assert reasons(ledger) == before
