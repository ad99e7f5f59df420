"""The pipeline's signing key and trust: from the environment, or the project's (`.gate`)."""

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

EVIDENCE_BY_STATEMENT = {
    paths.EVIDENCE_STATEMENT: paths.EVIDENCE,
    paths.TWIN / RECORDS / EVIDENCE_STATEMENT: paths.TWIN / RECORDS / EVIDENCE,
}
"""The evidence that each signed statement covers: path of the statement to path of the evidence."""


def local_keys() -> LocalKeys:
    """Return the project's keys; creating them is reported on stderr."""
    return LocalKeys(paths.state(), partial(print, file=sys.stderr, flush=True))


def signatory() -> Signatory:
    """Return the signing key for measurements, checked before measuring.

    Raises KeyUnusable, StorageError.
    """
    return Signatory(local_keys().signing_key(), code_version(paths.project_root()))


def write_measured(
    path: Path, signatory: Signatory, onnx: Path, evidence: Evidence, *, golden: Digest | None
) -> None:
    """Sign the evidence about `onnx` as it is in memory, and write the statement.

    Raises KeyUnusable; DigestMismatch if the file has changed; StorageError.
    """
    subjects = statement_subjects(onnx, evidence, golden=golden)
    files.write_bytes(path, signatory.sign_measurement(evidence, subjects).data)


def measured_statement(path: Path) -> SignedStatement:
    """Load the signed statement of a measurement. Raises Untrusted, StorageError."""
    try:
        data = read_untrusted(path, limit=ENVELOPE_LIMIT)
    except (EvidenceError, DigestMismatch) as error:
        raise Untrusted(f"what was measured is not signed: {error} Run make repro.") from error
    return SignedStatement.from_bytes(data, label=str(path))


def reason_to_remeasure(statement: Path, evidence: Path) -> str | None:
    """Return why the stage `promote` would reject the measurement, so that it must be repeated.

    Returns None if `promote` would accept it, or if there is no signed measurement yet. Raises
    PolicyError, KeyUnusable, StorageError.
    """
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
