"""One ledger entry, and the hash chain of entries."""

from __future__ import annotations

import functools
import getpass
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import Field

from gate.decision.decide import Decision
from gate.errors import EvidenceError, first_line
from gate.records.champion_comparison import ChampionComparison
from gate.records.layout import VersionSize
from gate.storage.digest import Digest
from gate.storage.record import Prose, Record, Sha256, added_field
from gate.storage.safe_text import redacted
from gate.storage.workspace import in_workspace, key_in, split_identity

_PORTS = {"http": 80, "https": 443}


@functools.lru_cache(maxsize=256)
def plain(address: str) -> str:
    """Return a registry's identity in a canonical form.

    Removes the user, a default port and a trailing slash, and lowers the case of the host.
    """
    address, workspace = split_identity(redacted(address))
    text = address.rstrip("/")
    parts = urlsplit(text)
    if parts.scheme in _PORTS and parts.hostname:
        port = f":{parts.port}" if parts.port not in (None, _PORTS[parts.scheme]) else ""
        text = f"{parts.scheme}://{parts.hostname.lower()}{port}{parts.path}"
    return in_workspace(text, workspace)


# Each entry holds the SHA-256 of the entry before it. Every read also reads the last entry again:
# if it changed or disappeared, all entries are read again. All entries are hashed again at
# intervals, to detect edits of earlier ones.
_REHASH_S = 600.0
"""Seconds after which all entries are hashed again."""


class Row(NamedTuple):
    """A stored entry."""

    number: int
    line: bytes
    signature: str | None = None


Rows = Callable[[int], Sequence[Row]]
"""Returns the rows from a number on, in order."""


class HashChain:
    """The digests of the entries that were read, and the last row."""

    def __init__(self, location: str) -> None:
        self.location = location
        """Name of the ledger in messages."""
        self.last: Row | None = None
        """The last row that was read."""
        self._digests: list[Digest] = []
        self._hashed_at = -_REHASH_S

    @property
    def lines(self) -> int:
        """Return the number of entries that were read."""
        return len(self._digests)

    @property
    def head(self) -> Digest | None:
        """Return the digest of the last entry, or None for an empty chain."""
        return self.digest(self.lines)

    def digest(self, number: int) -> Digest | None:
        """Return the digest of the entry with this number, or None if it was not read."""
        return self._digests[number - 1] if 1 <= number <= self.lines else None

    def read(self, rows: Rows) -> tuple[bool, list[LedgerEntry]]:
        """Read the entries added since the last call.

        The first value is True if all entries of the chain are returned, because the chain was
        replaced or is read for the first time. Raises EvidenceError if an entry can't be parsed or
        the chain is broken, and the exceptions of `rows`.
        """
        if self.lines and time.monotonic() - self._hashed_at <= _REHASH_S:
            recent = rows(self.lines)
            end = self.lines, self.head
            if recent and (recent[0].number, Digest.from_bytes(recent[0].line)) == end:
                self.last = recent[0]
                return False, self._append(recent[1:])
        all_rows = rows(1)
        if not self._extends_chain(all_rows):
            self.last, self._digests = None, []
        is_complete = self.lines == 0
        entries = self._append(all_rows[self.lines :])
        self._hashed_at = time.monotonic()
        return is_complete, entries

    def _extends_chain(self, rows: Sequence[Row]) -> bool:
        """Return whether these rows begin with the entries that were read."""
        if not 0 < self.lines <= len(rows):
            return False
        first = rows[: self.lines]
        self.last = first[-1]
        return [Digest.from_bytes(row.line) for row in first] == self._digests

    def _append(self, rows: Sequence[Row]) -> list[LedgerEntry]:
        entries, digests, parent = [], list[Digest](), self.head
        for number, row in enumerate(rows, start=self.lines + 1):
            where = f"{self.location}:{number}"
            if row.number != number:
                raise EvidenceError(
                    f"{where}: the chain is broken: the entry after entry {number - 1} has "
                    f"number {row.number}. Entries were removed or inserted. {_RESTORE}"
                )
            entry = LedgerEntry.from_line(row.line, where=where)
            if entry.parent != parent:
                raise EvidenceError(
                    f"{where}: the chain is broken: this entry names {entry.parent} as the digest "
                    f"of the entry before it, which has {parent}. Entry {number} or {number - 1} "
                    f"was changed, or entries were removed or inserted. {_RESTORE}"
                )
            entries.append(entry)
            parent = Digest.from_bytes(row.line)
            digests.append(parent)
        self._digests += digests
        self.last = rows[-1] if rows else self.last
        return entries


_RESTORE = "Restore the ledger from a copy, or keep it unchanged and start a new one elsewhere."


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
    "replay_failed",
    "violation",
    "absolved",
    "conflict",
    "ledger_accepted",
    "ledger_imported",
    "same_registry",
    "overridden",
]
"""`passed`: waits for review. `rejected`: by a reviewer. `reverted`: the guard moved `champion`
from a version that must not serve (`previous_version`) to `version`, or later, once `version` was
verified. `replay_failed`: a server's outputs for the golden vectors of the deployed version differ.
`violation`, `absolved`: written by older releases, without effect. `ledger_accepted`: a person
accepted a shorter or different past of the ledger. `ledger_imported`: the entries before it come
from an older ledger. `same_registry`: `addresses` are one registry. These three concern no model.
`overridden`: while it is the model's last entry, MLflow's server allows `champion` to be moved to
`version` (None: removed). The version that serves is verified nevertheless."""


def now() -> str:
    """Return the current UTC time in ISO 8601, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def actor() -> str:
    """Return `user@host` of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # In a container the user may have no name.
        user = f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


class TwinDigests(Record):
    """The digests of a twin that the ledger stores."""

    sha256: Sha256
    """Digest of the file, or of the manifest of all files with external data."""
    evidence_sha256: Sha256
    golden_sha256: Sha256 | None = None


class ComparedWith(Record):
    """The digests of a comparison with the champion that the ledger stores."""

    record_sha256: Sha256
    """Digest of the whole record in the decision."""
    version: str | None = None
    """The version that served; None if none did."""
    sha256: Sha256 | None = None
    """Digest of that version's file."""

    @classmethod
    def from_decision(cls, decision: Decision) -> ComparedWith | None:
        """Create it from a decision; None if its policy required no comparison."""
        return None if decision.incumbent is None else cls.from_record(decision.incumbent)

    @classmethod
    def from_record(cls, record: ChampionComparison) -> ComparedWith:
        """Create it from the comparison record itself."""
        return cls(record_sha256=record.digest(), version=record.version, sha256=record.sha256)


class LedgerEntry(Record):
    """One event. `version` and `previous_version` are version numbers in `registry`."""

    schema_version: Literal[1] = 1
    at: str = Field(default_factory=now)
    """UTC, ISO 8601."""
    action: Action
    registry: str
    model: str
    version: str | None = None
    sha256: Sha256 | None = None
    """Digest of the bytes that the entry is about."""
    policy_sha256: Sha256 | None = None
    evidence_sha256: Sha256 | None = None
    golden_sha256: Sha256 | None = added_field(None)
    """Digest of the golden vectors that belong to the file."""
    preprocess_sha256: Sha256 | None = added_field(None)
    """Digest of the preprocessing spec that belongs to the file."""
    twin: TwinDigests | None = added_field(None)
    """Digests of the quantized twin that belongs to the file."""
    compared_with: ComparedWith | None = added_field(None)
    """The version that served at the time of the decision, if the policy required a comparison."""
    incumbent: ChampionComparison | None = added_field(None)
    """The service's comparison with that version, if the decision had none."""
    extent: VersionSize | None = added_field(None)
    """Size of the version with all its files."""
    run_id: str | None = None
    made_at: str | None = added_field(None)
    """When the registry created a submitted version. A recreated registry restarts its version
    numbers at one."""
    actor: str = Field(default_factory=actor)
    reason: Prose
    previous_version: str | None = None
    cause: str | None = added_field(None)
    """Cause of the reconciliation: `webhook`, `timer`, or the user who called `gate reconcile`; in
    older entries `delivery <id>`."""
    operation: str | None = added_field(None)
    """ID of the move of `champion` that the entry records; in old conflicts: of a dropped move."""
    addresses: tuple[str, ...] = added_field(())
    """Addresses of the same registry (`gate.ledger.maintenance`)."""
    comment: Prose | None = added_field(None)
    """The reviewer's comment."""
    signers: tuple[str, ...] = added_field(())
    """IDs of the keys that signed the verdict. Empty: no signature was required."""
    measured_by: tuple[str, ...] = added_field(())
    """IDs of other keys that signed the measurement or a twin's statements."""
    approvers: tuple[str, ...] = added_field(())
    """IDs of the keys that signed approvals."""
    parent: Sha256 | None = None
    """Digest of the previous entry; None in the first one. `append` sets it."""

    @property
    def key(self) -> str:
        """Return the registered model with its workspace, in the form that commands take."""
        return key_in(self.registry, self.model)

    @classmethod
    def from_line(cls, line: bytes, *, where: str) -> Self:
        """Parse one entry. Raises EvidenceError, which begins with `where`."""
        try:
            if b"\n" in line:
                raise ValueError("it has several lines")
            return cls.model_validate_json(line)
        except ValueError as error:
            raise EvidenceError(
                f"{where}: not a ledger entry: {first_line(error)}. {_RESTORE}"
            ) from error
