"""Whether evidence is about these files, and describes them as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gate.bounded.limits import ChildLimits
from gate.errors import DigestMismatch, EvidenceError
from gate.onnxfile.release_file import is_release
from gate.records.evidence import Evidence, Subject
from gate.storage.digest import Digest
from gate.storage.files import wrong_name


def verify_files(path: Path, evidence: Evidence) -> None:
    """Hash the file, with external data and parts, and compare. Of a release the part that was
    exchanged is named. Raises as `digest_of_model`, and DigestMismatch for other bytes."""
    subject = evidence.subject
    try:
        actual = digest_of_model(path, external_data=subject.external_data)
        subject.sha256.verify(actual, what=str(path))
    except DigestMismatch:
        verify_parts(path, evidence)
        raise


def verify_parts(path: Path, evidence: Evidence) -> None:
    """The same of each part of a release by itself."""
    for name, part in evidence.subject.parts.items():
        measured = evidence.parts.get(name)
        if measured is None or wrong_name(part.file):
            continue  # which `verify_description` says
        file = path.parent / part.file
        what = f"the part {name} ({file})"
        if not file.is_file():
            raise DigestMismatch(f"{what} is missing. Bring it, or measure anew.")
        files = measured.subject.external_data
        part.sha256.verify(digest_of_model(file, external_data=files), what=what)


def verify_description(path: Path, evidence: Evidence, limits: ChildLimits | None) -> None:
    """What is uploaded follows the subject (its external data, its parts): it must be the file's
    own. What the chain of a release takes and gives, only running it tells.

    `limits`: within which a child reads the files; None: they are our own. Raises EvidenceError,
    and as `subject_within`.
    """
    from gate.onnxfile.foreign import release_within, subject_within

    described = evidence.subject
    if not described.parts and not is_release(path):
        _verify_described(described, subject_within(path, limits), path)
        return
    files = release_within(path, limits)
    whole = files.subject(inputs=described.inputs, outputs=described.outputs)
    _verify_described(described, whole, path)
    for name, part in files.parts.items():
        measured = evidence.parts.get(name)
        if measured is None:
            raise EvidenceError(
                f"the evidence says nothing of the part {name} of {path}. It was edited: measure "
                "and decide again."
            )
        _verify_described(measured.subject, part.subject, part.path)


def _verify_described(described: Subject, found: Subject, path: Path) -> None:
    stated, file = described.to_plain(), found.to_plain()
    other = sorted(field for field in {**file, **stated} if file.get(field) != stated.get(field))
    if other:
        raise EvidenceError(
            f"the evidence describes {path} otherwise than it is: "
            f"{', '.join(f'{name} {stated.get(name)}, not {file.get(name)}' for name in other)}. "
            "It was edited, or made by another version of the gate: measure and decide again."
        )


def digest_of_model(path: Path, *, external_data: Sequence[str]) -> Digest:
    """Digest of a model as evidence counts it: of the file, or of file and external data.

    The names come from the evidence, so that no byte of the file is parsed. Raises StorageError if
    the file can't be read, EvidenceError for names that lead elsewhere, DigestMismatch where data
    is missing, or the file is a text.
    """
    for name in external_data:
        if wrong_name(name):
            raise EvidenceError(
                f"the evidence names the data file {name[:300]!r}, expected one inside of the "
                "model's folder. It was edited: measure and decide again."
            )
        if not (path.parent / name).is_file():
            raise DigestMismatch(f"{path} has no data file {name}. Bring it, or promote it anew.")
    if external_data:
        return Digest.of_manifest(path.parent, (path.name, *external_data))
    digest = Digest.of_file(path)
    if _is_text(path):
        raise DigestMismatch(f"{path} is a text, no ONNX model. It was exchanged.")
    return digest


def _is_text(path: Path) -> bool:
    """True for JSON: the digest of a model with external data is that of such a text, and no
    protobuf begins so."""
    with path.open("rb") as stream:
        return stream.read(1) == b"{"
