"""One line of the ledger: what happened to a version, when, and who wrote it."""

from __future__ import annotations

import getpass
import os
import socket
from datetime import UTC, datetime
from typing import Literal, Self

from pydantic import Field

from gate.decision.decision import Decision
from gate.errors import EvidenceError, first_line
from gate.records.incumbent import Incumbent
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
    "ledger_imported",
    "same_registry",
]
"""`passed`: waits for review; `rejected`: by a reviewer; `reverted`: the guard took `champion` back
from a version that must not serve (`previous_version`), to `version`; or gave it to `version`
later, as soon as that could be proven; `absolved`: a violation was lifted, the bytes proven anew;
`ledger_accepted`: a person said that a shorter or another past of the ledger itself is meant;
`ledger_imported`: the lines before it are those of an older ledger; `same_registry`: `addresses`
are one registry. These three are about no model."""


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
    """What the ledger knows of a twin."""

    sha256: Sha256
    """As evidence counts it: of the file; with external data, of the manifest of all files."""
    evidence_sha256: Sha256
    golden_sha256: Sha256 | None = None


class ComparedWith(Record):
    """What the ledger knows of a comparison."""

    record_sha256: Sha256
    """Of the whole record in the decision."""
    version: str | None = None
    """None: none served."""
    sha256: Sha256 | None = None
    """Of that version's file."""

    @classmethod
    def of(cls, decision: Decision) -> ComparedWith | None:
        """Of a decision; None where its policy did not ask."""
        return None if decision.incumbent is None else cls.of_record(decision.incumbent)

    @classmethod
    def of_record(cls, record: Incumbent) -> ComparedWith:
        """Of the record itself."""
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
    incumbent: Incumbent | None = later(None)
    """What the service itself found of that version, where whoever decided had left it open."""
    extent: Extent | None = later(None)
    """How much the version was with all that is beside its file."""
    run_id: str | None = None
    made_at: str | None = later(None)
    """When the version was made, by the registry, of one that was handed in: a registry that was
    made anew counts from one again."""
    actor: str = Field(default_factory=actor)
    reason: Prose
    previous_version: str | None = None
    cause: str | None = later(None)
    """What made the service look: `delivery <id>`, `timer`, or who called `gate reconcile`."""
    operation: str | None = later(None)
    """Id of the move of `champion` that the line tells of (`gate.ledger.journal`); of a conflict:
    that it was dropped."""
    addresses: tuple[str, ...] = later(())
    """Of one registry (`gate.ledger.addresses`)."""
    comment: Prose | None = later(None)
    """What the reviewer wrote beside his word."""
    signers: tuple[str, ...] = later(())
    """Ids of the keys that vouched for the verdict; none: nobody was asked to sign."""
    measured_by: tuple[str, ...] = later(())
    """Ids of further keys that signed what was measured, or a twin's statements: who signed the
    verdict may be somebody else."""
    approvers: tuple[str, ...] = later(())
    """Ids of the keys by which reviewers approved."""
    parent: Sha256 | None = None
    """Digest of the line before; None in the first line. `append` sets it."""

    @classmethod
    def of_line(cls, line: bytes, *, where: str) -> Self:
        """Read one line. Raises EvidenceError, with its place in front."""
        try:
            if b"\n" in line:
                raise ValueError("it has several lines")
            return cls.model_validate_json(line)
        except ValueError as error:
            raise EvidenceError(
                f"{where}: not a ledger entry: {first_line(error)}. Restore it from a copy; or "
                "keep it as it is and start anew in another place."
            ) from error
