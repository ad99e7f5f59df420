"""Notes beside the ledger, in its database: by name, and signed as its lines are.

They say what is under way, or what is meant, and are changed; what happened is in the lines.
"""

from __future__ import annotations

import sqlalchemy as sa

from gate.errors import Untrusted
from gate.ledger import database
from gate.ledger.database import NOTES
from gate.ledger.entry import now
from gate.ledger.ledger import Ledger, check_writer, sign, verify
from gate.storage.digest import canonical_json


class Notes:
    """The notes beside one ledger. All methods raise StateUnavailable; those that write also
    PromotionConflict where the ledger's promotion lock was lost, and Untrusted where nobody would
    believe its key."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def read(self, name: str) -> str | None:
        """What a note says; None: there is none. Raises Untrusted where the ledger trusts writers
        and none of them signed it."""
        state, trust = self._ledger.state, self._ledger.trust
        if not state.is_there:
            return None
        with state.reading() as connection:
            if not database.are_made(connection):
                return None
            found = connection.execute(sa.select(NOTES).where(NOTES.c.name == name)).first()
        if found is None:
            return None
        text = str(found.text)
        if trust is not None and trust.writers:
            try:
                signed = _signed(name, text, at=found.at)
                verify(signed, found.signature, trust=trust, at=found.at)
            except Untrusted as error:
                raise Untrusted(f"the note {name} in {state.place} {error}.") from error
        return text

    def write(self, name: str, text: str) -> None:
        """Keep a note in the place of the one of that name. Raises KeyUnusable, too."""
        ledger = self._ledger
        check_writer(ledger.key, ledger.trust, place=ledger.place)
        with ledger.state.writing() as connection:
            ledger.prepare(connection)
            self.write_in(connection, name, text)

    def write_in(self, connection: sa.Connection, name: str, text: str) -> None:
        """The same within a transaction that the ledger prepared."""
        at = now()
        signature = sign(_signed(name, text, at=at), self._ledger.key)
        row = {"name": name, "text": text, "at": at, "signature": signature}
        connection.execute(sa.delete(NOTES).where(NOTES.c.name == name))
        connection.execute(sa.insert(NOTES).values(row))

    def remove(self, name: str) -> None:
        """Forget a note, if there is one."""
        with self._ledger.state.writing() as connection:
            self._ledger.prepare(connection)
            connection.execute(sa.delete(NOTES).where(NOTES.c.name == name))

    def rename(self, name: str, other: str) -> None:
        """Give a note another name, as it is; nobody believes it any more."""
        with self._ledger.state.writing() as connection:
            self._ledger.prepare(connection)
            connection.execute(sa.delete(NOTES).where(NOTES.c.name == other))
            renamed = sa.update(NOTES).where(NOTES.c.name == name).values(name=other)
            connection.execute(renamed)

    def raw(self, name: str) -> str:
        """What a note says, whoever wrote it; nothing where there is none."""
        with self._ledger.state.reading() as connection:
            text = connection.execute(sa.select(NOTES.c.text).where(NOTES.c.name == name)).scalar()
        return text or ""


def _signed(name: str, text: str, *, at: str) -> bytes:
    return canonical_json({"at": at, "note": name, "text": text})
