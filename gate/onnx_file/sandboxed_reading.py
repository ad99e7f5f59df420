"""Read an untrusted ONNX file in the sandbox."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gate.errors import DigestMismatch, EvidenceError, LimitExceeded, OnnxFileError
from gate.onnx_file.reading import read_subject
from gate.onnx_file.release_file import ReleaseFile, ReleaseFiles, is_release_file
from gate.onnx_file.tested_file import TestedFile, quantized_from
from gate.records.evidence import Evidence, Subject
from gate.sandbox.limits import SandboxLimits, memory_text
from gate.sandbox.process import run_in_sandbox
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


def verify_description(path: Path, evidence: Evidence, limits: SandboxLimits | None) -> None:
    """Verify that the subject (its external data, its parts) is the file's own, because the upload
    follows it. The inputs and outputs of a chain are not verified, since only a run of it shows
    them. `limits`: of the child that reads the files; None: the files are trusted. Raises
    EvidenceError, and as `subject_within`."""

    described = evidence.subject
    if not described.parts and not is_release_file(path):
        _verify_described(described, read_subject_in_sandbox(path, limits), path)
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


# A file of 20 MB can hold ten million empty nodes, which take 3.5 GB once they are parsed.
def read_subject_in_sandbox(path: Path, limits: SandboxLimits | None) -> Subject:
    """Run `read_subject`, or `ReleaseFiles.subject` for a release, in a child; None: the file is
    trusted, and is read in this process. Names and bytes that the child reports are verified
    here. Raises LimitExceeded and EvidenceError besides, StorageError; PolicyError for an
    invalid release file."""
    if is_release_file(path):
        return release_within(path, limits).subject()
    if limits is None:
        return read_subject(path)
    plain = _called("described", path, limits=limits)
    subject = Subject.from_json(json.dumps(plain))
    files = subject.external_data
    wrong = [name for name in files if wrong_name(name)]
    if wrong:
        raise OnnxFileError(f"{path}: {wrong[0]!r} can't be a data file's name. Do not trust it.")
    hashed = Digest.of_manifest(path.parent, (path.name, *files)) if files else Digest.of_file(path)
    subject.sha256.verify(hashed, what=str(path))
    return subject


def release_within(path: Path, limits: SandboxLimits | None) -> ReleaseFiles:
    """The files that a release file names, each read as by `subject_within`; raises as that. The
    release file itself is a short list of names, and no child reads it."""
    file = ReleaseFile.load(path)
    parts = {}
    for name, part in file.parts.items():
        place = path.parent / part.file
        if is_release_file(place):
            raise OnnxFileError(
                f"{path}: the part {name} is {part.file}, expected an ONNX file: a release is made "
                "of files, not of releases."
            )
        parts[name] = TestedFile(place, read_subject_in_sandbox(place, limits))
    return ReleaseFiles(path, file, parts)


def origin_within(path: Path, limits: SandboxLimits | None) -> str | None:
    """Run `quantized_from` in a child; None: the file is trusted, and is read in this process.

    Raises LimitExceeded and EvidenceError besides.
    """
    if limits is None:
        return quantized_from(path)
    origin = _called("origin", path, limits=limits)
    return None if origin is None else str(origin)


def check_size(path: Path, limits: SandboxLimits) -> None:
    """Raise LimitExceeded for a file that fills the memory before it is parsed. OnnxFileError where
    there is none."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise OnnxFileError(f"cannot read {path}: {error.strerror}. Name an ONNX file.") from error
    if size > limits.memory_bytes:
        raise LimitExceeded(
            f"{path} has {memory_text(size)}, and whoever reads it may take "
            f"{memory_text(limits.memory_bytes)} of memory. It was not read. If it is trusted, "
            "allow more with --memory-limit."
        )


def described(path: str) -> dict[str, Any]:
    """The child's side of `subject_within`."""
    return read_subject(Path(path)).to_plain()


def origin(path: str) -> str | None:
    """The child's side of `origin_within`."""
    return quantized_from(Path(path))


def _called(function: str, path: Path, *, limits: SandboxLimits) -> Any:
    if path.is_file():
        check_size(path, limits)
    what = f"reading {path.name}"
    return run_in_sandbox(f"{__name__}:{function}", {"path": str(path)}, limits=limits, what=what)
