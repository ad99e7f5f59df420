"""The format of a recording, which is read as untrusted input."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, StringConstraints, field_validator, model_validator

from gate.errors import EvidenceError, GateError, first_line
from gate.storage.arrays import Batch, OutputArray, RuntimeArray, dtype_name, value_bytes
from gate.storage.digest import Digest
from gate.storage.files import open_inside
from gate.storage.record import Record, Sha256
from gate.storage.untrusted_files import RECORD_LIMIT, parse_strict_json

MANIFEST = "manifest.json"

SAMPLES = "samples"
"""Name of the part that the verdict is based on; other parts are probes."""

Count = Annotated[int, Field(ge=0)]

Text = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]+$")]

_DTYPES = r"^(bool|u?int(8|16|32|64)|float(16|32|64))$"


class RecordingSource(Record):
    """The origin of the outputs as the recording states it: `meta.json`."""

    runtime: Text
    """Name of the runtime, for example `TensorRT`."""
    version: Text
    device: Text
    """Name of the device, for example `Jetson Orin Nano, JetPack 6.1`."""
    precision: Text
    """Precision of the computation: `float32`, `float16`, `int8`."""
    recorded_at: Text
    """ISO 8601."""
    model_sha256: Sha256 | None = None
    """Digest of the file that ran, if it was computed there."""

    @field_validator("recorded_at")
    @classmethod
    def _is_time(cls, text: str) -> str:
        from datetime import datetime

        datetime.fromisoformat(text)
        return text


class RecordedArray(Record):
    """One `.npy` file of the recording."""

    name: str
    dtype: Annotated[str, StringConstraints(pattern=_DTYPES)]
    shape: Annotated[tuple[Count, ...], Field(min_length=1, max_length=32)]
    file: str
    sha256: Sha256


class RecordedPart(Record):
    """The samples, or one probe that was computed as one batch."""

    name: str
    size: Annotated[int, Field(ge=1)]
    """Number of samples."""
    inputs_sha256: Sha256
    """Digest of the samples (`gate.runtimes.recording_format.digest_of`)."""
    outputs: tuple[RecordedArray, ...] = ()
    """Outputs in the file's order, with the samples on axis 0."""
    failed: str | None = None
    """Why the runtime could not compute the part; then it has no outputs."""

    @model_validator(mode="after")
    def _has_outputs_or_failure(self) -> Self:
        if bool(self.outputs) == (self.failed is not None):
            raise ValueError(f"part '{self.name}' must have either outputs or failed")
        return self


class RecordingManifest(Record):
    """The contents of a recording."""

    schema_version: Literal[1] = 1
    model_sha256: Sha256
    whence: RecordingSource
    rows: RecordedArray
    """The digests of the samples' inputs."""
    parts: Annotated[tuple[RecordedPart, ...], Field(min_length=1)]

    @property
    def samples(self) -> RecordedPart:
        """Return the first part."""
        return self.parts[0]

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        names = [part.name for part in self.parts]
        if names[0] != SAMPLES or len(set(names)) < len(names):
            raise ValueError(f"the parts are {names[:9]}; '{SAMPLES}' must be first, each once")
        if self.samples.failed is not None:
            raise ValueError(f"the samples were not computed: {self.samples.failed}")
        if self.rows.shape != (self.samples.size, 32) or self.rows.dtype != "uint8":
            raise ValueError(f"rows: {self.rows.dtype} {self.rows.shape} for the samples' digests")
        for part in self.parts:
            for array in part.outputs:
                if array.shape[0] != part.size and part is self.samples:
                    raise ValueError(
                        f"output '{array.name}' has {array.shape[0]} rows on axis 0 for "
                        f"{part.size} samples"
                    )
        return self


Rows = NDArray[np.uint8]
"""SHA-256 digests, shape (samples, 32). They bind a recording to its samples and their order."""

WIDTH = 32


def row_digests(batch: Batch) -> Rows:
    """Return the SHA-256 of each sample, over names, dtypes, shapes and values of its inputs.

    The digests of a batch are the concatenated digests of its parts.
    """
    arrays = [(name, batch[name]) for name in sorted(batch)]
    headers = [
        f"{name}\0{dtype_name(a.dtype)}\0{list(a.shape[1:])}\0".encode() for name, a in arrays
    ]
    digests = np.empty((len(arrays[0][1]), WIDTH), np.uint8)
    rows = [_bytes_by_row(array) for _, array in arrays]
    for index in range(len(digests)):
        sha256 = hashlib.sha256()
        for header, row in zip(headers, rows, strict=True):
            sha256.update(header)
            sha256.update(row(index))
        digests[index] = np.frombuffer(sha256.digest(), np.uint8)
    return digests


def _bytes_by_row(array: OutputArray) -> Callable[[int], memoryview | bytes]:
    """Return a function that returns the `value_bytes` of a row."""
    if array.dtype.kind == "U" or not array.flags.c_contiguous:
        return lambda index: value_bytes(np.asarray(array[index]))
    values = memoryview(value_bytes(array))
    step = len(values) // max(len(array), 1)
    return lambda index: values[index * step : (index + 1) * step]


def digest_of(rows: Rows) -> Digest:
    """Return the digest of samples in this order."""
    return Digest.from_bytes(np.ascontiguousarray(rows).tobytes())


_HEADER_LIMIT = 4096
"""Largest size of the header of an `.npy` file, in bytes."""

_CHUNK = 1 << 20

_REMEDY = "Pack it again: gate record pack."


class Recording:
    """An open recording. Its arrays are memory-mapped and stay valid after the files are deleted.

    It is untrusted: sizes are checked before reading, names can't refer to other folders, nothing
    is unpickled. Members of a zip must not be compressed, so that it can't expand beyond its own
    size.
    """

    def __init__(self, path: Path) -> None:
        """Open a folder or zip.

        Raises EvidenceError if something is missing or differs from the manifest.
        """
        try:
            with _open_source(path) as open_member:
                data = _read_manifest(open_member)
                self.digest = Digest.from_bytes(data)
                parse_strict_json(data, label=f"{MANIFEST} of {path.name}")
                self.manifest = RecordingManifest.from_json(data)
                self.rows: Rows = np.array(_map_array(open_member, self.manifest.rows), np.uint8)
                self.outputs = {
                    part.name: [_map_array(open_member, array) for array in part.outputs]
                    for part in self.manifest.parts
                }
        except GateError:
            raise
        except (OSError, ValueError, zipfile.BadZipFile, EOFError, RuntimeError, KeyError) as error:
            reason = first_line(error, empty=type(error).__name__)
            raise EvidenceError(
                f"the recording {path} can't be read: {reason}. {_REMEDY}"
            ) from error
        if digest_of(self.rows) != self.manifest.samples.inputs_sha256:
            raise EvidenceError(
                f"the recording {path} has sample digests that differ from its manifest. {_REMEDY}"
            )

    @property
    def probes(self) -> dict[Digest, RecordedPart]:
        """Return the probes by the digest of their inputs."""
        return {part.inputs_sha256: part for part in self.manifest.parts[1:]}


_OpenMember = Callable[[str], AbstractContextManager[io.RawIOBase | io.BufferedIOBase]]
"""Opens a file of a recording with a descriptor. Raises OSError, KeyError, ValueError."""


@contextlib.contextmanager
def _extract_member(archive: zipfile.ZipFile, name: str) -> Iterator[io.BufferedIOBase]:
    """Copy a member to an unnamed file, because only files can be mapped."""
    member = archive.getinfo(name)
    with tempfile.TemporaryFile() as copy:
        left = member.file_size
        with archive.open(member) as packed:
            while left and (data := packed.read(min(_CHUNK, left))):
                copy.write(data)
                left -= len(data)
        copy.flush()
        copy.seek(0)
        yield copy


@contextlib.contextmanager
def _open_source(path: Path) -> Iterator[_OpenMember]:
    if path.is_dir():
        yield partial(open_inside, path)
        return
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is neither a folder nor a zip file")
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError(
                "a member is compressed; a zip must hold the files as they are (zip -0)"
            )
        if sum(member.file_size for member in members) > path.stat().st_size:
            raise ValueError("its members are larger than the file: they overlap")
        yield partial(_extract_member, archive)


def _read_manifest(open_member: _OpenMember) -> bytes:
    with open_member(MANIFEST) as stream:
        data = bytes(stream.read(RECORD_LIMIT + 1) or b"")
    if len(data) > RECORD_LIMIT:
        raise ValueError(f"{MANIFEST} has more than {RECORD_LIMIT} bytes")
    return data


def _map_array(open_member: _OpenMember, spec: RecordedArray) -> RuntimeArray:
    """Return the memory-mapped array of the manifest. Raises ValueError, OSError, KeyError."""
    expected = math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
    with open_member(spec.file) as stream:
        size = stream.seek(0, io.SEEK_END)
        if not expected < size <= expected + _HEADER_LIMIT:
            raise ValueError(
                f"{spec.file} has {size} bytes, {spec.dtype} {list(spec.shape)} are {expected} and "
                "a header"
            )
        stream.seek(0)
        dtype, offset = _header(stream, spec)
        if size - offset != expected:
            raise ValueError(f"{spec.file} holds {size - offset} bytes of numbers, not {expected}")
        stream.seek(0)
        if Digest.from_stream(cast("io.FileIO", stream)) != spec.sha256:
            raise ValueError(f"{spec.file} has another digest than the manifest says")
        if not expected:
            return np.empty(spec.shape, dtype)
        mapped: RuntimeArray = np.memmap(
            stream, dtype=dtype, mode="r", offset=offset, shape=spec.shape
        )
        return mapped


def _header(stream: io.RawIOBase | io.BufferedIOBase, spec: RecordedArray) -> tuple[np.dtype, int]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        header = np.lib.format.read_array_header_1_0(stream, max_header_size=_HEADER_LIMIT)
    else:
        header = np.lib.format.read_array_header_2_0(stream, max_header_size=_HEADER_LIMIT)
    shape, fortran, dtype = header
    if dtype != np.dtype(spec.dtype) or shape != spec.shape or (fortran and len(shape) > 1):
        raise ValueError(
            f"{spec.file} holds {dtype} {list(shape)}{' by columns' if fortran else ''}, the "
            f"manifest says {spec.dtype} {list(spec.shape)}"
        )
    return dtype, stream.tell()
