"""A lease on a lock's row: who holds it, and until when by the database's own clock.

Law: of two transactions that hold one lock (`renew_in`), the later one is of whoever took it last.
Who was stopped for longer than the lease finds it taken, and writes nothing more.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import sqlalchemy as sa

from gate.errors import PromotionConflict
from gate.ledger import tables
from gate.ledger.entry import now
from gate.ledger.holder import Holder
from gate.ledger.tables import LOCKS
from gate.state.state import State

LEASE_S = 15.0
"""After which a lock whose holder does not renew it can be taken."""
_PAUSE_S = 0.05
"""Between two looks at a lock that is held."""


class Lease:
    """One holding of a lock, from `take` to `free`. All methods raise StateUnavailable."""

    def __init__(self, state: State, *, name: str) -> None:
        self._state = state
        self._name = name
        self._holder = Holder.this_process(since=now())
        self._token = secrets.token_hex(16)

    def take(self, *, patience_s: float) -> Holder | None:
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

    def _look(self) -> Holder | None:
        """Who holds it now; without a transaction that others would have to wait for."""
        if not self._state.is_there:
            return None
        with self._state.reading() as connection:
            return _holder(connection, self._name) if tables.are_made(connection) else None

    def _try(self) -> Holder | None:
        with self._state.writing() as connection:
            tables.make(connection)
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


def _holder(connection: sa.Connection, name: str) -> Holder | None:
    """Whoever holds the lock by a lease that is not over, and is not known to be dead."""
    held = LOCKS.c.name == name, LOCKS.c.leased_until > _clock(connection)
    text = connection.execute(sa.select(LOCKS.c.holder).where(*held)).scalar()
    holder = None if text is None else Holder.of(text)
    return None if holder is None or holder.is_dead() else holder


def _clock(connection: sa.Connection) -> Any:
    """Seconds since the epoch, by the database's clock."""
    if connection.dialect.name == "sqlite":
        return (sa.func.julianday("now") - 2440587.5) * 86400.0
    return sa.func.extract("epoch", sa.func.clock_timestamp())
