"""Reading a foreign ONNX file in a child process, within limits.

A file of 20 MB can hold ten million empty nodes, which take 3.5 GB once they are parsed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gate.bounded.call import call
from gate.bounded.limits import ChildLimits, memory_text
from gate.errors import LimitExceeded, OnnxFileError
from gate.onnxfile.candidate import Candidate
from gate.onnxfile.origin import quantized_from
from gate.onnxfile.release_file import ReleaseFile, is_release
from gate.onnxfile.release_files import ReleaseFiles
from gate.onnxfile.subject import read_subject
from gate.records.evidence import Subject
from gate.storage.digest import Digest
from gate.storage.files import wrong_name


def subject_within(path: Path, limits: ChildLimits | None) -> Subject:
    """As `read_subject`, and of a release as `ReleaseFiles.subject`; None: the file is our own, and
    is read in this process.

    What the child says of names and bytes is proven here. Raises LimitExceeded and EvidenceError
    besides, StorageError; PolicyError for a release file that is none.
    """
    if is_release(path):
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


def release_within(path: Path, limits: ChildLimits | None) -> ReleaseFiles:
    """The files that a release file names, each read as by `subject_within`; raises as that. The
    release file itself is a short list of names, and no child reads it."""
    file = ReleaseFile.load(path)
    parts = {}
    for name, part in file.parts.items():
        place = path.parent / part.file
        if is_release(place):
            raise OnnxFileError(
                f"{path}: the part {name} is {part.file}, expected an ONNX file: a release is made "
                "of files, not of releases."
            )
        parts[name] = Candidate(place, subject_within(place, limits))
    return ReleaseFiles(path, file, parts)


def origin_within(path: Path, limits: ChildLimits | None) -> str | None:
    """As `quantized_from`; None: the file is our own, and is read in this process.

    Raises LimitExceeded and EvidenceError besides.
    """
    if limits is None:
        return quantized_from(path)
    origin = _called("origin", path, limits=limits)
    return None if origin is None else str(origin)


def check_size(path: Path, limits: ChildLimits) -> None:
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


def _called(function: str, path: Path, *, limits: ChildLimits) -> Any:
    if path.is_file():
        check_size(path, limits)
    what = f"reading {path.name}"
    return call(f"{__name__}:{function}", {"path": str(path)}, limits=limits, what=what)
