"""The table of deliveries, and what is asked of it; its laws are told in `gate.service.inbox`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa

from gate.ledger.database import alone

TROUBLE_LENGTH = 500

METADATA = sa.MetaData()

ROWS = sa.Table(
    "gate_inbox",
    METADATA,
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
    sa.Column("trouble", sa.String(TROUBLE_LENGTH)),
    sa.Index("gate_inbox_waiting", "done_at", "model", "received_at"),
)

C = ROWS.c


def due_models(connection: sa.Connection, models: Collection[str], *, now: float) -> list[str]:
    """Models of which something is due that nobody has; the one that waited longest comes first."""
    due = (
        sa.select(C.model)
        .where(C.model.in_(list(models)), C.due_at <= now, *is_free(now))
        .group_by(C.model)
        .order_by(sa.func.min(C.received_at))
    )
    return list(connection.execute(due).scalars())


def lock_rows(connection: sa.Connection, model: str, *, now: float, limit: int) -> Sequence[Any]:
    """Lock a model's free rows until the transaction ends; none if another process has it."""
    if not alone(connection, f"gate_inbox {model}"):
        return ()
    leased = sa.select(C.delivery_id).where(
        C.model == model, C.done_at.is_(None), C.leased_until > now
    )
    if connection.execute(leased.limit(1)).first() is not None:
        return ()
    rows = (
        sa.select(C.delivery_id, C.attempts)
        .where(C.model == model, *is_free(now))
        .order_by(C.received_at, C.delivery_id)
        .limit(limit)
    )
    return connection.execute(rows.with_for_update(skip_locked=True)).all()


def is_free(now: float) -> tuple[sa.ColumnElement[bool], ...]:
    """Of rows that are not done, and that nobody has."""
    return C.done_at.is_(None), sa.or_(C.leased_until.is_(None), C.leased_until <= now)


def change(ids: Sequence[str]) -> sa.Update:
    """Of these deliveries."""
    return sa.update(ROWS).where(C.delivery_id.in_(ids))
