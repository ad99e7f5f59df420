"""Of which bytes a statement about a judged file speaks: by name, as they lie beside a version."""

from __future__ import annotations

from pathlib import Path

from gate.errors import DigestMismatch, EvidenceError
from gate.onnxfile.description import verify_parts
from gate.records import names
from gate.records.evidence import Evidence
from gate.storage.digest import Digest
from gate.storage.files import wrong_name

GOLDEN = f"{names.GOLDEN}/golden.json"
PREPROCESSING = "preprocessing"
"""By the digest of the spec's canonical JSON."""


def subjects_of(
    onnx_path: Path, evidence: Evidence, *, golden: Digest | None, preprocessing: bool = True
) -> dict[str, Digest]:
    """The file with its external data, its golden vectors, and the spec of its preprocessing
    (`preprocessing`: whether that goes with it).

    Raises DigestMismatch where the files are not those of the evidence, EvidenceError where it
    names data elsewhere, StorageError.
    """
    subjects = _files(onnx_path, evidence)
    if golden is not None:
        subjects[GOLDEN] = golden
    if preprocessing and evidence.source.preprocess_sha256 is not None:
        subjects[PREPROCESSING] = evidence.source.preprocess_sha256
    return subjects


def _files(onnx_path: Path, evidence: Evidence) -> dict[str, Digest]:
    subject = evidence.subject
    if not subject.external_data:
        return {onnx_path.name: subject.sha256}
    found = {}
    for name in (onnx_path.name, *subject.external_data):
        if wrong_name(name):
            raise EvidenceError(
                f"the evidence names the data file {name[:300]!r}, expected one inside of the "
                "model's folder. It was edited: measure and decide again."
            )
        if not (onnx_path.parent / name).is_file():
            raise DigestMismatch(f"{onnx_path} has no file {name}. Bring it, or measure anew.")
        found[name] = Digest.of_file(onnx_path.parent / name)
    # What was measured is the manifest of them all: none was exchanged since.
    manifest = Digest.of_json({name: digest.hex for name, digest in found.items()})
    if manifest != subject.sha256:
        verify_parts(onnx_path, evidence)
    subject.sha256.verify(manifest, what=str(onnx_path))
    return found
