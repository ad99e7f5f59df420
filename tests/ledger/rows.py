"""Direct edits of ledger rows, as someone with write access to the database can make them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import sqlalchemy as sa

from gate.ledger.database import LINES, LOCKS, VERSIONS, StateDatabase
from gate.ledger.entry import LedgerEntry, Row
from gate.ledger.ledger import Ledger, insert

Place = Path | str | StateDatabase


def rows(place: Place) -> list[Row]:
    """As they are now."""
    return list(Ledger(place).rows())


def lines(place: Place) -> list[bytes]:
    return [row.line for row in rows(place)]


def put(place: Place, kept: Sequence[Row]) -> None:
    """These rows, and no others."""
    state = place if isinstance(place, StateDatabase) else StateDatabase(place)
    with state.writing() as connection:
        LINES.drop(connection, checkfirst=True)  # and what would refuse it
        VERSIONS.drop(connection, checkfirst=True)
        state.make_tables(connection)
        if kept:
            insert(connection, kept)


def put_lines(place: Place, kept: Sequence[bytes]) -> None:
    """These lines, without signatures."""
    put(place, [Row(number, line) for number, line in enumerate(kept, start=1)])


def replace(place: Place, old: bytes, new: bytes) -> None:
    """In all lines; their signatures stay."""
    put(place, [row._replace(line=row.line.replace(old, new)) for row in rows(place)])


def put_pending(place: Place, *operations: str) -> None:
    """Ids of moves, as of an owner of the lock that died."""
    state = place if isinstance(place, StateDatabase) else StateDatabase(place)
    row = {"token": "", "holder": "", "leased_until": 0.0, "pending": " ".join(operations)}
    with state.writing() as connection:
        state.make_tables(connection)
        connection.execute(sa.delete(LOCKS))
        connection.execute(sa.insert(LOCKS).values(name="promotion", **row))


def pending_in(place: Place) -> str:
    """Ids of the moves that are not finished."""
    state = place if isinstance(place, StateDatabase) else StateDatabase(place)
    with state.reading() as connection:
        if not state.has_tables(connection):
            return ""
        return connection.execute(sa.select(LOCKS.c.pending)).scalar() or ""


def holders(place: Place) -> dict[str, str]:
    """Who holds which lock."""
    state = place if isinstance(place, StateDatabase) else StateDatabase(place)
    with state.reading() as connection:
        return {row.name: row.holder for row in connection.execute(sa.select(LOCKS))}


def parsed_lines(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the lines that are parsed from now on."""
    parsed: list[int] = []
    parse = LedgerEntry.from_line

    def counted(line: bytes, *, where: str) -> LedgerEntry:
        parsed.append(int(where.rpartition(":")[2]))
        return parse(line, where=where)

    monkeypatch.setattr(LedgerEntry, "from_line", counted)
    return parsed
