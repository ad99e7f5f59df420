"""Who signs in the pipeline, and whose signatures count: as in the environment, else the project's
own key and trust (`.gate`)."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from gate.errors import DigestMismatch, EvidenceError, Untrusted
from gate.records.evidence import Evidence
from gate.records.layout import EVIDENCE, EVIDENCE_STATEMENT, RECORDS
from gate.signing.local_keys import LocalKeys
from gate.signing.predicates import code_version
from gate.signing.statement import ENVELOPE_LIMIT, SignedStatement
from gate.signing.subjects import statement_subjects
from gate.signing.verification import Signatory, verify_measurement
from gate.storage import files
from gate.storage.digest import Digest
from gate.storage.untrusted_files import read_untrusted
from pipelines import paths

MEASURED = {
    paths.EVIDENCE_STATEMENT: paths.EVIDENCE,
    paths.TWIN / RECORDS / EVIDENCE_STATEMENT: paths.TWIN / RECORDS / EVIDENCE,
}
"""Statements on what was measured, by file, and the evidence that each is about."""


def local_keys() -> LocalKeys:
    """The project's; what it makes is said on stderr."""
    return LocalKeys(paths.state(), partial(print, file=sys.stderr, flush=True))


def signatory() -> Signatory:
    """Who signs what a stage measures: looked at before it measures. Raises KeyUnusable,
    StorageError."""
    return Signatory(local_keys().signing_key(), code_version(paths.project_root()))


def write_measured(
    path: Path, who: Signatory, onnx: Path, evidence: Evidence, *, golden: Digest | None
) -> None:
    """Sign what was measured on `onnx`, as it is in memory, and write the statement.

    Raises KeyUnusable; DigestMismatch where the file is another by now; StorageError.
    """
    subjects = statement_subjects(onnx, evidence, golden=golden)
    files.write_bytes(path, who.measured(evidence, subjects).data)


def measured_statement(path: Path) -> SignedStatement:
    """What a stage signed when it measured. Raises Untrusted, StorageError."""
    try:
        data = read_untrusted(path, limit=ENVELOPE_LIMIT)
    except (EvidenceError, DigestMismatch) as error:
        raise Untrusted(f"what was measured is not signed: {error} Run make repro.") from error
    return SignedStatement.from_bytes(data, what=str(path))


def unvouched(statement: Path, evidence: Path) -> str | None:
    """Why the stage `promote` would refuse what was measured, so that it has to be measured again;
    None where it would not, or nothing was measured and signed yet. Raises PolicyError, KeyUnusable
    and StorageError."""
    if not statement.exists():
        return None
    try:
        verify_measurement(
            measured_statement(statement),
            Evidence.load(evidence),
            trust=local_keys().trust(),
            now=datetime.now(UTC),
        )
    except (Untrusted, EvidenceError) as error:
        return str(error)
    return None
