"""Read a recording, of which a stranger may have written every byte.

Sizes are compared before anything is read; names lead nowhere outside of the folder; nothing is
unpickled. A zip must hold its members as they are, without compression: so it can't unpack to more
than it is.
"""

from __future__ import annotations

import contextlib
import io
import math
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from gate.errors import EvidenceError, GateError, first_line
from gate.runtimes.recording.manifest import (
    MANIFEST,
    RecordedArray,
    RecordedPart,
    RecordingManifest,
)
from gate.runtimes.recording.rows import Rows, digest_of
from gate.runtimes.runtime import Array
from gate.storage.digest import Digest
from gate.storage.files import open_inside
from gate.storage.foreign import RECORD_LIMIT, strict_json

_HEADER_LIMIT = 4096
"""Bytes of the header of an `.npy` file."""
_CHUNK = 1 << 20
_REMEDY = "Pack it again: gate record pack."


class Recording:
    """An open recording. Its arrays are mapped, and stay so after the files are gone."""

    def __init__(self, path: Path) -> None:
        """`path`: a folder, or a zip of it.

        Raises EvidenceError for whatever is missing, longer, shorter, or not what the manifest
        says.
        """
        try:
            with _place(path) as place:
                data = _all_of(place)
                self.digest = Digest.of_bytes(data)
                strict_json(data, what=f"{MANIFEST} of {path.name}")
                self.manifest = RecordingManifest.from_json(data)
                self.rows: Rows = np.array(_array(place, self.manifest.rows), np.uint8)
                self.outputs = {
                    part.name: [_array(place, each) for each in part.outputs]
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
                f"the recording {path} has other digests of its samples than its manifest says. "
                f"{_REMEDY}"
            )

    @property
    def probes(self) -> dict[Digest, RecordedPart]:
        """By the digest of their inputs."""
        return {part.inputs_sha256: part for part in self.manifest.parts[1:]}


class _Place(Protocol):
    def open(self, name: str) -> AbstractContextManager[io.RawIOBase | io.BufferedIOBase]:
        """A file with a descriptor. Raises OSError, KeyError, ValueError."""


@dataclass(frozen=True)
class _Folder:
    path: Path

    def open(self, name: str) -> io.FileIO:
        return open_inside(self.path, name)


@dataclass(frozen=True)
class _Zip:
    """Members are copied into files without a name, because only files can be mapped."""

    archive: zipfile.ZipFile

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[io.BufferedIOBase]:
        member = self.archive.getinfo(name)
        with tempfile.TemporaryFile() as copy:
            left = member.file_size
            with self.archive.open(member) as packed:
                while left and (data := packed.read(min(_CHUNK, left))):
                    copy.write(data)
                    left -= len(data)
            copy.flush()
            copy.seek(0)
            yield copy


@contextlib.contextmanager
def _place(path: Path) -> Iterator[_Place]:
    if path.is_dir():
        yield _Folder(path)
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
        yield _Zip(archive)


def _all_of(place: _Place) -> bytes:
    with place.open(MANIFEST) as stream:
        data = bytes(stream.read(RECORD_LIMIT + 1) or b"")
    if len(data) > RECORD_LIMIT:
        raise ValueError(f"{MANIFEST} has more than {RECORD_LIMIT} bytes")
    return data


def _array(place: _Place, spec: RecordedArray) -> Array:
    """The array that the manifest describes, mapped. Raises ValueError, OSError, KeyError."""
    expected = math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
    with place.open(spec.file) as stream:
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
        if Digest.of_stream(cast("io.FileIO", stream)) != spec.sha256:
            raise ValueError(f"{spec.file} has another digest than the manifest says")
        if not expected:
            return np.empty(spec.shape, dtype)
        mapped: Array = np.memmap(stream, dtype=dtype, mode="r", offset=offset, shape=spec.shape)
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
