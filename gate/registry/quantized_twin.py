"""The int8 twin, stored in the same version as the exact file."""

from __future__ import annotations

import shutil
from pathlib import Path

from gate.errors import StorageError
from gate.golden.folder import GOLDEN_JSON
from gate.ledger.entry import TwinDigests
from gate.records.layout import GOLDEN, RECORDS
from gate.registry.release import EvaluatedFile, GoldenFolder
from gate.registry.version_files import Records, twin_file


def write_twin(twin: EvaluatedFile, folder: Path) -> None:
    """Copy a twin into `folder`, in its layout next to the exact file. Raises StorageError."""
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


def twin_in(folder: Path, digests: TwinDigests | None = None) -> EvaluatedFile:
    """The twin in a folder laid out as above, with these digests where they are pinned.

    Raises EvidenceError where it is not whole, DigestMismatch where evidence or golden vectors
    are others; StorageError.
    """
    path = twin_file(folder)
    evidence = None if digests is None else digests.evidence_sha256
    vectors = None if digests is None else digests.golden_sha256
    records = Records.load(path, evidence=evidence)
    golden = folder / GOLDEN
    there = (golden / GOLDEN_JSON).exists()
    return EvaluatedFile(
        onnx_path=path,
        evidence=records.evidence,
        decision=records.decision,
        statements=records.statements,
        golden=GoldenFolder.open(golden, sha256=vectors) if there else None,
    )
