"""The ledger: what was promoted, refused, rolled back, or found to be wrong. Append-only.

JSON lines. Each line holds the SHA-256 of the line before it, so that an edited, removed or
inserted line is seen on reading. That its end was cut off or edited is seen by those who keep
elsewhere where it ended (`gate.registry.head`).
"""

from __future__ import annotations

import getpass
import logging
import os
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from filelock import Timeout
from pydantic import Field

from gate.errors import EvidenceError, GateError, StorageError, first_line
from gate.registry.chain import Chain
from gate.registry.comparison.compared import ComparedWith
from gate.registry.head import Head, Keeper, Keepers
from gate.registry.twin import TwinDigests
from gate.storage.atomic import write_bytes
from gate.storage.digest import Digest, canonical_json
from gate.storage.lock import private_lock
from gate.storage.quota import Extent
from gate.storage.record import Prose, Record, Sha256, later

Action = Literal[
    "passed",
    "promoted",
    "unchanged",
    "refused",
    "rejected",
    "rolled_back",
    "reverted",
    "deployed",
    "not_deployed",
    "violation",
    "absolved",
    "conflict",
    "ledger_accepted",
]
"""`passed`: waits for review; `rejected`: by a reviewer; `reverted`: the guard took `champion` back
from a version that must not serve (`previous_version`), to `version`; or gave it to `version`
later, as soon as that could be proven; `absolved`: a violation was lifted, the bytes proven anew;
`ledger_accepted`: a person said that a shorter or another past of the ledger itself is meant, which
is about no model."""

_APPEND_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)


def now() -> str:
    """UTC, ISO 8601, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def actor() -> str:
    """`user@host` of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def locks(ledger: Path) -> Path:
    """The folder of a ledger's locks, beside it."""
    return ledger.with_name(f"{ledger.name}.locks")


class LedgerEntry(Record):
    """One thing that happened. `version` and `previous_version` are numbers within `registry`."""

    schema_version: Literal[1] = 1
    at: str = Field(default_factory=now)
    """UTC, ISO 8601."""
    action: Action
    registry: str
    model: str
    version: str | None = None
    sha256: Sha256 | None = None
    """Digest of the bytes that the line is about (for a violation: of the bytes expected)."""
    policy_sha256: Sha256 | None = None
    evidence_sha256: Sha256 | None = None
    golden_sha256: Sha256 | None = later(None)
    """Of the golden vectors beside the file."""
    preprocess_sha256: Sha256 | None = later(None)
    """Of the preprocessing spec beside the file."""
    twin: TwinDigests | None = later(None)
    """Of the quantized twin beside the file."""
    compared_with: ComparedWith | None = later(None)
    """The version that served when it was decided, where the policy asked for it."""
    extent: Extent | None = later(None)
    """How much the version was with all that is beside its file."""
    run_id: str | None = None
    actor: str = Field(default_factory=actor)
    reason: Prose
    previous_version: str | None = None
    cause: str | None = later(None)
    """What made the service look: `delivery <id>`, `timer`, or who called `gate reconcile`."""
    operation: str | None = later(None)
    """Id of the move of `champion` that the line tells of (`gate.registry.journal`)."""
    comment: Prose | None = later(None)
    """What the reviewer wrote beside his word."""
    parent: Sha256 | None = None
    """Digest of the line before, without its newline; None in the first line. `append` sets it."""


class Ledger:
    """The ledger in one file. Several processes may append; readers see whole lines only.

    `keepers`: places elsewhere that keep where it ended; a shorter or another past is refused.
    """

    def __init__(self, path: Path, *, keepers: Sequence[Keeper] = ()) -> None:
        self.path = path
        self._keepers = Keepers(keepers)
        self._kept: tuple[int, Digest | None] | None = None
        """Where it ended when the keepers were shown last; None: they were not yet."""
        self._entries: tuple[LedgerEntry, ...] | None = None
        """None: whoever only verifies needs no memory for them."""
        self._chain = self._unread()

    def entries(self) -> tuple[LedgerEntry, ...]:
        """All entries, oldest first; a torn last line is left out (see `is_torn`). The keepers
        keep where it ends before this returns.

        Raises EvidenceError where a line is not an entry or the chain is broken; PastChanged where
        a keeper saw another past; StorageError and InboxUnavailable where none can be asked.
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

    def digest(self, number: int) -> Digest | None:
        """Of a line, as it was read last; None where there is no such line."""
        return self._chain.digest(number)

    def head(self) -> Head | None:
        """Where it ends, as it was read last; None where it has no line."""
        return Head.of(self._chain, at=now())

    def is_torn(self) -> bool:
        """True if the last line was cut off by a crash; the next `append` moves it aside."""
        self._read()
        return bool(self._chain.tail)

    def append(self, entry: LedgerEntry) -> LedgerEntry:
        """Add an entry at the end, on disk when this returns; gives it with its `parent`.

        A torn last line is first moved to a file beside the ledger. Raises as `entries`;
        StorageError where the disk is full or the ledger can't be written.
        """
        try:
            lock = locks(self.path) / "append.lock"
            with private_lock(lock, timeout_s=_APPEND_TIMEOUT_S):
                self._mend()
                self.entries()
                parent = self._chain.digest(self._chain.lines)
                chained = entry.model_copy(update={"parent": parent})
                self._write(canonical_json(chained.to_plain()) + b"\n")
        except Timeout as error:
            raise StorageError(
                f"{self.path} has been locked for {_APPEND_TIMEOUT_S:.0f} s by another process. "
                "Let it finish (or end it), then repeat."
            ) from error
        except OSError as error:
            raise StorageError(
                f"cannot write the ledger {self.path}: {error.strerror or error}. "
                "Free space or fix permissions, then repeat."
            ) from error
        try:
            self.entries()
        except GateError as error:  # the line is there; whoever reads next tries again
            _log.warning("the ledger's new line was not seen by its keepers: %s", error)
        return chained

    def _unread(self) -> Chain[LedgerEntry]:
        return Chain(self.path, self._parse)

    def _read(self) -> None:
        anew, entries = self._chain.read()
        if self._entries is not None and (anew or entries):
            self._entries = tuple(entries) if anew else (*self._entries, *entries)

    def _compare(self) -> None:
        self._keepers.compare(self._chain, again=self._read)

    def _parse(self, line: bytes, number: int) -> LedgerEntry:
        try:
            return LedgerEntry.model_validate_json(line)
        except ValueError as error:
            raise EvidenceError(
                f"{self.path}:{number}: not a ledger entry: {first_line(error)}. "
                "Restore the file from a copy; or keep it under another name and start anew."
            ) from error

    def _mend(self) -> None:
        self._read()
        tail = self._chain.tail
        if not tail:
            return
        aside = self.path.with_name(f"{self.path.name}.torn-{Digest.of_bytes(tail).short}")
        write_bytes(aside, tail)
        with self.path.open("rb+") as stream:
            stream.truncate(self._chain.size)
            os.fsync(stream.fileno())
        _log.warning(
            "The last line of %s was cut off by a crash; it is kept in %s.", self.path, aside
        )

    def _write(self, line: bytes) -> None:
        """Append with one write; where only a part of it fits the disk, take that part back."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            written = os.write(descriptor, line)
            if written != len(line):
                os.ftruncate(descriptor, size)
                raise OSError("only a part of the line could be written; is the disk full?")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
