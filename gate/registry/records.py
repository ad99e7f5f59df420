"""The gate's records beside a version's file: what was measured and decided, for later.

They say nothing by themselves, since whoever may write to the registry may write them. The ledger
holds the digests that they must have.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gate.decision.decision import Decision
from gate.errors import EvidenceError
from gate.records.evidence import Evidence
from gate.records.names import DECISION, EVIDENCE

RECORDS = "gate"
"""The folder of the records, beside the ONNX file."""


@dataclass(frozen=True)
class Records:
    """Evidence and decision of one version."""

    evidence: Evidence
    decision: Decision

    def write(self, folder: Path) -> None:
        """Write both. Raises StorageError."""
        self.evidence.save(folder / EVIDENCE)
        self.decision.save(folder / DECISION)

    @classmethod
    def beside(cls, onnx_path: Path) -> Records:
        """The records beside a downloaded file. Raises EvidenceError where they are not whole."""
        folder = onnx_path.parent / RECORDS
        missing = [name for name in (EVIDENCE, DECISION) if not (folder / name).is_file()]
        if missing:
            raise EvidenceError(
                f"the version has no {' and no '.join(missing)} beside its file: it was not "
                "promoted by this version of the gate. Promote the file anew."
            )
        return cls(Evidence.load(folder / EVIDENCE), Decision.load(folder / DECISION))
