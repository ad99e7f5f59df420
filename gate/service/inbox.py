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
from sqlalchemy.exc import SQLAlchemyError

from gate.errors import InboxUnavailable
from gate.service.database import READS, alone, insert_new, open_database, wait_for_turn
from gate.storage.redaction import without_passwords
from gate.storage.sqlite_errors import WAIT, trouble

_TROUBLE_LENGTH = 500
_LOOK = "look at the database, its disk and its permissions."

_METADATA = sa.MetaData()
_ROWS = sa.Table(
    "gate_inbox",
    _METADATA,
    sa.Column("delivery_id", sa.String(128), primary_key=True),
    sa.Column("model", sa.String(256), nullable=False),
    sa.Column("event", sa.String(64), nullable=False),
    sa.Column("body_sha256", sa.String(64), nullable=False),
    sa.Column("received_at", sa.Double, nullable=False),
    sa.Column("due_at", sa.Double, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    sa.Column("taken_by", sa.String(128)),
    sa.Column("leased_until", sa.Double),
    sa.Column("done_at", sa.Double),
    sa.Column("trouble", sa.String(_TROUBLE_LENGTH)),
    sa.Index("gate_inbox_waiting", "done_at", "model", "received_at"),
)
_C = _ROWS.c


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
    """The table. All methods block, and raise InboxUnavailable where the database does not work.

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
            _METADATA.create_all(connection)

    def receive(self, deliveries: Sequence[Delivery]) -> list[Literal["new", "seen"]]:
        """Keep deliveries, in one commit: they are on disk when this returns."""
        now = self._clock()
        rows = [
            # In one order everywhere: two processes could otherwise wait for each other's ids.
            {**vars(delivery), "received_at": now, "due_at": now, "attempts": 0}
            for delivery in sorted(deliveries, key=lambda delivery: delivery.delivery_id)
        ]
        with self._writing() as connection:
            statement = insert_new(connection, _ROWS).values(rows).returning(_C.delivery_id)
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
            if not _due_models(connection, models, now=now):
                return None
        with self._writing() as connection:
            for model in _due_models(connection, models, now=now):
                rows = _lock(connection, model, now=now, limit=limit)
                if rows:
                    ids = tuple(row.delivery_id for row in rows)
                    taken = _change(ids).values(attempts=_C.attempts + 1, taken_by=worker)
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
            _change(claim.deliveries)
            .where(_C.done_at.is_(None))
            .values(done_at=self._clock(), leased_until=sa.null(), trouble=sa.null())
        )

    def failed(self, claim: Claim, reason: str, *, retry_at: float) -> None:
        """It could not be done: the deliveries wait until `retry_at`."""
        values = {"due_at": retry_at, "trouble": reason[:_TROUBLE_LENGTH]}
        self._write(_mine(claim).values(leased_until=sa.null(), **values))

    def purge(self, memory: Memory, *, models: Collection[str], batch: int = 1000) -> int:
        """Forget deliveries that are done, and those that waited for `keep_s` for others than the
        models; gives their number, `batch` at most: call again then.
        """
        now = self._clock()
        done = _C.done_at < now - memory.keep_s
        orphaned = sa.and_(
            _C.done_at.is_(None),
            _C.model.not_in(list(models)),
            _C.received_at < now - memory.keep_s,
        )
        with self._reading() as connection:
            count = sa.select(sa.func.count()).where(_C.done_at.is_not(None))
            excess = max(0, connection.execute(count).scalar_one() - memory.rows)
            found: list[str] = []
            for which, most in (
                (done, batch),
                (_C.done_at < now - memory.least_s, min(excess, batch)),
                (orphaned, batch),
            ):
                # By the index, so that a batch costs the same however many there are.
                oldest = sa.select(_C.delivery_id).where(which).order_by(_C.done_at).limit(most)
                found += connection.execute(oldest).scalars()
        ids = sorted(set(found))[:batch]
        if not ids:
            return 0
        with self._writing() as connection:
            if not alone(connection, "gate_inbox purge"):
                return 0
            return int(connection.execute(sa.delete(_ROWS).where(_C.delivery_id.in_(ids))).rowcount)

    def depth(self) -> int:
        """Number of deliveries that wait or are being worked on."""
        return int(self._read_one(sa.func.count(), 0))

    def oldest_age(self) -> float:
        """Seconds since the oldest of them was received; 0 if there is none."""
        now = self._clock()
        return max(0.0, now - float(self._read_one(sa.func.min(_C.received_at), now)))

    def probe(self) -> None:
        """Write and commit a row as of a delivery, which nobody ever sees."""
        probe = Delivery(f"probe {uuid.uuid4()}", "", "", "0" * 64)
        row = {**vars(probe), "received_at": 0.0, "due_at": 0.0, "attempts": 0}
        with self._writing() as connection:
            connection.execute(sa.insert(_ROWS).values(row))
            connection.execute(sa.delete(_ROWS).where(_C.delivery_id == probe.delivery_id))

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def _read_one(self, what: Any, otherwise: float) -> float:
        with self._reading() as connection:
            found = connection.execute(sa.select(what).where(_C.done_at.is_(None))).scalar()
        return otherwise if found is None else found

    def _write(self, statement: Any) -> int:
        with self._writing() as connection:
            return int(connection.execute(statement).rowcount)

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        with _translated(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with _translated(), self._engine.connect() as connection:
            yield connection.execution_options(**{READS: True})


def _due_models(connection: sa.Connection, models: Collection[str], *, now: float) -> list[str]:
    due = (
        sa.select(_C.model)
        .where(_C.model.in_(list(models)), _C.due_at <= now, *_free(now))
        .group_by(_C.model)
        .order_by(sa.func.min(_C.received_at))
    )
    return list(connection.execute(due).scalars())


def _lock(connection: sa.Connection, model: str, *, now: float, limit: int) -> Sequence[Any]:
    """Lock a model's free rows until the transaction ends; none if another process has it."""
    if not alone(connection, f"gate_inbox {model}"):
        return ()
    leased = sa.select(_C.delivery_id).where(
        _C.model == model, _C.done_at.is_(None), _C.leased_until > now
    )
    if connection.execute(leased.limit(1)).first() is not None:
        return ()
    rows = (
        sa.select(_C.delivery_id, _C.attempts)
        .where(_C.model == model, *_free(now))
        .order_by(_C.received_at, _C.delivery_id)
        .limit(limit)
    )
    return connection.execute(rows.with_for_update(skip_locked=True)).all()


def _free(now: float) -> tuple[sa.ColumnElement[bool], ...]:
    return _C.done_at.is_(None), sa.or_(_C.leased_until.is_(None), _C.leased_until <= now)


def _change(ids: Sequence[str]) -> sa.Update:
    return sa.update(_ROWS).where(_C.delivery_id.in_(ids))


def _mine(claim: Claim) -> sa.Update:
    held = (_C.taken_by == claim.worker, _C.leased_until.is_not(None))
    return _change(claim.deliveries).where(_C.done_at.is_(None), *held)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        cause = without_passwords(" ".join(str(getattr(error, "orig", None) or error).split()))
        remedy = WAIT if trouble(error) == "locked" else _LOOK
        raise InboxUnavailable(
            f"the inbox can't be used: {cause[:400]}. Deliveries are refused until it can: {remedy}"
        ) from error
