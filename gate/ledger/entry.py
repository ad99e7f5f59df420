"""One ledger entry, and the hash chain of entries."""

from __future__ import annotations

import functools
import getpass
import hashlib
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
    """An identity without what makes no difference: user, trailing slash, case of the host."""
    address, workspace = split_identity(redacted(address))
    text = address.rstrip("/")
    parts = urlsplit(text)
    if parts.scheme in _PORTS and parts.hostname:
        port = f":{parts.port}" if parts.port not in (None, _PORTS[parts.scheme]) else ""
        text = f"{parts.scheme}://{parts.hostname.lower()}{port}{parts.path}"
    return in_workspace(text, workspace)


# Each line holds the SHA-256 of the line before it. The last line that was read is read again each
# time: if it changed or disappeared, all lines are read again. All lines are hashed again from time
# to time, to detect edits before it.
_REHASH_S = 600.0
"""After which the lines that were read are hashed again."""

_WIDTH = 32


class Row(NamedTuple):
    """A line as it is kept."""

    number: int
    line: bytes
    signature: str | None = None


Rows = Callable[[int], Sequence[Row]]
"""Gives the rows from a number on, in their order."""


class HashChain:
    """The digests of the lines that were read, and the last row."""

    def __init__(self, place: str) -> None:
        self.place = place
        """What messages call it."""
        self.last: Row | None = None
        """As it is kept now."""
        self._digests = bytearray()
        self._hashed_at = -_REHASH_S

    @property
    def lines(self) -> int:
        """How many were read."""
        return len(self._digests) // _WIDTH

    def digest(self, number: int) -> Digest | None:
        """Return the digest of a line that was read, or None where there is no such line."""
        if not 1 <= number <= self.lines:
            return None
        return Digest(bytes(self._digests[(number - 1) * _WIDTH : number * _WIDTH]).hex())

    def read(self, rows: Rows) -> tuple[bool, list[LedgerEntry]]:
        """Read the lines added since the last call, and whether they are all lines of the chain.

        The first value is True if all lines are returned, because the chain was replaced or is read
        for the first time.

        Raises EvidenceError where a line can't be parsed or the chain is broken, and the exceptions
        of `rows`.
        """
        if self.lines and time.monotonic() - self._hashed_at <= _REHASH_S:
            found = rows(self.lines)
            if found and self._is_last(found[0]):
                self.last = found[0]
                return False, self._take(found[1:])
        everything = rows(1)
        if not self._holds(everything):
            self.last, self._digests = None, bytearray()
        anew = self.lines == 0
        entries = self._take(everything[self.lines :])
        self._hashed_at = time.monotonic()
        return anew, entries

    def _is_last(self, row: Row) -> bool:
        return row.number == self.lines and Digest.of_bytes(row.line) == self.digest(self.lines)

    def _holds(self, rows: Sequence[Row]) -> bool:
        """Return whether these rows begin with the lines that were read."""
        if not 0 < self.lines <= len(rows):
            return False
        first = rows[: self.lines]
        self.last = first[-1]
        return b"".join(hashlib.sha256(row.line).digest() for row in first) == self._digests

    def _take(self, rows: Sequence[Row]) -> list[LedgerEntry]:
        entries, digests, before = [], bytearray(), self.digest(self.lines)
        for number, row in enumerate(rows, start=self.lines + 1):
            where = f"{self.place}:{number}"
            if row.number != number:
                raise EvidenceError(
                    f"{where}: the chain is broken: the line that follows line {number - 1} has "
                    f"number {row.number}. Lines were removed or put in. {_RESTORE}"
                )
            entry = LedgerEntry.from_line(row.line, where=where)
            if entry.parent != before:
                raise EvidenceError(
                    f"{where}: the chain is broken: this line follows a line with digest "
                    f"{entry.parent}, the line before it has {before}. Line {number} or line "
                    f"{number - 1} was changed, or lines were removed or put in. {_RESTORE}"
                )
            entries.append(entry)
            before = Digest.of_bytes(row.line)
            digests += bytes.fromhex(before.hex)
        self._digests += digests
        self.last = rows[-1] if rows else self.last
        return entries


_RESTORE = "Restore it from a copy; or keep it as it is and start anew in another place."


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
"""`passed`: waits for review; `rejected`: by a reviewer; `reverted`: the guard took `champion` back
from a version that must not serve (`previous_version`), to `version`; or gave it to `version`
later, as soon as that could be proven; `replay_failed`: a server answered the golden vectors of the
deployed version otherwise; `violation`, `absolved`: of older versions, without effect;
`ledger_accepted`: a person said that a shorter or another past of the ledger itself is meant;
`ledger_imported`: the lines before it are those of an older ledger; `same_registry`: `addresses`
are one registry. These three are about no model. `overridden`: while it is the model's last entry,
MLflow's server lets `champion` be moved to `version` (None: away), for the reason given; what
serves is examined all the same."""


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


class TwinDigests(Record):
    """The digests of a twin that the ledger stores."""

    sha256: Sha256
    """As evidence counts it: of the file; with external data, of the manifest of all files."""
    evidence_sha256: Sha256
    golden_sha256: Sha256 | None = None


class ComparedWith(Record):
    """The digests of a comparison with the champion that the ledger stores."""

    record_sha256: Sha256
    """Of the whole record in the decision."""
    version: str | None = None
    """None: none served."""
    sha256: Sha256 | None = None
    """Of that version's file."""

    @classmethod
    def from_decision(cls, decision: Decision) -> ComparedWith | None:
        """Create it from a decision; None where its policy required no comparison."""
        return None if decision.incumbent is None else cls.from_record(decision.incumbent)

    @classmethod
    def from_record(cls, record: ChampionComparison) -> ComparedWith:
        """Create it from the comparison record itself."""
        return cls(record_sha256=record.digest(), version=record.version, sha256=record.sha256)


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
    """Digest of the bytes that the line is about."""
    policy_sha256: Sha256 | None = None
    evidence_sha256: Sha256 | None = None
    golden_sha256: Sha256 | None = added_field(None)
    """Digest of the golden vectors that belong to the file."""
    preprocess_sha256: Sha256 | None = added_field(None)
    """Digest of the preprocessing spec that belongs to the file."""
    twin: TwinDigests | None = added_field(None)
    """Digests of the quantized twin that belongs to the file."""
    compared_with: ComparedWith | None = added_field(None)
    """The version that served when it was decided, where the policy required the comparison."""
    incumbent: ChampionComparison | None = added_field(None)
    """The service's own comparison with that version, where the decision had none."""
    extent: VersionSize | None = added_field(None)
    """Size of the version with all its files."""
    run_id: str | None = None
    made_at: str | None = added_field(None)
    """When the registry created a submitted version. A recreated registry counts its versions from
    one again."""
    actor: str = Field(default_factory=actor)
    reason: Prose
    previous_version: str | None = None
    cause: str | None = added_field(None)
    """Cause of the reconciliation: `webhook`, `timer`, or the user who called `gate reconcile`; in
    older entries `delivery <id>`."""
    operation: str | None = added_field(None)
    """ID of the move of `champion` that the entry records; in old conflicts: of a dropped one."""
    addresses: tuple[str, ...] = added_field(())
    """Of one registry (`gate.ledger.maintenance`)."""
    comment: Prose | None = added_field(None)
    """The reviewer's comment."""
    signers: tuple[str, ...] = added_field(())
    """IDs of the keys that signed the verdict; none: no signature was required."""
    measured_by: tuple[str, ...] = added_field(())
    """IDs of further keys that signed the measurement, or a twin's statements: they may differ from
    the signers of the verdict."""
    approvers: tuple[str, ...] = added_field(())
    """IDs of the keys by which reviewers approved."""
    parent: Sha256 | None = None
    """Digest of the line before; None in the first line. `append` sets it."""

    @property
    def key(self) -> str:
        """The registered model with its workspace, as commands take it."""
        return key_in(self.registry, self.model)

    @classmethod
    def from_line(cls, line: bytes, *, where: str) -> Self:
        """Read one line. Raises EvidenceError, with its place in front."""
        try:
            if b"\n" in line:
                raise ValueError("it has several lines")
            return cls.model_validate_json(line)
        except ValueError as error:
            raise EvidenceError(
                f"{where}: not a ledger entry: {first_line(error)}. {_RESTORE}"
            ) from error
