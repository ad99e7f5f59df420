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
    """Verify the digest of a file with its external data and parts.

    Raises DigestMismatch, which names the changed part of a release, and the exceptions of
    `digest_of_model`."""
    subject = evidence.subject
    try:
        actual = digest_of_model(path, external_data=subject.external_data)
        subject.sha256.verify(actual, label=str(path))
    except DigestMismatch:
        verify_parts(path, evidence)
        raise


def verify_parts(path: Path, evidence: Evidence) -> None:
    """Verify the digest of each part of a release. Raises the exceptions of `verify_files`."""
    for name, part in evidence.subject.parts.items():
        measured = evidence.parts.get(name)
        if measured is None or wrong_name(part.file):
            continue  # `verify_description` reports this
        file = path.parent / part.file
        what = f"the part {name} ({file})"
        if not file.is_file():
            raise DigestMismatch(f"{what} is missing. Restore it, or measure the release again.")
        files = measured.subject.external_data
        part.sha256.verify(digest_of_model(file, external_data=files), label=what)


def verify_description(path: Path, evidence: Evidence, limits: SandboxLimits | None) -> None:
    """Verify that the evidence's subject describes the file, because the upload relies on it.

    The inputs and outputs of a chain are not verified, because that needs a run of it. limits:
    limits of the child process that reads the files; None: the files are trusted. Raises
    EvidenceError, and the exceptions of `read_subject_in_sandbox`."""
    stated = evidence.subject
    if not stated.parts and not is_release_file(path):
        _verify_subject(stated, read_subject_in_sandbox(path, limits), path)
        return
    files = release_within(path, limits)
    actual = files.subject(inputs=stated.inputs, outputs=stated.outputs)
    _verify_subject(stated, actual, path)
    for name, part in files.parts.items():
        measured = evidence.parts.get(name)
        if measured is None:
            raise EvidenceError(
                f"the evidence does not contain the part {name} of {path}. The evidence was "
                "edited. Measure and decide again."
            )
        _verify_subject(measured.subject, part.subject, part.path)


def _verify_subject(stated: Subject, actual: Subject, path: Path) -> None:
    old, new = stated.to_plain(), actual.to_plain()
    wrong = sorted(field for field in {**new, **old} if new.get(field) != old.get(field))
    if wrong:
        raise EvidenceError(
            f"the evidence does not describe {path}: "
            f"{', '.join(f'{name} {old.get(name)}, not {new.get(name)}' for name in wrong)}. "
            "The evidence was edited or made by another version of the gate. Measure and decide "
            "again."
        )


def digest_of_model(path: Path, *, external_data: Sequence[str]) -> Digest:
    """Return the digest of a model as in the evidence: of the file, or of file and external data.

    external_data: names from the evidence, so that the file is not parsed. Raises StorageError if
    the file can't be read, EvidenceError for names outside of the folder, DigestMismatch if data is
    missing or the file is a text.
    """
    for name in external_data:
        if wrong_name(name):
            raise EvidenceError(
                f"the evidence names the data file {name[:300]!r}, expected one inside of the "
                "model's folder. The evidence was edited. Measure and decide again."
            )
        if not (path.parent / name).is_file():
            raise DigestMismatch(
                f"{path}: the data file {name} is missing. Restore it, or promote the file again."
            )
    if external_data:
        return Digest.from_manifest(path.parent, (path.name, *external_data))
    digest = Digest.from_file(path)
    if _is_text(path):
        raise DigestMismatch(f"{path} is a text, not an ONNX model. It was replaced.")
    return digest


def _is_text(path: Path) -> bool:
    """Return whether a file starts like JSON.

    The digest of a model with external data is that of a JSON manifest, so a file with the text of
    that manifest would have the same digest. No protobuf starts like JSON."""
    with path.open("rb") as stream:
        return stream.read(1) == b"{"


# A file of 20 MB can contain ten million empty nodes, which take 3.5 GB once they are parsed.
def read_subject_in_sandbox(path: Path, limits: SandboxLimits | None) -> Subject:
    """Run `read_subject`, or `ReleaseFiles.subject` for a release, in a child process.

    limits: None means that the file is trusted and read in this process. The names and digests that
    the child reports are verified here. Raises the exceptions of `read_subject`, LimitExceeded,
    EvidenceError, StorageError, and PolicyError for an invalid release file."""
    if is_release_file(path):
        return release_within(path, limits).subject()
    if limits is None:
        return read_subject(path)
    plain = _run_child("describe_in_child", path, limits=limits)
    subject = Subject.from_json(json.dumps(plain))
    files = subject.external_data
    wrong = [name for name in files if wrong_name(name)]
    if wrong:
        raise OnnxFileError(
            f"{path}: {wrong[0]!r} is not a valid name of a data file. Do not trust this file."
        )
    hashed = (
        Digest.from_manifest(path.parent, (path.name, *files)) if files else Digest.from_file(path)
    )
    subject.sha256.verify(hashed, label=str(path))
    return subject


def release_within(path: Path, limits: SandboxLimits | None) -> ReleaseFiles:
    """Return the files of a release, each read with `read_subject_in_sandbox`.

    The release file itself is small and is read in this process. Raises the exceptions of
    `read_subject_in_sandbox`."""
    file = ReleaseFile.load(path)
    parts = {}
    for name, part in file.parts.items():
        part_path = path.parent / part.file
        if is_release_file(part_path):
            raise OnnxFileError(
                f"{path}: the part {name} is {part.file}, expected an ONNX file: a release can't "
                "contain releases."
            )
        parts[name] = TestedFile(part_path, read_subject_in_sandbox(part_path, limits))
    return ReleaseFiles(path, file, parts)


def origin_within(path: Path, limits: SandboxLimits | None) -> str | None:
    """Run `quantized_from` in a child process; without limits, in this process.

    Raises the exceptions of `quantized_from`, LimitExceeded and EvidenceError.
    """
    if limits is None:
        return quantized_from(path)
    origin = _run_child("origin_in_child", path, limits=limits)
    return None if origin is None else str(origin)


def check_size(path: Path, limits: SandboxLimits) -> None:
    """Raise LimitExceeded for a file larger than the memory limit, OnnxFileError if unreadable."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise OnnxFileError(f"cannot read {path}: {error.strerror}. Name an ONNX file.") from error
    if size > limits.memory_bytes:
        raise LimitExceeded(
            f"{path} has {memory_text(size)}, but the process that reads it may use only "
            f"{memory_text(limits.memory_bytes)} of memory. It was not read. If the file is "
            "trusted, allow more with --memory-limit."
        )


def describe_in_child(path: str) -> dict[str, Any]:
    """Run `read_subject` in the child process."""
    return read_subject(Path(path)).to_plain()


def origin_in_child(path: str) -> str | None:
    """Run `quantized_from` in the child process."""
    return quantized_from(Path(path))


def _run_child(function: str, path: Path, *, limits: SandboxLimits) -> Any:
    if path.is_file():
        check_size(path, limits)
    what = f"reading {path.name}"
    return run_in_sandbox(f"{__name__}:{function}", {"path": str(path)}, limits=limits, task=what)
