"""Direct edits of ledger rows, as someone with write access to the database can make them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import sqlalchemy as sa

from gate.ledger.database import LINES, LOCKS, VERSIONS, StateDatabase
from gate.ledger.entry import LedgerEntry, Row
from gate.ledger.ledger import Ledger, insert

Database = Path | str | StateDatabase


def entry(reason: str = "because", **fields: object) -> LedgerEntry:
    """Return the entry of a promotion, with some fields changed."""
    arguments = {"action": "promoted", "registry": "here", "model": "digits", "reason": reason}
    return LedgerEntry.model_validate(arguments | fields)


def rows(database: Database) -> list[Row]:
    """Return the current rows."""
    return list(Ledger(database).rows())


def lines(database: Database) -> list[bytes]:
    return [row.line for row in rows(database)]


def replace_rows(database: Database, rows_to_store: Sequence[Row]) -> None:
    """Replace all rows."""
    state = database if isinstance(database, StateDatabase) else StateDatabase(database)
    with state.writing() as connection:
        LINES.drop(
            connection, checkfirst=True
        )  # the tables with their triggers, which refuse edits
        VERSIONS.drop(connection, checkfirst=True)
        state.make_tables(connection)
        if rows_to_store:
            insert(connection, rows_to_store)


def replace_lines(database: Database, rows_to_store: Sequence[bytes]) -> None:
    """Replace all rows by these lines, without signatures."""
    replace_rows(
        database, [Row(number, line) for number, line in enumerate(rows_to_store, start=1)]
    )


def replace_text(database: Database, old: bytes, new: bytes) -> None:
    """Replace text in all lines; the signatures stay."""
    replace_rows(
        database, [row._replace(line=row.line.replace(old, new)) for row in rows(database)]
    )


def store_pending(database: Database, *operations: str) -> None:
    """Store the ids of pending moves, as a killed lock owner leaves them."""
    state = database if isinstance(database, StateDatabase) else StateDatabase(database)
    row = {"token": "", "holder": "", "leased_until": 0.0, "pending": " ".join(operations)}
    with state.writing() as connection:
        state.make_tables(connection)
        connection.execute(sa.delete(LOCKS))
        connection.execute(sa.insert(LOCKS).values(name="promotion", **row))


def pending_moves(database: Database) -> str:
    """Return the ids of the pending moves."""
    state = database if isinstance(database, StateDatabase) else StateDatabase(database)
    with state.reading() as connection:
        if not state.has_tables(connection):
            return ""
        return connection.execute(sa.select(LOCKS.c.pending)).scalar() or ""


def holders(database: Database) -> dict[str, str]:
    """Return the holder of each lock."""
    state = database if isinstance(database, StateDatabase) else StateDatabase(database)
    with state.reading() as connection:
        return {row.name: row.holder for row in connection.execute(sa.select(LOCKS))}


def record_parsed_lines(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the numbers of the lines parsed from now on."""
    parsed: list[int] = []
    parse = LedgerEntry.from_line

    def record(line: bytes, *, where: str) -> LedgerEntry:
        parsed.append(int(where.rpartition(":")[2]))
        return parse(line, where=where)

    monkeypatch.setattr(LedgerEntry, "from_line", record)
    return parsed
