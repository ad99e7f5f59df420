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
from gate.ledger import database
from gate.ledger.database import LOCKS, StateDatabase
from gate.ledger.entry import now
from gate.storage.record import Record

_PROC = Path("/proc")

_STATE, _START = 0, 19
"""Among the fields of /proc/PID/stat that follow the program's name."""


class LockOwner(Record):
    """A process, so that another one of the same machine can tell it from a later one."""

    pid: int
    host: str
    since: str
    """UTC, ISO 8601."""
    machine: str | None = None
    """The kernel's boot and the numbering of processes, which containers have of their own; None:
    nobody else can tell whether it lives."""
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
        """Read what was kept; of what can't be read nobody knows who it is, or whether it lives."""
        try:
            return cls.from_json(text)
        except EvidenceError:
            return cls(pid=0, host="a host that does not say its name", since="nobody knows when")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    def is_dead(self) -> bool:
        """Whether it certainly is; a process of another machine is not known to be."""
        if self.machine is None or self.machine != _machine():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # it is somebody else's
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


# Law: of two transactions that hold one lock (`renew_in`), the later one is of whoever took it
# last. Who was stopped for longer than the lease finds it taken, and writes nothing more.


LEASE_S = 15.0
"""After which a lock whose holder does not renew it can be taken."""

_PAUSE_S = 0.05
"""Between two looks at a lock that is held."""


class FencingToken:
    """One holding of a lock, from `take` to `free`. All methods raise StateUnavailable."""

    def __init__(self, state: StateDatabase, *, name: str) -> None:
        self._state = state
        self._name = name
        self._holder = LockOwner.this_process(since=now())
        self._token = secrets.token_hex(16)

    def take(self, *, patience_s: float) -> LockOwner | None:
        """Take the lock; None: it is ours. Else who held it for all of `patience_s`."""
        until = time.monotonic() + patience_s
        while True:
            holder = self._look()
            if holder is None:
                holder = self._try()
            if holder is None or time.monotonic() >= until:
                return holder
            time.sleep(max(0.0, min(_PAUSE_S, until - time.monotonic())))

    def renew(self) -> None:
        """Hold it for another lease. Raises PromotionConflict where it was lost."""
        with self._state.writing() as connection:
            self.renew_in(connection)

    def renew_in(self, connection: sa.Connection) -> None:
        """The same within a transaction, which has the lock until it ends: nobody takes it
        meanwhile."""
        longer = (
            sa.update(LOCKS).where(*self._ours).values(leased_until=_clock(connection) + LEASE_S)
        )
        if connection.execute(longer).rowcount != 1:
            raise PromotionConflict(
                f"the promotion lock in {self._state.place} was lost: this process did not renew "
                f"it for {LEASE_S:.0f} s, and another may go on in its place. Nothing was "
                "written. Repeat."
            )

    def free(self) -> None:
        """Let others have it."""
        with self._state.writing() as connection:
            connection.execute(sa.delete(LOCKS).where(*self._ours))

    def _look(self) -> LockOwner | None:
        """Who holds it now; without a transaction that others would have to wait for."""
        if not self._state.is_there:
            return None
        with self._state.reading() as connection:
            return _holder(connection, self._name) if database.are_made(connection) else None

    def _try(self) -> LockOwner | None:
        with self._state.writing() as connection:
            database.make(connection)
            holder = _holder(connection, self._name)
            if holder is not None:
                return holder
            connection.execute(sa.delete(LOCKS).where(LOCKS.c.name == self._name))
            row = {
                "name": self._name, "token": self._token, "holder": self._holder.to_json(),
                "leased_until": _clock(connection) + LEASE_S,
            }  # fmt: skip
            connection.execute(sa.insert(LOCKS).values(row))
        return None

    @property
    def _ours(self) -> tuple[sa.ColumnElement[bool], ...]:
        return LOCKS.c.name == self._name, LOCKS.c.token == self._token


def _holder(connection: sa.Connection, name: str) -> LockOwner | None:
    """Whoever holds the lock by a lease that is not over, and is not known to be dead."""
    held = LOCKS.c.name == name, LOCKS.c.leased_until > _clock(connection)
    text = connection.execute(sa.select(LOCKS.c.holder).where(*held)).scalar()
    holder = None if text is None else LockOwner.of(text)
    return None if holder is None or holder.is_dead() else holder


def _clock(connection: sa.Connection) -> Any:
    """Seconds since the epoch, by the database's clock."""
    if connection.dialect.name == "sqlite":
        return (sa.func.julianday("now") - 2440587.5) * 86400.0
    return sa.func.extract("epoch", sa.func.clock_timestamp())


PATIENCE_S = 30.0
"""How long another promotion, or the service's look, is waited for."""

NAME = "promotion"

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def renewing(lease: FencingToken) -> Iterator[None]:
    """Keep the lease while what is done takes long."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(LEASE_S / 5):
            try:
                lease.renew()
            except PromotionConflict:  # whoever writes next is told
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
