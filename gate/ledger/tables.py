"""The tables of the ledger: lines that nobody changes, notes beside them, and locks.

That rows of the ledger are neither changed nor removed is refused by the database too: no wall
against who owns it, but one against a slip.
"""

from __future__ import annotations

import sqlalchemy as sa

from gate.state.database import wait_for_turn

METADATA = sa.MetaData()
LINES = sa.Table(
    "gate_ledger",
    METADATA,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("line", sa.Text, nullable=False),
    sa.Column("signature", sa.Text),
)
"""`signature`: securesystemslib's, as JSON; none where it was written without a key."""
NOTES = sa.Table(
    "gate_note",
    METADATA,
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("at", sa.String(64), nullable=False),
    sa.Column("signature", sa.Text),
)
LOCKS = sa.Table(
    "gate_lock",
    METADATA,
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("token", sa.String(64), nullable=False),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("leased_until", sa.Double, nullable=False),
)
TURN = "gate_ledger"
"""Whose turn it is to write."""
_REFUSAL = "the ledger is append-only"
_SQLITE = [
    f"CREATE TRIGGER gate_ledger_{event.lower()} BEFORE {event} ON gate_ledger "
    f"BEGIN SELECT RAISE(ABORT, '{_REFUSAL}'); END"
    for event in ("UPDATE", "DELETE")
]
_POSTGRESQL = [
    "CREATE OR REPLACE FUNCTION gate_ledger_refuses() RETURNS trigger AS "
    f"$$ BEGIN RAISE EXCEPTION '{_REFUSAL}'; END $$ LANGUAGE plpgsql",
    "CREATE TRIGGER gate_ledger_rows BEFORE UPDATE OR DELETE ON gate_ledger "
    "FOR EACH ROW EXECUTE FUNCTION gate_ledger_refuses()",
    "CREATE TRIGGER gate_ledger_all BEFORE TRUNCATE ON gate_ledger "
    "FOR EACH STATEMENT EXECUTE FUNCTION gate_ledger_refuses()",
]
for _dialect, _statements in (("sqlite", _SQLITE), ("postgresql", _POSTGRESQL)):
    for _text in _statements:
        _made = sa.DDL(_text)  # type: ignore[no-untyped-call]
        sa.event.listen(LINES, "after_create", _made.execute_if(dialect=_dialect))


def are_made(connection: sa.Connection) -> bool:
    """Whether anybody ever wrote into this database."""
    return bool(sa.inspect(connection).has_table(LINES.name))


def make(connection: sa.Connection) -> None:
    """Make them where they are not there, and have this transaction be the only one that writes
    lines, until it ends."""
    wait_for_turn(connection, TURN)
    if not are_made(connection):
        METADATA.create_all(connection)
