"""Golden vectors in a folder, read only when proven."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from gate.errors import DigestMismatch, EvidenceError
from gate.golden.record import (
    DType,
    Golden,
    GoldenOutput,
    GoldenPart,
    GoldenTensor,
)
from gate.policy.sections import NonFinite
from gate.storage.digest import Digest
from gate.storage.foreign import read_foreign

GOLDEN_JSON = "golden.json"
_RECORD_LIMIT = 1 << 20
"""Bytes of golden.json that are read at most."""
SIZE_LIMIT = 1 << 32
"""Bytes of all arrays and pictures together: 4 GiB is far above what a few samples need."""

Array = NDArray[np.generic]


@dataclass(frozen=True)
class PartVectors:
    """Of a part of a release, by the names of its ONNX file."""

    golden: GoldenPart
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


@dataclass(frozen=True)
class Vectors:
    """Golden vectors that were read and proven, by the names of the ONNX file; of a release by
    those of its chain."""

    golden: Golden
    sha256: Digest
    """Of golden.json."""
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    pictures: tuple[bytes, ...] = ()
    """PNG of each sample; empty: the vectors have none."""
    parts: Mapping[str, PartVectors] = field(default_factory=dict)


def read_golden(folder: Path, *, sha256: Digest | None = None) -> Vectors:
    """Read the vectors of `folder` and prove every array: kind of file, size, digest, values.

    `sha256`: the digest that golden.json must have, compared before anything of it is parsed.
    Raises EvidenceError where golden.json is missing or no whole record, all files together are
    huge, or an array holds NaN; DigestMismatch where golden.json or an array is another;
    StorageError where this machine can't read them.
    """
    try:
        return _read(folder, sha256)
    except (MemoryError, OverflowError, RecursionError) as error:
        raise EvidenceError(
            f"the golden vectors in {folder} can't be read ({type(error).__name__}): they are too "
            "large for this machine, or forged. Fetch them again."
        ) from error


def read_record(folder: Path, *, sha256: Digest | None = None) -> tuple[Golden, Digest]:
    """golden.json alone and its digest; raises as `read_golden`."""
    path = folder / GOLDEN_JSON
    text = read_foreign(path, limit=_RECORD_LIMIT, sha256=sha256)
    return Golden.from_foreign(text, what=str(path)), Digest.of_bytes(text)


def record_digest(folder: Path) -> Digest:
    """Digest of golden.json, which is not parsed; raises as `read_golden`."""
    return Digest.of_bytes(read_foreign(folder / GOLDEN_JSON, limit=_RECORD_LIMIT))


def _read(folder: Path, expected: Digest | None) -> Vectors:
    golden, sha256 = read_record(folder, sha256=expected)
    if golden.size_bytes > SIZE_LIMIT:
        raise EvidenceError(
            f"the golden vectors in {folder} have {golden.size_bytes} bytes, at most {SIZE_LIMIT} "
            "are read. Measure with fewer or smaller samples."
        )
    return Vectors(
        golden=golden,
        sha256=sha256,
        inputs=_arrays(folder, golden.inputs, output=False),
        outputs=_arrays(folder, golden.outputs, output=True),
        pictures=_pictures(folder, golden),
        parts={
            name: PartVectors(
                part,
                _arrays(folder, part.inputs, output=False),
                _arrays(folder, part.outputs, output=True),
            )
            for name, part in golden.parts.items()
        },
    )


def files_of(golden: Golden) -> tuple[str, ...]:
    """Names of all files of the vectors, golden.json first."""
    return (GOLDEN_JSON, *golden.files)


def _arrays(folder: Path, tensors: Iterable[GoldenTensor], *, output: bool) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for tensor in tensors:
        path = folder / tensor.file
        data = read_foreign(path, limit=tensor.size_bytes, sha256=tensor.sha256)
        if len(data) != tensor.size_bytes:
            raise DigestMismatch(
                f"{path} has {len(data)} bytes, {tensor.dtype} {list(tensor.shape)} needs "
                f"{tensor.size_bytes}. It is damaged: fetch the golden vectors again."
            )
        dtype = np.dtype(tensor.dtype)
        little = np.frombuffer(data, dtype=dtype.newbyteorder("<"))
        # A copy, which may be written: PyTorch takes no other.
        values: Array = little.astype(dtype).reshape(tensor.shape)
        allowed = tensor.nonfinite if isinstance(tensor, GoldenOutput) else "refuse"
        check_values(tensor.name, values, output=output, nonfinite=allowed)
        arrays[tensor.name] = values
    return arrays


def _pictures(folder: Path, golden: Golden) -> tuple[bytes, ...]:
    """The bytes of every picture, proven."""
    files = golden.pictures.files if golden.pictures else ()
    return tuple(
        read_foreign(folder / file.file, limit=file.size_bytes, sha256=file.sha256)
        for file in files
    )


def check_values(
    name: str, values: Array, *, output: bool, nonfinite: NonFinite = "refuse"
) -> None:
    """Refuse arrays that prove nothing."""
    if values.dtype.name not in get_args(DType):
        raise EvidenceError(
            f"'{name}' has dtype {values.dtype}, golden vectors hold {', '.join(get_args(DType))}."
            " Wrap the model to take and return those."
        )
    if not values.size or not (values.ndim or output):
        raise EvidenceError(
            f"'{name}' has shape {values.shape}: nothing to compare. Give samples on axis 0."
        )
    if values.dtype.kind != "f":
        return
    bad = np.isnan(values) if output else ~np.isfinite(values)
    if bad.all() or (bad.any() and nonfinite == "refuse"):
        kind = "NaN" if output else "NaN or infinite"
        raise EvidenceError(
            f"'{name}' has {int(bad.sum())} {kind} values, first at index "
            f"{int(bad.argmax())}. They prove nothing: leave that sample out."
        )
