"""One lock row with lease, fencing token and pending operation."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa

from gate.errors import EvidenceError, PromotionConflict, StateUnavailable
from gate.ledger.database import LOCKS, LONGEST_LEASE_S, StateDatabase
from gate.ledger.database import clock as _clock
from gate.ledger.entry import now
from gate.storage.record import Record

_PROC = Path("/proc")

_STATE, _START = 0, 19
"""Among the fields of /proc/PID/stat that follow the program's name."""


class LockOwner(Record):
    """A process, identified so that a later one of the same machine differs."""

    pid: int
    host: str
    since: str
    """UTC, ISO 8601."""
    machine: str | None = None
    """The kernel's boot ID and the PID namespace, which containers have of their own. None: other
    processes can't find out whether it runs."""
    start: str | None = None
    """When the process was started, in the kernel's ticks."""

    @classmethod
    def this_process(cls, *, since: str) -> Self:
        """The caller's."""
        pid, found = os.getpid(), _stat(os.getpid())
        start = None if found is None else found[_START]
        return cls(pid=pid, host=socket.gethostname(), since=since, machine=_machine(), start=start)

    @classmethod
    def of(cls, text: str) -> Self:
        """Read a stored owner; one that can't be read is an unknown process that may be running."""
        try:
            return cls.from_json(text)
        except EvidenceError:
            return cls(pid=0, host="an unknown host", since="an unknown time")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    def is_dead(self) -> bool:
        """Return whether it certainly is; a process of another machine is not known to be."""
        if self.machine is None or self.machine != _machine():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # the process exists, and belongs to another user
            pass
        found = _stat(self.pid)
        if found is None:
            return False
        return found[_STATE] in ("Z", "X") or self.start not in (None, found[_START])


def _machine() -> str | None:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return None


def _stat(pid: int) -> list[str] | None:
    try:
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


LEASE_S = 15.0
"""After which a lock whose holder does not renew it can be taken."""

_PAUSE_S = 0.05
"""Interval between two attempts while the lock is held."""

NAME = "promotion"


class FencingToken:
    """One ownership of the lock row, from `take` to `free`. All methods raise StateUnavailable.

    The row holds a lease, a token that is new with each owner, and the ids of pending moves. Every
    transaction under the lock compares the token. An owner that was stopped for longer than the
    lease finds another token there, and writes nothing more.

    The token is random and only compared for equality. A counter is needed where the protected
    resource knows only the highest token that it has seen. Here the token is in the database of the
    ledger. The transaction that writes an entry first updates the row WHERE token = ours: it holds
    the row until it ends, or changes no row and is rolled back. No other owner begins in between. A
    counter would begin again when `free` deletes the row or a backup is restored, and a stopped one
    could have the same. MLflow compares no tokens: an alias that a stopped owner moves late is put
    right by that owner or by the next one (`gate.registry.alias`).
    """

    def __init__(self, state: StateDatabase) -> None:
        self._state = state
        self._holder = LockOwner.this_process(since=now())
        self._token = secrets.token_hex(16)  # 128 bits: no two owners ever have the same

    def take(self, *, patience_s: float) -> LockOwner | None:
        """Take the lock; None: it is ours. Else who held it for all of `patience_s`."""
        until = time.monotonic() + patience_s
        while True:
            holder = self._current_owner() or self._try()
            if holder is None or time.monotonic() >= until:
                return holder
            time.sleep(max(0.0, min(_PAUSE_S, until - time.monotonic())))

    def renew(self) -> None:
        """Hold it for another lease. Raises PromotionConflict where it was lost."""
        with self._state.writing() as connection:
            self.renew_in(connection)

    def renew_in(self, connection: sa.Connection) -> None:
        """Renew within a transaction, which has the lock until it ends."""
        self._change(connection, leased_until=_clock(connection) + LEASE_S)

    def pending(self) -> tuple[str, ...]:
        """Return the ids of the moves that are not finished. Raises PromotionConflict where the
        lock was lost."""
        with self._state.reading() as connection:
            return self._pending(connection)

    def add_pending(self, connection: sa.Connection, operation: str) -> None:
        """Keep the id of a move in the transaction that writes its ledger entry."""
        pending = (*self._pending(connection), operation)
        self._change(connection, pending=" ".join(pending))

    def clear_pending(self, operation: str) -> None:
        """Forget a move: it is finished, or never will be. Raises PromotionConflict where the lock
        was lost."""
        with self._state.writing() as connection:
            left = [each for each in self._pending(connection) if each != operation]
            self._change(connection, pending=" ".join(left))

    def free(self) -> None:
        """Let others have it. The row stays while a move is pending."""
        with self._state.writing() as connection:
            connection.execute(sa.delete(LOCKS).where(*self._ours, LOCKS.c.pending == ""))
            connection.execute(sa.update(LOCKS).where(*self._ours).values(leased_until=0.0))

    def _pending(self, connection: sa.Connection) -> tuple[str, ...]:
        text = connection.execute(sa.select(LOCKS.c.pending).where(*self._ours)).scalar()
        if text is None:
            raise self._lost()
        return tuple(text.split())

    def _change(self, connection: sa.Connection, **values: Any) -> None:
        if connection.execute(sa.update(LOCKS).where(*self._ours).values(**values)).rowcount != 1:
            raise self._lost()

    def _lost(self) -> PromotionConflict:
        return PromotionConflict(
            f"the promotion lock in {self._state.place} was lost: this process did not renew it "
            f"for {LEASE_S:.0f} s, and another may go on in its place. gate history shows what was "
            "written. Look at it, then repeat."
        )

    def _current_owner(self) -> LockOwner | None:
        """Return the current owner, without a transaction that others would have to wait for."""
        if not self._state.is_there:
            return None
        with self._state.reading() as connection:
            return _holder(connection) if self._state.has_tables(connection) else None

    def _try(self) -> LockOwner | None:
        with self._state.writing() as connection:
            self._state.make_tables(connection)
            holder = _holder(connection)
            if holder is not None:
                return holder
            values = {
                "token": self._token, "holder": self._holder.to_json(),
                "leased_until": _clock(connection) + LEASE_S,
            }  # fmt: skip
            found = sa.update(LOCKS).where(LOCKS.c.name == NAME).values(**values)
            if connection.execute(found).rowcount == 0:
                connection.execute(sa.insert(LOCKS).values(name=NAME, pending="", **values))
        return None

    @property
    def _ours(self) -> tuple[sa.ColumnElement[bool], ...]:
        return LOCKS.c.name == NAME, LOCKS.c.token == self._token


def _holder(connection: sa.Connection) -> LockOwner | None:
    """Whoever holds the lock by a lease that is not over, and is not known to be dead."""
    time_now = _clock(connection)
    lease = LOCKS.c.leased_until.between(time_now, time_now + LONGEST_LEASE_S)
    text = connection.execute(sa.select(LOCKS.c.holder).where(LOCKS.c.name == NAME, lease)).scalar()
    holder = None if text is None else LockOwner.of(text)
    return None if holder is None or holder.is_dead() else holder


PATIENCE_S = 30.0
"""How long to wait for another promotion, or for the service's reconciliation."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def renewing(lease: FencingToken) -> Iterator[None]:
    """Keep the lease while what is done takes long."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(LEASE_S / 5):
            try:
                lease.renew()
            except PromotionConflict:  # the next write raises it
                return
            except StateUnavailable as error:  # the next one may succeed in time
                _log.warning("the promotion lock can't be renewed now: %s", error)

    thread = threading.Thread(target=renew, name="gate-promotion-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
