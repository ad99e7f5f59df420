"""The quantized twin of a release: a folder beside the exact file, so that both move together.

quantized/model.onnx           the file (whatever its name), with its external data
quantized/gate/…               its own evidence and decision
quantized/golden/…             its own golden vectors
"""

from __future__ import annotations

import shutil
from pathlib import Path

from gate.errors import EvidenceError, StorageError
from gate.golden.folder import GOLDEN_JSON
from gate.ledger.entry import TwinDigests
from gate.registry.judged import GoldenFolder, Judged
from gate.registry.port import GOLDEN
from gate.registry.records import RECORDS, Records

QUANTIZED = "quantized"
"""The folder beside the exact file; a deployed release calls its slot so, too."""


def digests_of(twin: Judged) -> TwinDigests:
    """Of a twin as it was opened."""
    return TwinDigests(
        sha256=twin.decision.subject_sha256,
        evidence_sha256=twin.decision.evidence_sha256,
        golden_sha256=twin.golden_sha256,
    )


def lay_out(twin: Judged, folder: Path) -> None:
    """Copy a twin into `folder`, as it goes beside the exact file. Raises StorageError."""
    try:
        for name in (twin.onnx_path.name, *twin.evidence.subject.external_data):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(twin.onnx_path.parent / name, target)
        if twin.golden is not None:
            shutil.copytree(twin.golden.path, folder / GOLDEN)
    except OSError as error:
        raise StorageError(
            f"cannot copy the twin {twin.onnx_path} to {folder}: {error.strerror or error}. "
            "Free space or fix permissions, then repeat."
        ) from error
    Records(twin.evidence, twin.decision, twin.statements).write(folder / RECORDS)


def twin_in(folder: Path, digests: TwinDigests | None = None) -> Judged:
    """The twin in a folder laid out as above, with these digests where they are pinned.

    Raises EvidenceError where it is not whole, DigestMismatch where evidence or golden vectors
    are others; StorageError.
    """
    path = twin_file(folder)
    evidence = None if digests is None else digests.evidence_sha256
    vectors = None if digests is None else digests.golden_sha256
    records = Records.beside(path, evidence=evidence)
    golden = folder / GOLDEN
    there = (golden / GOLDEN_JSON).exists()
    return Judged(
        onnx_path=path,
        evidence=records.evidence,
        decision=records.decision,
        statements=records.statements,
        golden=GoldenFolder.open(golden, sha256=vectors) if there else None,
    )


def twin_file(folder: Path) -> Path:
    """The one ONNX file of the folder. Raises EvidenceError."""
    found = sorted(p for p in folder.glob("*.onnx") if p.is_file() and not p.is_symlink())
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise EvidenceError(
            f"{folder} holds the ONNX files {names}, expected exactly one: the quantized twin. "
            "Make it with gate quantize, judge it with gate check --report, and put both there."
        )
    return found[0]
