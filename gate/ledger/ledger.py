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
from gate.signing.trust import Trust, TrustedKey, parse_time
from gate.storage.digest import Digest, canonical_json
from gate.storage.files import private_lock, write_text
from gate.storage.record import Record, Sha256
from gate.storage.untrusted_files import parse_strict_json, read_untrusted

_LIMIT = 1 << 16
_TIMEOUT_S = 10.0

_REMEDY = (
    "Restore the newest copy. Only if the loss is intended, or if this ledger is to be used from "
    'now on, accept it: gate accept-ledger --reason "why".'
)

_log = logging.getLogger(__name__)


class LedgerHead(Record):
    """The end of a ledger: the number of its entries and the digest of the last one."""

    schema_version: Literal[1] = 1
    lines: Annotated[int, Field(ge=1)]
    sha256: Sha256
    """Digest of the last entry; through the chain, of all entries."""
    at: str
    """When the head was stored: UTC, ISO 8601."""


class StoredHead:
    """The longest head of one ledger, in a file outside the ledger.

    A ledger that is shorter or differs is refused until a person accepts it (`gate accept-ledger`).
    The first head is stored without verification. Methods raise StorageError if the file can't be
    read or written, and EvidenceError if its content is damaged.
    """

    def __init__(self, path: Path, *, location: str) -> None:
        """`location`: its name in messages."""
        self.path = path
        self.location = location

    def head(self) -> LedgerHead | None:
        """Return the stored head, or None."""
        if not self.path.exists() and not self.path.is_symlink():
            return None
        label = f"the head of the ledger in {self.path}"
        try:
            return LedgerHead.from_untrusted(read_untrusted(self.path, limit=_LIMIT), label=label)
        except (EvidenceError, DigestMismatch) as error:
            raise EvidenceError(
                f"{label} is damaged and can't be read: {error} Find out what changed it; "
                'then accept the ledger: gate accept-ledger --reason "why".'
            ) from error

    def compare(self, chain: HashChain, *, reread: Callable[[], object] = lambda: None) -> None:
        """Raise PastChanged if the chain does not contain the stored head.

        reread: reads the chain again, because another process may have appended entries and stored
        the new head since it was read. The head is read only once, before that: a head that is
        stored later could be newer than the chain.
        """
        head = self.head()
        if head is None:
            return
        if head.lines > chain.lines:
            reread()
        if chain.digest(head.lines) != head.sha256:
            raise PastChanged(_describe_rewrite(chain, head, self.location))

    def store(self, head: LedgerHead) -> None:
        """Store the head, durably, unless another process stored a longer one."""
        self._write(head, only_longer=True)

    def replace(self, head: LedgerHead | None) -> None:
        """Store this head, or remove the stored head if None, for a deliberate reset."""
        self._write(head, only_longer=False)

    def _write(self, head: LedgerHead | None, *, only_longer: bool) -> None:
        lock = self.path.parent / "locks" / f"{self.path.stem}.lock"
        busy = StorageError(
            f"another process has locked {self.path} for {_TIMEOUT_S:.0f} s. "
            "Wait until it is done (or end it), then retry."
        )
        try:
            with private_lock(lock, timeout_s=_TIMEOUT_S, busy=busy):
                stored = self.head() if only_longer else None
                if head is None:
                    self.path.unlink(missing_ok=True)
                elif stored is None or stored.lines < head.lines:
                    write_text(self.path, head.to_json(indent=1) + "\n")
        except OSError as error:
            raise StorageError(f"cannot remove {self.path}: {error.strerror}.") from error


def _describe_rewrite(chain: HashChain, head: LedgerHead, location: str) -> str:
    ledger, was = chain.location, f"on {head.at} {location} recorded {head.lines} entries"
    if chain.lines == 0:
        return f"the ledger {ledger} is empty; {was}. It was removed. {_REMEDY}"
    if chain.lines < head.lines:
        return (
            f"the ledger {ledger} ends at entry {chain.lines}; {was}. It was replaced by an older "
            f"copy, or entries were removed. {_REMEDY}"
        )
    return (
        f"{ledger}:{head.lines}: this entry has digest {chain.digest(head.lines)}; {was}, the last "
        f"with digest {head.sha256}. The ledger was edited or replaced by another. {_REMEDY}"
    )


def sign(data: bytes, key: SigningKey | None) -> str | None:
    """Sign an entry; return the signature as JSON, None without a key. Raises KeyUnusable."""
    if key is None:
        return None
    return json.dumps(key.sign(data).to_dict(), sort_keys=True)


def verify(data: bytes, signature: str | None, *, trust: Trust, at: str) -> TrustedKey:
    """Verify an entry's signature, and return the trusted writer that signed it.

    at: the entry's own time. A key is trusted for entries that it signed while it was valid; a
    revoked key is never trusted. Raises Untrusted, whose message continues "this entry".
    """
    from securesystemslib.exceptions import UnverifiedSignatureError
    from securesystemslib.signer import Signature

    if signature is None:
        raise Untrusted(f"has no signature, expected one of a writer that is trusted{trust.by}")
    try:
        parsed = Signature.from_dict(parse_strict_json(signature.encode(), label="it"))
        name = str(parsed.keyid)
    except (EvidenceError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Untrusted("has a signature that can't be read") from error
    key = next((each for each in trust.writers if each.key_id == name), None)
    if key is None:
        raise Untrusted(f"is signed by {name[:12]}, which is not trusted as a writer{trust.by}")
    label, time = key.label, parse_time(at)
    if name in trust.revoked:
        raise Untrusted(f"is signed by {label}, which is revoked{trust.by}")
    if time is None:
        raise Untrusted(f"has the time '{at}', which is not an ISO 8601 time")
    expiry = key.expiry_problem(time)
    if expiry is not None:
        raise Untrusted(f"has the time '{at}' and is signed by {label}, which {expiry}")
    try:
        key.verifier.verify_signature(parsed, data)
    except UnverifiedSignatureError as error:
        raise Untrusted(f"has a signature by {label} that does not verify") from error
    return key


def check_writer(key: SigningKey | None, trust: Trust | None, *, location: str) -> None:
    """Verify that this key is a trusted writer of the ledger now. Raises Untrusted."""
    if trust is None or not trust.writers:
        return
    writers = [each.key_id for each in trust.keys("writers", at=datetime.now(UTC))]
    if key is None or key.public.key_id not in writers:
        reason = "there is no key to sign it"
        if key is not None:
            reason = f"the key {key.public.label} is not a trusted writer now"
        raise Untrusted(
            f"no entry can be added to the ledger {location}: {reason}. Expected a key that is "
            f"trusted as a writer{trust.by}, because readers refuse a ledger with other entries. "
            "Name it with --key, or trust this key there: gate keys trust --as writer."
        )


# Rows of a database: number, line (JSON), signature. Each line holds the SHA-256 of the one before
# it, so that reading detects an edited, removed or inserted entry. A truncated or edited end is
# detected by the stored head and by checkpoints. With a key each entry is signed: through the chain
# the last signature covers all entries, so that a user who can write to the database but has no key
# can't rewrite the past undetected.
class Ledger:
    """The ledger in one database. Several processes may append to it."""

    def __init__(
        self,
        state: Path | str | StateDatabase,
        *,
        stored_head: StoredHead | None = None,
        key: SigningKey | None = None,
        trust: Trust | None = None,
    ) -> None:
        """`state`: a SQLite file, a URL or an open database. `stored_head`: a ledger that does not
        contain it is refused. `key` signs new entries. `trust`: if it names writers, one of them
        must have signed the last entry.

        Raises ServiceError for a URL that is not valid.
        """
        self.state = state if isinstance(state, StateDatabase) else StateDatabase(state)
        self.key = key
        self.trust = trust
        """May be replaced; the next read uses it."""
        self.lease: FencingToken | None = None
        """The promotion lock, while this object holds it (`gate.ledger.lock`)."""
        self._stored_head = stored_head
        self._stored: tuple[int, Digest | None] | None = None
        """Number of entries and digest of the head that was stored last, or None."""
        self._verified: tuple[Row, Trust] | None = None
        """The last row whose signature was verified, with the trust that was used."""
        self._entries: tuple[LedgerEntry, ...] = ()
        self._chain = HashChain(self.location)

    @property
    def location(self) -> str:
        """Return the location of the ledger for messages, without a password."""
        return self.state.location

    def entries(self) -> tuple[LedgerEntry, ...]:
        """Store the current head; return all entries, oldest first.

        Raises EvidenceError if an entry can't be parsed or the chain is broken; Untrusted if no
        trusted writer signed the last entry; PastChanged if the ledger does not contain the stored
        head; StateUnavailable and StorageError if the ledger or the stored head can't be read.
        """
        self._read()
        if (self._chain.lines, self._chain.head) != self._stored:
            self._compare()
            head = self.head()
            if self._stored_head is not None and head is not None:
                self._stored_head.store(head)
            self._stored = self._chain.lines, self._chain.head
        return self._entries

    def verify(self) -> None:
        """Verify the ledger without storing its head. Raises the exceptions of `entries`."""
        self._read()
        self._compare()

    def digest(self, number: int) -> Digest | None:
        """Return the digest of the entry with this number as it was last read, or None."""
        return self._chain.digest(number)

    def head(self) -> LedgerHead | None:
        """Return the head of the ledger as it was last read, or None if it is empty."""
        lines, sha256 = self._chain.lines, self._chain.head
        return None if sha256 is None else LedgerHead(lines=lines, sha256=sha256, at=now())

    def rows(self, first: int = 1) -> Sequence[Row]:
        """Return the current rows from a number on, unverified. Raises StateUnavailable."""
        if not self.state.exists:
            return ()
        with self.state.reading() as connection:
            return rows_in(connection, first) if self.state.has_tables(connection) else ()

    def append(self, entry: LedgerEntry) -> LedgerEntry:
        """Append an entry durably, and return it with its `parent`.

        An entry with an `operation` is a move of `champion`, which the same transaction marks as
        pending. Raises the exceptions of `entries`; PromotionConflict if this object lost the
        promotion lock; KeyUnusable; Untrusted if the key is not a trusted writer's.
        """
        check_writer(self.key, self.trust, location=self.location)
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
                chained = entry.model_copy(update={"parent": self._chain.head})
                line = canonical_json(chained.to_plain())
                insert(connection, [Row(self._chain.lines + 1, line, sign(line, self.key))])
                if self.lease is not None and entry.operation is not None:
                    self.lease.add_pending(connection, entry.operation)
        except StateUnavailable:
            if not self._was_written(chained):
                raise
        try:
            self.entries()
        except GateError as error:  # The entry is written. The next reader stores the head.
            _log.warning("the ledger's new head is not stored yet: %s", error)
        return chained

    def _was_written(self, entry: LedgerEntry) -> bool:
        """Return whether the entry was written although the database failed: the response may have
        been lost after the commit."""
        line = canonical_json(entry.to_plain())
        try:
            return any(row.line == line for row in self.rows(self._chain.lines + 1))
        except StateUnavailable:
            return False

    def _read(self, rows: Rows | None = None) -> None:
        is_complete, entries = self._chain.read(rows or self.rows)
        if is_complete or entries:
            self._entries = tuple(entries) if is_complete else (*self._entries, *entries)
        self._verify_last_entry()

    def _verify_last_entry(self) -> None:
        """Verify that a trusted writer signed the last entry, and so all entries before it."""
        row, trust = self._chain.last, self.trust
        if row is None or trust is None or not trust.writers or self._verified == (row, trust):
            return
        try:
            verify(row.line, row.signature, trust=trust, at=LedgerEntry.from_json(row.line).at)
        except Untrusted as error:
            raise Untrusted(
                f"{self.location}:{row.number}: this entry {error}. {UNTRUSTED_ENTRY}"
            ) from error
        self._verified = row, trust

    def _compare(self) -> None:
        if self._stored_head is not None:
            self._stored_head.compare(self._chain, reread=self._read)


UNTRUSTED_ENTRY = (
    "Anyone with write access to the database may have written it. Find out who did. If it was one "
    "of your writers, trust that key: gate keys trust --as writer. If the entry is right, accept "
    'it with the key of a trusted writer: gate accept-ledger --reason "why".'
)
"""Remedy for an entry that is not trusted."""


def insert(connection: sa.Connection, rows: Sequence[Row]) -> None:
    """Append rows, in a transaction that has locked the ledger."""
    values = [row._asdict() | {"line": row.line.decode()} for row in rows]
    connection.execute(sa.insert(LINES), values)


def rows_in(connection: sa.Connection, first: int = 1) -> Sequence[Row]:
    """Return the rows from a number on, read in a transaction."""
    query = sa.select(LINES).where(LINES.c.number >= first).order_by(LINES.c.number)
    return [Row(n, line.encode(), signature) for n, line, signature in connection.execute(query)]


def verify_rows(rows: Sequence[Row], *, location: str) -> tuple[HashChain, list[LedgerEntry]]:
    """Return the chain of these rows and their entries. Raises EvidenceError if they are not one.

    location: the ledger's name in messages.
    """
    chain = HashChain(location)
    _, entries = chain.read(lambda first: rows[first - 1 :])
    return chain, entries


def verify_writer(ledger: Ledger, keys: LocalKeys, trust: Path | None = None) -> Ledger:
    """Set the trust of a ledger: this file, else GATE_TRUST, else the folder's trust if it exists.

    Sets the folder's trust with `set_default_trust`. Raises PolicyError, Untrusted.
    """
    chosen = keys.trust_if_any(trust)
    if chosen is not None and not keys.is_trust_named(trust):
        return set_default_trust(ledger, chosen)
    ledger.trust = chosen
    return ledger


def set_default_trust(ledger: Ledger, trust: Trust) -> Ledger:
    """Set a default trust, which the user did not name and which may be newer than the ledger.

    A ledger without any signed entry needs no signatures until a trusted writer signs an entry.
    Raises Untrusted if the ledger's key is not a trusted writer's.
    """
    ledger.trust = trust
    rows = ledger.rows()
    if rows and not any(row.signature for row in rows):
        if ledger.key is not None:
            check_writer(ledger.key, trust, location=ledger.location)
        ledger.trust = None
    return ledger


def require_writable(ledger: Ledger) -> None:
    """Verify, before any work, that a new entry of this ledger will be trusted.

    If the last entry is signed, the next one must be signed, too. Raises Untrusted if the key is
    not a trusted writer's, and KeyUnusable if a key is required and there is none.
    """
    check_writer(ledger.key, ledger.trust, location=ledger.location)
    if ledger.key is not None:
        return
    rows = ledger.rows()
    if rows and rows[-1].signature is not None:
        raise KeyUnusable(
            f"the entries of the ledger {ledger.location} are signed, and there is no key to sign "
            "another one: readers would refuse the ledger. Name the key of a writer: --key or "
            "GATE_SIGNING_KEY."
        )


@contextlib.contextmanager
def promotion_lock(ledger: Ledger, *, timeout_s: float = 0.0) -> Iterator[FencingToken]:
    """Hold the promotion lock in the ledger's database.

    While it is held, all writes of `ledger` fail with PromotionConflict if the lock was lost to
    another process. The lock of a process that died is free at once for processes of its machine,
    and for others when the lease expires. Raises PromotionConflict if another process holds it for
    `timeout_s`, and StateUnavailable if the database can't be reached.
    """
    lease = FencingToken(ledger.state)
    holder = lease.acquire(timeout_s=timeout_s)
    if holder is not None:
        raise PromotionConflict(
            f"another promotion or rollback is running: {holder} holds the lock in "
            f"{ledger.location}. Nothing was changed. Wait until it is done, then retry."
        )
    previous, ledger.lease = ledger.lease, lease
    try:
        with renewing(lease):
            yield lease
    finally:
        ledger.lease = previous
        try:
            lease.release()
        except StateUnavailable as error:
            _log.warning("the promotion lock stays held for up to %.0f s: %s", LEASE_S, error)
