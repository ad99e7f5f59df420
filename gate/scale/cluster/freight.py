"""Files of an assignment that travel by their content: no worker needs the driver's disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from gate.errors import StorageError
from gate.onnxfile.subject import read_subject
from gate.scale.assignment import Assignment

_CHUNK_BYTES = 1 << 26
"""Of a file, that are an object of the store each: what memory can't hold, the store spills."""


@dataclass(frozen=True)
class Freight:
    """By field of `Assignment`: the first file, which the field names, and others beside it."""

    files: dict[str, dict[str, tuple[Any, ...]]]
    """File name to its chunks, as references of Ray."""

    @classmethod
    def of(cls, assignment: Assignment) -> Freight:
        """Put all files of the assignment into the object store. Raises StorageError and
        OnnxFileError."""
        onnx = Path(assignment.onnx)
        beside = [onnx.parent / name for name in read_subject(onnx).external_data]
        files = {"onnx": _stored(onnx, *beside)}
        for field in ("checkpoint", "preprocessing", "labels"):
            named = getattr(assignment, field)
            if named is not None:
                files[field] = _stored(Path(named))
        return cls(files)

    def unpacked(self, assignment: Assignment, into: Path) -> Assignment:
        """The assignment on copies below `into`; whoever opens it verifies their digests."""
        copies = {}
        for field, files in self.files.items():
            for name, chunks in files.items():
                path = into / field / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as stream:
                    for chunk in chunks:
                        stream.write(ray.get(chunk))
            copies[field] = str(into / field / next(iter(files)))
        return assignment.model_copy(update=copies)


def _stored(first: Path, *beside: Path) -> dict[str, tuple[Any, ...]]:
    return {
        str(path.relative_to(first.parent)): tuple(map(ray.put, _chunks(path)))
        for path in (first, *beside)
    }


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise StorageError(
            f"cannot read {path}: {error.strerror or error}. Fix permissions, or name another file."
        ) from error
