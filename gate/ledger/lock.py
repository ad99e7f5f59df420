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
from gate.ledger.database import LOCKS, StateDatabase
from gate.ledger.entry import now
from gate.storage.record import Record

_PROC = Path("/proc")

_STATE, _START = 0, 19
"""Indices of the fields of /proc/PID/stat that follow the program's name."""


class LockOwner(Record):
    """A process, identified so that a later process with the same PID differs."""

    pid: int
    host: str
    since: str
    """UTC, ISO 8601."""
    machine: str | None = None
    """The kernel's boot ID and the PID namespace, which differs in each container. None: other
    processes can't determine whether it runs."""
    start: str | None = None
    """Start time of the process, in the kernel's ticks."""

    @classmethod
    def this_process(cls, *, since: str) -> Self:
        """Create the owner for the calling process."""
        pid, fields = os.getpid(), _stat(os.getpid())
        start = None if fields is None else fields[_START]
        return cls(pid=pid, host=socket.gethostname(), since=since, machine=_machine(), start=start)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse a stored owner. One that can't be parsed may be running."""
        try:
            return cls.from_json(text)
        except EvidenceError:
            return cls(pid=0, host="an unknown host", since="an unknown time")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    def is_dead(self) -> bool:
        """Return whether the process has certainly ended. False for one of another machine."""
        if self.machine is None or self.machine != _machine():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # The process exists and belongs to another user.
            pass
        fields = _stat(self.pid)
        if fields is None:
            return False
        return fields[_STATE] in ("Z", "X") or self.start not in (None, fields[_START])


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
"""Duration of a lease. Another process can take a lock that was not renewed for longer."""

_LONGEST_LEASE_S = 60.0
"""Maximum remaining time of a lease. A longer one was written before the clock was set back, and is
ignored."""

_POLL_S = 0.05
"""Interval between two attempts while the lock is held."""

NAME = "promotion"


class FencingToken:
    """One ownership of the lock row. All methods raise StateUnavailable.

    The row holds a lease, a token that is new for each owner, and the IDs of pending moves. Every
    transaction under the lock compares the token. An owner that was suspended for longer than the
    lease finds another token and can't write any more.

    The token is random and only compared for equality. A counter would be needed if the protected
    resource could only remember the highest token. Here the token is in the ledger's database: the
    transaction that writes an entry first updates the row WHERE token = ours. It either locks the
    row until it ends, or changes no row and is rolled back. A counter would restart when `release`
    deletes the row or a backup is restored, and could repeat the token of a suspended owner. MLflow
    compares no tokens: an alias that a suspended owner moves late is corrected by that owner or by
    the next one (`gate.registry.alias`).
    """

    def __init__(self, state: StateDatabase) -> None:
        self._state = state
        self._holder = LockOwner.this_process(since=now())
        self._token = secrets.token_hex(16)

    def acquire(self, *, timeout_s: float) -> LockOwner | None:
        """Acquire the lock; return None, or the process that held it throughout `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            holder = self._current_owner() or self._try_acquire()
            if holder is None or time.monotonic() >= deadline:
                return holder
            time.sleep(max(0.0, min(_POLL_S, deadline - time.monotonic())))

    def renew(self) -> None:
        """Renew the lease. Raises PromotionConflict if the lock was lost."""
        with self._state.writing() as connection:
            self.renew_in(connection)

    def renew_in(self, connection: sa.Connection) -> None:
        """Renew the lease in a transaction, which holds the lock until it ends."""
        self._change(connection, leased_until=_clock(connection) + LEASE_S)

    def pending(self) -> tuple[str, ...]:
        """Return the IDs of pending moves. Raises PromotionConflict if the lock was lost."""
        with self._state.reading() as connection:
            return self._pending(connection)

    def add_pending(self, connection: sa.Connection, operation: str) -> None:
        """Store the ID of a move, in the transaction that writes its ledger entry."""
        pending = (*self._pending(connection), operation)
        self._change(connection, pending=" ".join(pending))

    def clear_pending(self, operation: str) -> None:
        """Remove the ID of a move that is finished or abandoned. Raises PromotionConflict if the
        lock was lost."""
        with self._state.writing() as connection:
            remaining = [each for each in self._pending(connection) if each != operation]
            self._change(connection, pending=" ".join(remaining))

    def release(self) -> None:
        """Release the lock. The row stays while a move is pending."""
        with self._state.writing() as connection:
            connection.execute(sa.delete(LOCKS).where(*self._owned, LOCKS.c.pending == ""))
            connection.execute(sa.update(LOCKS).where(*self._owned).values(leased_until=0.0))

    def _pending(self, connection: sa.Connection) -> tuple[str, ...]:
        text = connection.execute(sa.select(LOCKS.c.pending).where(*self._owned)).scalar()
        if text is None:
            raise self._lost()
        return tuple(text.split())

    def _change(self, connection: sa.Connection, **values: Any) -> None:
        update = sa.update(LOCKS).where(*self._owned).values(**values)
        if connection.execute(update).rowcount != 1:
            raise self._lost()

    def _lost(self) -> PromotionConflict:
        return PromotionConflict(
            f"the promotion lock in {self._state.location} was lost: this process did not renew it "
            f"for {LEASE_S:.0f} s, so another process may have taken it. Check what was written "
            "(gate history), then retry."
        )

    def _current_owner(self) -> LockOwner | None:
        """Return the current owner. Reads only, so that other processes need not wait."""
        if not self._state.exists:
            return None
        with self._state.reading() as connection:
            return _holder(connection) if self._state.has_tables(connection) else None

    def _try_acquire(self) -> LockOwner | None:
        with self._state.writing() as connection:
            self._state.make_tables(connection)
            holder = _holder(connection)
            if holder is not None:
                return holder
            values = {
                "token": self._token, "holder": self._holder.to_json(),
                "leased_until": _clock(connection) + LEASE_S,
            }  # fmt: skip
            update = sa.update(LOCKS).where(LOCKS.c.name == NAME).values(**values)
            if connection.execute(update).rowcount == 0:
                connection.execute(sa.insert(LOCKS).values(name=NAME, pending="", **values))
        return None

    @property
    def _owned(self) -> tuple[sa.ColumnElement[bool], ...]:
        return LOCKS.c.name == NAME, LOCKS.c.token == self._token


def _clock(connection: sa.Connection) -> Any:
    """Return the SQL expression for the database's time, in seconds since the epoch."""
    if connection.dialect.name == "sqlite":
        return (sa.func.julianday("now") - 2440587.5) * 86400.0
    return sa.func.extract("epoch", sa.func.clock_timestamp())


def _holder(connection: sa.Connection) -> LockOwner | None:
    """Return the owner of the lock, unless its lease has expired or its process has ended."""
    time_now = _clock(connection)
    lease = LOCKS.c.leased_until.between(time_now, time_now + _LONGEST_LEASE_S)
    text = connection.execute(sa.select(LOCKS.c.holder).where(LOCKS.c.name == NAME, lease)).scalar()
    holder = None if text is None else LockOwner.from_text(text)
    return None if holder is None or holder.is_dead() else holder


LOCK_TIMEOUT_S = 30.0
"""Seconds to wait for another promotion or for the service's reconciliation."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def renewing(lease: FencingToken) -> Iterator[None]:
    """Renew the lease in a thread while the context is open."""
    stopped = threading.Event()

    def renew() -> None:
        while not stopped.wait(LEASE_S / 5):
            try:
                lease.renew()
            except PromotionConflict:  # The next write under the lock raises it, too.
                return
            except StateUnavailable as error:  # The next attempt may succeed in time.
                _log.warning("the promotion lock can't be renewed now: %s", error)

    thread = threading.Thread(target=renew, name="gate-promotion-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
