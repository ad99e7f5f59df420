"""The ledger: what was promoted, refused, rolled back, or found to be wrong. Append-only.

Rows of a database: number, line (JSON), signature. Each line holds the SHA-256 of the line before
it, so that an edited, removed or inserted line is seen on reading. That its end was cut off or
edited is seen by those who keep elsewhere where it ended (`gate.ledger.head`), and by whoever keeps
a checkpoint. With a key each line is signed: by the chain the last signature vouches for all lines,
so that who can write the database and has no key can't rewrite the past unseen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import sqlalchemy as sa

from gate.attestation.keys import SigningKey
from gate.attestation.trust import Trust
from gate.errors import GateError, StateUnavailable, Untrusted
from gate.ledger import tables
from gate.ledger.chain import Chain, Row, Rows
from gate.ledger.entry import LedgerEntry, now
from gate.ledger.head import Head, Keeper, Keepers
from gate.ledger.lease import Lease
from gate.ledger.signature import check_writer, sign, verify
from gate.ledger.tables import LINES
from gate.state.state import State
from gate.storage.digest import Digest, canonical_json

_log = logging.getLogger(__name__)


class Ledger:
    """The ledger in one database. Several processes may append; readers see whole lines only."""

    def __init__(
        self,
        place: Path | str | State,
        *,
        keepers: Sequence[Keeper] = (),
        key: SigningKey | None = None,
        trust: Trust | None = None,
    ) -> None:
        """`place`: a file of SQLite, a URL, or what is open already. `keepers`: places elsewhere
        that keep where it ended; a shorter or another past is refused. `key` signs what is
        appended. `trust`: whose signature the last line must have, if it names writers.

        Raises ServiceError for a URL that can't be read.
        """
        self.state = place if isinstance(place, State) else State(place)
        self.key = key
        self.trust = trust
        """May be exchanged; it counts from the next reading on."""
        self.lease: Lease | None = None
        """Of the promotion lock, while this object holds it (`gate.ledger.lock`)."""
        self._keepers = Keepers(keepers)
        self._kept: tuple[int, Digest | None] | None = None
        """Where it ended when the keepers were shown last; None: they were not yet."""
        self._vouched: tuple[Row, Trust] | None = None
        """The last row whose signature was verified, and by which trust."""
        self._entries: tuple[LedgerEntry, ...] | None = None
        """None: whoever only verifies needs no memory for them."""
        self._chain = self._unread()

    @property
    def place(self) -> str:
        """What messages call it; without a password."""
        return self.state.place

    def entries(self) -> tuple[LedgerEntry, ...]:
        """All entries, oldest first. The keepers keep where it ends before this returns.

        Raises EvidenceError where a line is not an entry or the chain is broken; Untrusted where no
        trusted writer signed the last line; PastChanged where a keeper saw another past;
        StateUnavailable and StorageError where it, or no keeper, can be asked.
        """
        if self._entries is None:
            self._entries, self._chain = (), self._unread()
        self._read()
        end = self._chain.lines, self._chain.digest(self._chain.lines)
        if end != self._kept:
            self._compare()
            self._keepers.keep(self._chain, at=now())
            self._kept = self._chain.lines, self._chain.digest(self._chain.lines)
        return self._entries

    def verify(self) -> None:
        """Compare what is there now with what every keeper saw, and keep nothing. Raises as
        `entries`."""
        self._read()
        self._compare()

    def compare(self, chain: Chain[LedgerEntry]) -> None:
        """Raise PastChanged where this chain does not hold what every keeper saw."""
        self._keepers.compare(chain, again=lambda: None)

    def digest(self, number: int) -> Digest | None:
        """Of a line, as it was read last; None where there is no such line."""
        return self._chain.digest(number)

    def head(self) -> Head | None:
        """Where it ends, as it was read last; None where it has no line."""
        return Head.of(self._chain, at=now())

    def rows(self, first: int = 1) -> Sequence[Row]:
        """The rows from a number on, as they are now; nobody has proven them. Raises
        StateUnavailable."""
        if not self.state.is_there:
            return ()
        with self.state.reading() as connection:
            return rows_in(connection, first) if tables.are_made(connection) else ()

    def append(self, entry: LedgerEntry) -> LedgerEntry:
        """Add an entry at the end, on disk when this returns; gives it with its `parent`.

        Raises as `entries`; PromotionConflict where the promotion lock was lost that this object
        held; KeyUnusable; Untrusted where nobody would believe the key.
        """
        check_writer(self.key, self.trust, place=self.place)
        self.entries()
        chained = entry
        try:
            with self.state.writing() as connection:
                self.prepare(connection)
                self._read(lambda first: rows_in(connection, first))
                self.compare(self._chain)
                parent = self._chain.digest(self._chain.lines)
                chained = entry.model_copy(update={"parent": parent})
                row = self.signed(chained, number=self._chain.lines + 1)
                insert(connection, [row])
        except StateUnavailable:
            if not self._was_written(chained):
                raise
        try:
            self.entries()
        except GateError as error:  # the line is there; whoever reads next tries again
            _log.warning("the ledger's new line was not seen by its keepers: %s", error)
        return chained

    def prepare(self, connection: sa.Connection) -> None:
        """Have a transaction be the only one that writes, and hold the promotion lock while it
        does, if this object had it. Raises PromotionConflict where it was lost."""
        tables.make(connection)
        if self.lease is not None:
            self.lease.renew_in(connection)

    def signed(self, entry: LedgerEntry, *, number: int) -> Row:
        """The row of an entry. Raises KeyUnusable."""
        line = canonical_json(entry.to_plain())
        return Row(number, line, sign(line, self.key))

    def _was_written(self, entry: LedgerEntry) -> bool:
        """Whether the line is there although the database broke off: its answer may have been lost
        after the commit."""
        line = canonical_json(entry.to_plain())
        try:
            return any(row.line == line for row in self.rows(self._chain.lines + 1))
        except StateUnavailable:
            return False

    def _unread(self) -> Chain[LedgerEntry]:
        return Chain(self.place, _parser(self.place))

    def _read(self, rows: Rows | None = None) -> None:
        anew, entries = self._chain.read(rows or self.rows)
        if self._entries is not None and (anew or entries):
            self._entries = tuple(entries) if anew else (*self._entries, *entries)
        self._vouch()

    def _vouch(self) -> None:
        """Prove that a trusted writer signed the last line, and by the chain all before it."""
        row, trust = self._chain.last, self.trust
        if row is None or trust is None or not trust.writers or self._vouched == (row, trust):
            return
        try:
            verify(row.line, row.signature, trust=trust, at=LedgerEntry.from_json(row.line).at)
        except Untrusted as error:
            raise Untrusted(f"{self.place}:{row.number}: this line {error}. {UNVOUCHED}") from error
        self._vouched = row, trust

    def _compare(self) -> None:
        self._keepers.compare(self._chain, again=self._read)


UNVOUCHED = (
    "Whoever can write the database may have written it. Find out who did. If it was a writer of "
    "yours, trust that key: gate keys trust --as writer; if the line is right, say so with the key "
    'of a trusted one: gate accept-ledger --reason "why".'
)
"""The way out where a line is not believed."""


def insert(connection: sa.Connection, rows: Sequence[Row]) -> None:
    """Add rows at the end, in a transaction that is the only one."""
    values = [row._asdict() | {"line": row.line.decode()} for row in rows]
    connection.execute(sa.insert(LINES), values)


def rows_in(connection: sa.Connection, first: int = 1) -> Sequence[Row]:
    """The rows from a number on, as a transaction finds them."""
    found = sa.select(LINES).where(LINES.c.number >= first).order_by(LINES.c.number)
    return [Row(n, line.encode(), signature) for n, line, signature in connection.execute(found)]


def proven(rows: Sequence[Row], *, place: str) -> tuple[Chain[LedgerEntry], list[LedgerEntry]]:
    """The chain that these rows are, and what they say. Raises EvidenceError where they are none.
    `place`: what messages call it."""
    chain = Chain(place, _parser(place))
    _, entries = chain.read(lambda first: rows[first - 1 :])
    return chain, entries


def _parser(place: str) -> Callable[[bytes, int], LedgerEntry]:
    """Reads a line. It holds no ledger: one that nobody uses any more closes its connections at
    once, and not when Python looks for circles."""
    return lambda line, number: LedgerEntry.of_line(line, where=f"{place}:{number}")
