"""Append and read entries; signatures; the stored head."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import sqlalchemy as sa
from filelock import Timeout
from pydantic import Field

from gate.errors import (
    DigestMismatch,
    EvidenceError,
    GateError,
    KeyUnusable,
    PastChanged,
    PromotionConflict,
    StateUnavailable,
    StorageError,
    Untrusted,
)
from gate.ledger.database import LINES, StateDatabase
from gate.ledger.entry import HashChain, LedgerEntry, Row, Rows, now
from gate.ledger.lock import LEASE_S, FencingToken, renewing
from gate.signing.keys import SigningKey
from gate.signing.local_keys import LocalKeys
from gate.signing.trust import Trust, TrustedKey, time_of
from gate.storage.digest import Digest, canonical_json
from gate.storage.files import private_lock, write_text
from gate.storage.record import Record, Sha256
from gate.storage.untrusted_files import parse_strict_json, read_untrusted

# The stored head says where the ledger ended, in another place than the ledger. Once it was kept, a
# shorter or another past is refused, until a person says that it is meant (`gate accept-ledger`).
# The first head is taken on trust.
_LIMIT = 1 << 16
_PATIENCE_S = 10.0

_WAY_OUT = (
    "Restore the newest copy. Only if the loss is meant, or another ledger belongs here from now "
    'on, say so: gate accept-ledger --reason "why".'
)

_log = logging.getLogger(__name__)


class LedgerHead(Record):
    """The end of a ledger: the number of its lines and the digest of the last one."""

    schema_version: Literal[1] = 1
    lines: Annotated[int, Field(ge=1)]
    sha256: Sha256
    """Of the last line; through the chain, of all lines."""
    at: str
    """When it was kept: UTC, ISO 8601."""

    @classmethod
    def from_chain(cls, chain: HashChain) -> LedgerHead | None:
        """Create the head of a chain as it was last read; None for a ledger without a line."""
        digest = chain.digest(chain.lines)
        return None if digest is None else cls(lines=chain.lines, sha256=digest, at=now())


class StoredHead:
    """The longest head of one ledger, in a file.

    Its methods raise StorageError where the file can't be read or written, and EvidenceError where
    its content is damaged.
    """

    def __init__(self, path: Path, *, place: str) -> None:
        """`place`: what messages call it."""
        self.path = path
        self.location = place

    def head(self) -> LedgerHead | None:
        """Return the head that was kept, or None if nothing was kept yet."""
        if not self.path.exists() and not self.path.is_symlink():
            return None
        what = f"the head of the ledger in {self.path}"
        try:
            return LedgerHead.from_untrusted(read_untrusted(self.path, limit=_LIMIT), what=what)
        except (EvidenceError, DigestMismatch) as error:
            raise EvidenceError(
                f"{what} is damaged and can't be read: {error} Find out what changed it; "
                'then say that the ledger is right: gate accept-ledger --reason "why".'
            ) from error

    def compare(self, chain: HashChain, *, again: Callable[[], object] = lambda: None) -> None:
        """Raise PastChanged where the chain does not hold what was kept.

        `again` reads the chain once more where another process may have added lines, and kept the
        new head, since it was read. The head is read once: all of it was in the ledger before the
        chain is read again, and a head that is kept later proves nothing about this reading.
        """
        kept = self.head()
        if kept is None:
            return
        if kept.lines > chain.lines:
            again()
        if chain.digest(kept.lines) != kept.sha256:
            raise PastChanged(_describe_other_past(chain, kept, self.location))

    def keep(self, head: LedgerHead) -> None:
        """Keep it, unless a longer one is kept: several processes may do so at once. On disk
        afterwards."""
        self._write(head, only_longer=True)

    def replace(self, head: LedgerHead | None) -> None:
        """Keep this head whatever was kept before, or remove it; for a deliberate reset."""
        self._write(head, only_longer=False)

    def _write(self, head: LedgerHead | None, *, only_longer: bool) -> None:
        lock = self.path.parent / "locks" / f"{self.path.stem}.lock"
        try:
            with private_lock(lock, timeout_s=_PATIENCE_S):
                kept = self.head() if only_longer else None
                if head is None:
                    self.path.unlink(missing_ok=True)
                elif kept is None or kept.lines < head.lines:
                    write_text(self.path, head.to_json(indent=1) + "\n")
        except Timeout as error:
            raise StorageError(
                f"{self.path} has been locked for {_PATIENCE_S:.0f} s by another process. "
                "Let it finish (or end it), then repeat."
            ) from error
        except OSError as error:
            raise StorageError(f"cannot remove {self.path}: {error.strerror}.") from error


def _describe_other_past(chain: HashChain, kept: LedgerHead, location: str) -> str:
    ledger, was = chain.place, f"on {kept.at} {location} saw it with {kept.lines} lines"
    if chain.lines == 0:
        return f"there is no line in the ledger {ledger}; {was}. It was removed. {_WAY_OUT}"
    if chain.lines < kept.lines:
        return (
            f"the ledger {ledger} ends at line {chain.lines}; {was}. An older copy was put in its "
            f"place, or lines were cut off. {_WAY_OUT}"
        )
    return (
        f"{ledger}:{kept.lines}: this line has digest {chain.digest(kept.lines)}; {was}, the last "
        f"with digest {kept.sha256}. It was edited, or another ledger was put in its place. "
        f"{_WAY_OUT}"
    )


def sign(data: bytes, key: SigningKey | None) -> str | None:
    """The signature as JSON; None without a key. Raises KeyUnusable."""
    if key is None:
        return None
    return json.dumps(key.sign(data).to_dict(), sort_keys=True)


def verify(data: bytes, signature: str | None, *, trust: Trust, at: str) -> TrustedKey:
    """Verify a line's signature, and return the trusted writer that signed it.

    `at`: when the line says that it was written. A key counts for lines that it signed while it was
    valid; a revoked key never counts. Raises Untrusted, with the reason after "this line".
    """
    from securesystemslib.exceptions import UnverifiedSignatureError
    from securesystemslib.signer import Signature

    if signature is None:
        raise Untrusted(f"has no signature of those who are trusted as writers{trust.by}")
    try:
        found = Signature.from_dict(parse_strict_json(signature.encode(), what="it"))
        name = str(found.keyid)
    except (EvidenceError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Untrusted("has a signature that can't be read") from error
    key = next((one for one in trust.writers if one.key_id == name), None)
    if key is None:
        raise Untrusted(f"is signed by {name[:12]}, which is not trusted as a writer{trust.by}")
    who, time = key.label, time_of(at)
    if name in trust.revoked:
        raise Untrusted(f"is signed by {who}, which is revoked{trust.by}")
    late = "can't be judged" if time is None else key.expiry_problem(time)
    if late is not None:
        raise Untrusted(f"is of '{at}' and signed by {who}, which {late}")
    try:
        key.verifier.verify_signature(found, data)
    except UnverifiedSignatureError as error:
        raise Untrusted(f"is not what {who} signed") from error
    return key


def check_writer(key: SigningKey | None, trust: Trust | None, *, place: str) -> None:
    """Verify that this key is a trusted writer of the ledger now. Raises Untrusted."""
    if trust is None or not trust.writers:
        return
    good = [each.key_id for each in trust.keys("writers", at=datetime.now(UTC))]
    if key is None or key.public.key_id not in good:
        name = "no key" if key is None else f"the key {key.public.label}"
        who = name if key is None else f"{name}, which is no trusted writer now"
        raise Untrusted(
            f"nothing is written into the ledger {place}: seen {who}; expected a key that is "
            f"trusted as a writer{trust.by}, because readers refuse a ledger with other entries. "
            "Name it with --key, or trust this one there: gate keys trust --as writer."
        )


# Rows of a database: number, line (JSON), signature. Each line holds the SHA-256 of the line before
# it, so that reading detects an edited, removed or inserted line. A truncated or edited end is
# detected by the head, which is stored elsewhere, and by a checkpoint. With a key each line
# is signed: through the chain the last signature covers all lines, so that a user who can write the
# database but has no key can't rewrite the past undetected.
class Ledger:
    """The ledger in one database. Several processes may append; readers see whole lines only."""

    def __init__(
        self,
        place: Path | str | StateDatabase,
        *,
        stored_head: StoredHead | None = None,
        key: SigningKey | None = None,
        trust: Trust | None = None,
    ) -> None:
        """`place`: a file of SQLite, a URL, or what is open already. `stored_head`: where it ended;
        a shorter or another past is refused. `key` signs what is appended. `trust`: whose signature
        the last line must have, if it names writers.

        Raises ServiceError for a URL that can't be read.
        """
        self.state = place if isinstance(place, StateDatabase) else StateDatabase(place)
        self.key = key
        self.trust = trust
        """May be exchanged; it counts from the next reading on."""
        self.lease: FencingToken | None = None
        """Of the promotion lock, while this object holds it (`gate.ledger.lock`)."""
        self._stored_head = stored_head
        self._kept: tuple[int, Digest | None] | None = None
        """Number of lines and digest of the head that was stored last; None: none was."""
        self._vouched: tuple[Row, Trust] | None = None
        """The last row whose signature was verified, and by which trust."""
        self._entries: tuple[LedgerEntry, ...] | None = None
        """None: an object that only verifies needs no memory for them."""
        self._chain = HashChain(self.location)

    @property
    def location(self) -> str:
        """Return the location of the ledger for messages, without a password."""
        return self.state.place

    def entries(self) -> tuple[LedgerEntry, ...]:
        """Return all entries, oldest first, after the current head was stored.

        Raises EvidenceError where a line is not an entry or the chain is broken; Untrusted where no
        trusted writer signed the last line; PastChanged where the stored head is of another past;
        StateUnavailable and StorageError where it, or its stored head, can't be read.
        """
        if self._entries is None:
            self._entries, self._chain = (), HashChain(self.location)
        self._read()
        end = self._chain.lines, self._chain.digest(self._chain.lines)
        if end != self._kept:
            self._compare()
            head = self.head()
            if self._stored_head is not None and head is not None:
                self._stored_head.keep(head)
            self._kept = self._chain.lines, self._chain.digest(self._chain.lines)
        return self._entries

    def verify(self) -> None:
        """Compare what is there now with the stored head, and keep nothing. Raises what `entries`
        raises."""
        self._read()
        self._compare()

    def digest(self, number: int) -> Digest | None:
        """Return the digest of a line as it was last read, or None where there is no such line."""
        return self._chain.digest(number)

    def head(self) -> LedgerHead | None:
        """Return the head of the ledger as it was last read, or None where it has no line."""
        return LedgerHead.from_chain(self._chain)

    def rows(self, first: int = 1) -> Sequence[Row]:
        """Return the current rows from a number on, not verified. Raises StateUnavailable."""
        if not self.state.is_there:
            return ()
        with self.state.reading() as connection:
            return rows_in(connection, first) if self.state.has_tables(connection) else ()

    def append(self, entry: LedgerEntry) -> LedgerEntry:
        """Append an entry, and return it with its `parent`. It is on disk when this returns.

        An entry with an `operation` is a move of `champion`: it is pending from the same
        transaction on. Raises what `entries` raises; PromotionConflict where the promotion lock was
        lost that this object held; KeyUnusable; Untrusted where the key is not a trusted writer's.
        """
        check_writer(self.key, self.trust, place=self.location)
        self.entries()
        chained = entry
        try:
            with self.state.writing() as connection:
                self.state.make_tables(connection)
                if self.lease is not None:
                    self.lease.renew_in(connection)
                self._read(lambda first: rows_in(connection, first))
                if self._stored_head is not None:
                    self._stored_head.compare(self._chain)
                parent = self._chain.digest(self._chain.lines)
                chained = entry.model_copy(update={"parent": parent})
                line = canonical_json(chained.to_plain())
                insert(connection, [Row(self._chain.lines + 1, line, sign(line, self.key))])
                if self.lease is not None and entry.operation is not None:
                    self.lease.add_pending(connection, entry.operation)
        except StateUnavailable:
            if not self._was_written(chained):
                raise
        try:
            self.entries()
        except GateError as error:  # the line is there; the next reader tries again
            _log.warning("the ledger's new end is not kept yet: %s", error)
        return chained

    def _was_written(self, entry: LedgerEntry) -> bool:
        """Return whether the line is there although the database broke off: its answer may have
        been lost after the commit."""
        line = canonical_json(entry.to_plain())
        try:
            return any(row.line == line for row in self.rows(self._chain.lines + 1))
        except StateUnavailable:
            return False

    def _read(self, rows: Rows | None = None) -> None:
        anew, entries = self._chain.read(rows or self.rows)
        if self._entries is not None and (anew or entries):
            self._entries = tuple(entries) if anew else (*self._entries, *entries)
        self._verify_last_entry()

    def _verify_last_entry(self) -> None:
        """Prove that a trusted writer signed the last line, and by the chain all before it."""
        row, trust = self._chain.last, self.trust
        if row is None or trust is None or not trust.writers or self._vouched == (row, trust):
            return
        try:
            verify(row.line, row.signature, trust=trust, at=LedgerEntry.from_json(row.line).at)
        except Untrusted as error:
            raise Untrusted(
                f"{self.location}:{row.number}: this line {error}. {UNVOUCHED}"
            ) from error
        self._vouched = row, trust

    def _compare(self) -> None:
        if self._stored_head is not None:
            self._stored_head.compare(self._chain, again=self._read)


UNVOUCHED = (
    "Whoever can write the database may have written it. Find out who did. If it was a writer of "
    "yours, trust that key: gate keys trust --as writer; if the line is right, say so with the key "
    'of a trusted one: gate accept-ledger --reason "why".'
)
"""Remedy for a line that is not trusted."""


def insert(connection: sa.Connection, rows: Sequence[Row]) -> None:
    """Add rows at the end, in a transaction that is the only one."""
    values = [row._asdict() | {"line": row.line.decode()} for row in rows]
    connection.execute(sa.insert(LINES), values)


def rows_in(connection: sa.Connection, first: int = 1) -> Sequence[Row]:
    """The rows from a number on, as a transaction finds them."""
    found = sa.select(LINES).where(LINES.c.number >= first).order_by(LINES.c.number)
    return [Row(n, line.encode(), signature) for n, line, signature in connection.execute(found)]


def proven(rows: Sequence[Row], *, place: str) -> tuple[HashChain, list[LedgerEntry]]:
    """The chain that these rows are, and what they say. Raises EvidenceError where they are none.
    `place`: what messages call it."""
    chain = HashChain(place)
    _, entries = chain.read(lambda first: rows[first - 1 :])
    return chain, entries


def verify_writer(ledger: Ledger, keys: LocalKeys, trust: Path | None = None) -> Ledger:
    """Set the trust of a ledger: this file, else GATE_TRUST, else the folder's own, if it exists.

    The folder's own is set by `believe_by_default`. Raises PolicyError, Untrusted.
    """
    chosen = keys.trust_if_any(trust)
    if chosen is not None and not keys.is_trust_named(trust):
        return believe_by_default(ledger, chosen)
    ledger.trust = chosen
    return ledger


def believe_by_default(ledger: Ledger, trust: Trust) -> Ledger:
    """Set a default trust, which was not named for this ledger and may be newer than it.

    A ledger without any signed line needs no signatures until a trusted writer signs its first
    line. Raises Untrusted where the ledger's own key is not a trusted writer's.
    """
    ledger.trust = trust
    rows = ledger.rows()
    if rows and not any(row.signature for row in rows):
        if ledger.key is not None:
            check_writer(ledger.key, trust, place=ledger.location)
        ledger.trust = None
    return ledger


def require_writable(ledger: Ledger) -> None:
    """Verify, before any work, that a new line of this ledger will be trusted.

    If the last line is signed, the next one must be signed, too. Raises Untrusted for a key that is
    not a writer in the ledger's trust, and KeyUnusable where a key is required and there is none.
    """
    check_writer(ledger.key, ledger.trust, place=ledger.location)
    if ledger.key is not None:
        return
    rows = ledger.rows()
    if rows and rows[-1].signature is not None:
        raise KeyUnusable(
            f"the lines of the ledger {ledger.location} are signed, and there is no key to sign "
            "another one: whoever trusts its writers would not believe it any more. Name the key "
            "of a writer: --key or GATE_SIGNING_KEY."
        )


@contextlib.contextmanager
def promotion_lock(ledger: Ledger, *, patience_s: float = 0.0) -> Iterator[FencingToken]:
    """Hold the lock in the ledger's database.

    Meanwhile all writes of this object are made under it, or fail with PromotionConflict where it
    was lost to another process. A holder that died is replaced: at once by a process of its
    machine, by others when its lease is over. Raises PromotionConflict where another process holds
    it (at once, or after `patience_s`), and StateUnavailable where the database can't be reached.
    """
    lease = FencingToken(ledger.state)
    holder = lease.take(patience_s=patience_s)
    if holder is not None:
        raise PromotionConflict(
            f"another promotion or rollback is under way: {holder} holds the lock in "
            f"{ledger.location}. Nothing was changed. Wait until it is done, then repeat."
        )
    before, ledger.lease = ledger.lease, lease
    try:
        with renewing(lease):
            yield lease
    finally:
        ledger.lease = before
        try:
            lease.free()
        except StateUnavailable as error:
            _log.warning("the promotion lock is free only in %.0f s: %s", LEASE_S, error)
