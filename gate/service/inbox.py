"""Deliveries on disk: between the 202 to MLflow and what is done about it nothing is lost.

One table, in sqlite or PostgreSQL; any number of processes may receive and take. A delivery is
waiting until it is done. Who takes deliveries leases them, and what a dead process had leased can
be taken again when the lease is over.

Laws: an id is new once. A delivery is done only after a look at the registry that began after it
was received. Deliveries of one model are taken together, and by one process at a time.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa

from gate.ledger.database import READS, alone, insert_new, open_database, translated, wait_for_turn
from gate.service.rows import METADATA, ROWS, TROUBLE_LENGTH, C, change, due_models, lock_rows

_FAILURE = "the inbox can't be used, and deliveries are refused until it can"


@dataclass(frozen=True)
class Delivery:
    """What is kept of a delivery: never its body."""

    delivery_id: str
    model: str
    event: str
    body_sha256: str


@dataclass(frozen=True)
class Claim:
    """Deliveries of one model that were taken together, oldest first."""

    worker: str
    model: str
    deliveries: tuple[str, ...]
    attempts: int
    """How often the most unlucky of them was taken, this time included."""


@dataclass(frozen=True)
class Memory:
    """How long deliveries are remembered that nobody waits for any more."""

    keep_s: float = 7 * 86_400.0
    rows: int = 100_000
    """Of those that are done, the oldest are forgotten where there are more,"""
    least_s: float = 1200.0
    """but none so young that it could be replayed."""


class Inbox:
    """The table. All methods block, and raise StateUnavailable where the database does not work.

    `clock`: seconds since the epoch; the clocks of all processes should agree within `lease_s`.
    """

    def __init__(
        self, url: str, *, lease_s: float = 30.0, clock: Callable[[], float] = time.time
    ) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._engine = open_database(url)
        with self._writing() as connection:
            wait_for_turn(connection, "gate_inbox")
            METADATA.create_all(connection)

    def receive(self, deliveries: Sequence[Delivery]) -> list[Literal["new", "seen"]]:
        """Keep deliveries, in one commit: they are on disk when this returns."""
        now = self._clock()
        rows = [
            # In one order everywhere: two processes could otherwise wait for each other's ids.
            {**vars(delivery), "received_at": now, "due_at": now, "attempts": 0}
            for delivery in sorted(deliveries, key=lambda delivery: delivery.delivery_id)
        ]
        with self._writing() as connection:
            statement = insert_new(connection, ROWS).values(rows).returning(C.delivery_id)
            new = set(connection.execute(statement).scalars())
        states: list[Literal["new", "seen"]] = []
        for delivery in deliveries:
            states.append("new" if delivery.delivery_id in new else "seen")
            new.discard(delivery.delivery_id)
        return states

    def claim(self, worker: str, *, models: Collection[str], limit: int = 1000) -> Claim | None:
        """Take all waiting deliveries of one of the models (`limit` at most), or None.

        The model whose oldest delivery is due comes first; its deliveries that wait for another
        try come along. A model that another process holds is left alone.
        """
        now = self._clock()
        with self._reading() as connection:
            if not due_models(connection, models, now=now):
                return None
        with self._writing() as connection:
            for model in due_models(connection, models, now=now):
                rows = lock_rows(connection, model, now=now, limit=limit)
                if rows:
                    ids = tuple(row.delivery_id for row in rows)
                    taken = change(ids).values(attempts=C.attempts + 1, taken_by=worker)
                    connection.execute(taken.values(leased_until=now + self.lease_s))
                    return Claim(worker, model, ids, 1 + max(row.attempts for row in rows))
        return None

    def renew(self, claim: Claim) -> None:
        """Hold the claim for another lease."""
        lease = self._clock() + self.lease_s
        self._write(_mine(claim).values(leased_until=lease))

    def done(self, claim: Claim) -> None:
        """What the claim's deliveries asked for is done; right even if the lease was lost."""
        self._write(
            change(claim.deliveries)
            .where(C.done_at.is_(None))
            .values(done_at=self._clock(), leased_until=sa.null(), trouble=sa.null())
        )

    def failed(self, claim: Claim, reason: str, *, retry_at: float) -> None:
        """It could not be done: the deliveries wait until `retry_at`."""
        values = {"due_at": retry_at, "trouble": reason[:TROUBLE_LENGTH]}
        self._write(_mine(claim).values(leased_until=sa.null(), **values))

    def purge(self, memory: Memory, *, models: Collection[str], batch: int = 1000) -> int:
        """Forget deliveries that are done, and those that waited for `keep_s` for others than the
        models; gives their number, `batch` at most: call again then.
        """
        now = self._clock()
        done = C.done_at < now - memory.keep_s
        orphaned = sa.and_(
            C.done_at.is_(None),
            C.model.not_in(list(models)),
            C.received_at < now - memory.keep_s,
        )
        with self._reading() as connection:
            count = sa.select(sa.func.count()).where(C.done_at.is_not(None))
            excess = max(0, connection.execute(count).scalar_one() - memory.rows)
            found: list[str] = []
            for which, most in (
                (done, batch),
                (C.done_at < now - memory.least_s, min(excess, batch)),
                (orphaned, batch),
            ):
                # By the index, so that a batch costs the same however many there are.
                oldest = sa.select(C.delivery_id).where(which).order_by(C.done_at).limit(most)
                found += connection.execute(oldest).scalars()
        ids = sorted(set(found))[:batch]
        if not ids:
            return 0
        with self._writing() as connection:
            if not alone(connection, "gate_inbox purge"):
                return 0
            return int(connection.execute(sa.delete(ROWS).where(C.delivery_id.in_(ids))).rowcount)

    def depth(self) -> int:
        """Number of deliveries that wait or are being worked on."""
        return int(self._read_one(sa.func.count(), 0))

    def oldest_age(self) -> float:
        """Seconds since the oldest of them was received; 0 if there is none."""
        now = self._clock()
        return max(0.0, now - float(self._read_one(sa.func.min(C.received_at), now)))

    def probe(self) -> None:
        """Write and commit a row as of a delivery, which nobody ever sees."""
        probe = Delivery(f"probe {uuid.uuid4()}", "", "", "0" * 64)
        row = {**vars(probe), "received_at": 0.0, "due_at": 0.0, "attempts": 0}
        with self._writing() as connection:
            connection.execute(sa.insert(ROWS).values(row))
            connection.execute(sa.delete(ROWS).where(C.delivery_id == probe.delivery_id))

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def _read_one(self, what: Any, otherwise: float) -> float:
        with self._reading() as connection:
            found = connection.execute(sa.select(what).where(C.done_at.is_(None))).scalar()
        return otherwise if found is None else found

    def _write(self, statement: Any) -> int:
        with self._writing() as connection:
            return int(connection.execute(statement).rowcount)

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        with translated(_FAILURE), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with translated(_FAILURE), self._engine.connect() as connection:
            yield connection.execution_options(**{READS: True})


def _mine(claim: Claim) -> sa.Update:
    held = (C.taken_by == claim.worker, C.leased_until.is_not(None))
    return change(claim.deliveries).where(C.done_at.is_(None), *held)
