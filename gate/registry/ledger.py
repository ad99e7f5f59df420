"""The ledger: what was promoted, refused, rolled back, or found to be wrong. Append-only.

JSON lines. Each line holds the SHA-256 of the line before it, so that an edited, removed or
inserted line is seen on reading. (Lines cut off at the end can't be seen by a chain.)
"""

from __future__ import annotations

import getpass
import logging
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout
from pydantic import Field

from gate.errors import EvidenceError, StorageError, first_line
from gate.registry.twin import TwinDigests
from gate.storage.atomic import write_bytes
from gate.storage.digest import Digest, canonical_json
from gate.storage.record import Record, Sha256, later

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
]
"""`passed`: waits for review; `rejected`: by a reviewer; `reverted`: the guard took `champion` back
from a version that must not serve (`previous_version`), to `version`; or gave it to `version`
later, as soon as that could be proven; `absolved`: a violation was lifted, the bytes
proven anew."""

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
    run_id: str | None = None
    actor: str = Field(default_factory=actor)
    reason: str
    previous_version: str | None = None
    cause: str | None = later(None)
    """What made the service look: `delivery <id>`, `timer`, or who called `gate reconcile`."""
    operation: str | None = later(None)
    """Id of the move of `champion` that the line tells of (`gate.registry.journal`)."""
    parent: Sha256 | None = None
    """Digest of the line before, without its newline; None in the first line. `append` sets it."""


class Ledger:
    """The ledger in one file. Several processes may append; readers see whole lines only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parsed: tuple[bytes, tuple[LedgerEntry, ...]] = (b"", ())
        """Whole lines that were read and their entries: only what follows them is parsed again."""

    def entries(self) -> tuple[LedgerEntry, ...]:
        """All entries, oldest first; a torn last line is left out (see `is_torn`).

        Raises EvidenceError where a line is not an entry or the chain is broken.
        """
        lines, _ = self._read()
        data = b"".join(line + b"\n" for line in lines)
        before, parsed = self._parsed
        entries = list(parsed) if data.startswith(before) else []
        parent = Digest.of_bytes(lines[len(entries) - 1]) if entries else None
        for number, line in enumerate(lines[len(entries) :], start=len(entries) + 1):
            entry = self._parse(line, number)
            if entry.parent != parent:
                raise EvidenceError(
                    f"{self.path}:{number}: the chain is broken: this line follows a line with "
                    f"digest {entry.parent}, the line before it has {parent}. Line {number} or "
                    f"line {number - 1} was changed, or lines were removed or put in. Restore the "
                    "file from a copy; or keep it as it is under another name and start anew."
                )
            entries.append(entry)
            parent = Digest.of_bytes(line)
        self._parsed = (data, tuple(entries))
        return tuple(entries)

    def is_torn(self) -> bool:
        """True if the last line was cut off by a crash; the next `append` moves it aside."""
        return bool(self._read()[1])

    def append(self, entry: LedgerEntry) -> LedgerEntry:
        """Add an entry at the end, on disk when this returns; gives it with its `parent`.

        A torn last line is first moved to a file beside the ledger. Raises EvidenceError on a
        broken chain, StorageError where the disk is full or the ledger can't be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=_APPEND_TIMEOUT_S):
                self._mend()
                self.entries()
                lines = self._read()[0]
                parent = Digest.of_bytes(lines[-1]) if lines else None
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
        return chained

    def _read(self) -> tuple[list[bytes], bytes]:
        """Whole lines without newlines, and what stands behind the last newline."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return [], b""
        except OSError as error:
            raise StorageError(
                f"cannot read the ledger {self.path}: {error.strerror}. Fix its permissions."
            ) from error
        *lines, tail = data.split(b"\n")
        return lines, tail

    def _parse(self, line: bytes, number: int) -> LedgerEntry:
        try:
            return LedgerEntry.model_validate_json(line)
        except ValueError as error:
            raise EvidenceError(
                f"{self.path}:{number}: not a ledger entry: {first_line(error)}. "
                "Restore the file from a copy; or keep it under another name and start anew."
            ) from error

    def _mend(self) -> None:
        lines, tail = self._read()
        if not tail:
            return
        aside = self.path.with_name(f"{self.path.name}.torn-{Digest.of_bytes(tail).short}")
        write_bytes(aside, tail)
        with self.path.open("rb+") as stream:
            stream.truncate(sum(len(line) + 1 for line in lines))
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
