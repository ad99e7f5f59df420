"""The gate's records beside a version's file: what was measured and decided, for later.

They say nothing by themselves, since whoever may write to the registry may write them. The ledger
holds the digests that they must have.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gate.attestation.statements import Statements
from gate.decision.decision import Decision
from gate.errors import DigestMismatch, EvidenceError, StorageError
from gate.records.evidence import Evidence
from gate.records.names import (
    DECISION,
    DECISION_STATEMENT,
    EVIDENCE,
    EVIDENCE_STATEMENT,
    TREND,
)
from gate.records.trend import Trend
from gate.storage.digest import Digest
from gate.storage.foreign import RECORD_LIMIT, read_foreign

RECORDS = "gate"
"""The folder of the records, beside the ONNX file."""
_TREND_LIMIT = 1 << 16
"""Bytes of a trend at most: twenty rows take some 5 kB."""


@dataclass(frozen=True)
class Records:
    """Evidence and decision of one version."""

    evidence: Evidence
    decision: Decision
    statements: Statements | None = None
    """Who vouches for both; None: nobody signed."""

    def write(self, folder: Path) -> None:
        """Write them. Raises StorageError."""
        self.evidence.save(folder / EVIDENCE)
        self.decision.save(folder / DECISION)
        if self.statements is not None:
            self.statements.write(folder)

    @classmethod
    def beside(cls, onnx_path: Path, *, evidence: Digest | None = None) -> Records:
        """The records beside a downloaded file; the evidence with this digest, where one is pinned.

        Raises EvidenceError where they are not whole, DigestMismatch for other evidence,
        StorageError.
        """
        folder = onnx_path.parent / RECORDS
        missing = [name for name in (EVIDENCE, DECISION) if not (folder / name).is_file()]
        if missing:
            raise EvidenceError(
                f"the version has no {' and no '.join(missing)} beside its file: it was not "
                "promoted by this version of the gate. Promote the file anew."
            )
        measured = evidence_beside(onnx_path, sha256=evidence)
        return cls(measured, decision_beside(onnx_path), statements_beside(onnx_path))


def evidence_beside(onnx_path: Path, *, sha256: Digest | None) -> Evidence:
    """The evidence beside a downloaded file. Raises as `Records.beside`."""
    data = read_foreign(onnx_path.parent / RECORDS / EVIDENCE, limit=RECORD_LIMIT)
    return Evidence.from_foreign(data, what="the evidence beside the version", sha256=sha256)


def decision_beside(onnx_path: Path) -> Decision:
    """The decision beside a downloaded file. Raises as `Records.beside`."""
    data = read_foreign(onnx_path.parent / RECORDS / DECISION, limit=RECORD_LIMIT)
    return Decision.from_foreign(data, what="the decision beside the version")


def statements_beside(onnx_path: Path) -> Statements | None:
    """The statements beside a downloaded file; None where there is none at all. Raises Untrusted
    where one of the two is missing or malformed, StorageError."""
    folder = onnx_path.parent / RECORDS
    if not any((folder / name).exists() for name in (EVIDENCE_STATEMENT, DECISION_STATEMENT)):
        return None
    return Statements.beside(folder)


def trend_beside(onnx_path: Path) -> Trend:
    """The trend beside a downloaded file. It is there to be looked at, and anybody may have written
    it: what is not there, or can't be read, is an empty one."""
    try:
        data = read_foreign(onnx_path.parent / RECORDS / TREND, limit=_TREND_LIMIT)
        return Trend.from_foreign(data, what="the trend beside the version")
    except (DigestMismatch, EvidenceError, StorageError):
        return Trend()
