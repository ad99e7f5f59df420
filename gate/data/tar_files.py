"""Read WebDataset shards through an index of offsets, without pickle."""

from __future__ import annotations

import tarfile
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gate.data.array_files import SINGLE_NAME
from gate.data.datasets import ItemConverter, PictureDecoder
from gate.data.location import Fields, SourceFile
from gate.data.reader import Block, SampleReader
from gate.errors import DataError, first_line
from gate.storage.arrays import npy_array

# WebDataset: the members of a sample are adjacent and have the same name up to the first dot.
PICTURES = frozenset({"png", "jpg", "jpeg", "bmp", "webp", "tif", "tiff", "gif"})

ARRAY, LABEL = "npy", "cls"

_KINDS = {ARRAY, LABEL} | PICTURES
"""Other members, such as texts and pickles, are ignored."""

MEMBER_BYTES = 1 << 30
"""Maximum size of one member."""

_BLOCK = tarfile.BLOCKSIZE


def index_tar(
    file: SourceFile, fields: tuple[str, ...] | None = None
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the fields of the samples (such as `left.npy` of `0001.left.npy`) and their positions.

    The positions are offset and length in bytes, shape (samples, fields, 2). `fields`: those of the
    first sample of the set, None for its first tar. Raises DataError.
    """
    spans: list[NDArray[np.int64]] = []
    for key, by_field in _samples(file):
        fields = fields or tuple(by_field)
        if by_field.keys() != set(fields):
            raise DataError(
                f"sample {key} of {file.name} has {sorted(by_field)}, the first one has "
                f"{sorted(fields)}. Give each sample the same fields."
            )
        spans.append(np.array([by_field[field] for field in fields], np.int64))
    if not spans or not fields:
        raise DataError(
            f"{file.name} contains neither arrays (.npy) nor pictures: nothing to measure. "
            "Expected WebDataset members such as 0001.npy, 0001.jpg and 0001.cls."
        )
    return fields, np.stack(spans)


def _samples(file: SourceFile) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """Yield the key of each sample, and its fields with offset and length."""
    finished: set[str] = set()
    for key, members in groupby(_members(file), key=lambda member: member[0]):
        if key in finished:
            raise DataError(
                f"{file.name} has members of sample {key} in two places. Keep the members of a "
                "sample together, and give each sample its own name."
            )
        finished.add(key)
        by_field: dict[str, tuple[int, int]] = {}
        for _, field, span in members:
            if field in by_field:
                raise DataError(f"{file.name} has {key}.{field} twice. Keep one of the two.")
            by_field[field] = span
        yield key, by_field


def _members(file: SourceFile) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Yield key, field, and offset and length of each array, label and picture."""
    with file.open() as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                end = 0
                for info in archive:
                    archive.members = []  # type: ignore[attr-defined]  # TarFile keeps them all
                    end = info.offset_data + -(-info.size // _BLOCK) * _BLOCK
                    if not info.isdir():
                        _check_member(info, file)
                        folder, _, base = info.name.rpartition("/")
                        stem, _, field = base.partition(".")
                        key = "/".join(filter(None, [folder, stem])).removeprefix("./")
                        if stem and _kind(field) in _KINDS:
                            yield key, field.lower(), (info.offset_data, info.size)
                _check_end(stream, end, file)
        except tarfile.TarError as error:
            raise DataError(
                f"cannot read {file.name} as .tar: {first_line(error)}. Expected a complete, "
                "uncompressed tar; unpack a .tar.gz with gunzip."
            ) from error


def _kind(field: str) -> str:
    """Return the file extension of a member, in lower case."""
    return field.rpartition(".")[2].lower()


def _check_member(info: tarfile.TarInfo, file: SourceFile) -> None:
    problem = None
    if info.name.startswith("/") or ".." in info.name.split("/")[:-1]:
        problem = "is outside of its folder"
    elif not info.isreg() or info.issparse():
        problem = "is a link, a device, or a sparse file"
    elif info.size > MEMBER_BYTES:
        problem = f"has {info.size} bytes, more than {MEMBER_BYTES}"
    if problem is not None:
        raise DataError(
            f"member {info.name!r} of {file.name} {problem}. Expected regular files only; write "
            "the tar again."
        )


def _check_end(stream: IO[bytes], end: int, file: SourceFile) -> None:
    """Verify that a tar ends with an empty block: without it, the tar was truncated."""
    stream.seek(end)
    if stream.read(_BLOCK) != bytes(_BLOCK):
        raise DataError(
            f"{file.name} has no end: it was truncated after its last member. Copy it again."
        )


_MAX_OPEN = 3
"""Maximum number of open tars, with their indices."""

_DIGITS = 20
"""Maximum number of digits of a label, as for 64 bits."""


class TarReader(SampleReader):
    """Reads the samples of several tars, in order."""

    def __init__(
        self, files: Sequence[SourceFile], fields: Fields, pictures: PictureDecoder, *, origin: str
    ) -> None:
        """Reads all headers to count the samples. Raises DataError."""
        self.origin = origin
        self._files = list(files)
        self._open: OrderedDict[int, tuple[NDArray[np.int64], IO[bytes]]] = OrderedDict()
        weakref.finalize(self, _close, self._open)
        self._fields: tuple[str, ...] = ()
        counts = [len(self._opened(number)[0]) for number in range(len(self._files))]
        self._ends = list(accumulate(counts))
        self._items = ItemConverter(self._item(0), fields, pictures, origin=origin)
        self.specs, self.labelled = self._items.specs, self._items.labelled

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, indices: Sequence[int]) -> Block:
        """Return the samples with these indices."""
        return self._items.block(self._item, indices)

    def _item(self, index: int) -> Any:
        number = bisect_right(self._ends, index)
        file = self._files[number]
        file.check(f"sample {index}")
        spans, stream = self._opened(number)
        row = index - (self._ends[number - 1] if number else 0)
        arrays, label = dict[str, Any](), None
        for field, (offset, size) in zip(self._fields, spans[row], strict=True):
            stream.seek(int(offset))
            data = stream.read(int(size))
            name = f"{field} of sample {index} of {file.name}"
            if len(data) < size:
                raise DataError(f"{name} is truncated. Copy the file again.")
            if _kind(field) == LABEL:
                label = _label(data, name=name)
            else:
                array = npy_array(data, name=name) if _kind(field) == ARRAY else data
                arrays[field.rpartition(".")[0] or SINGLE_NAME] = array
        if len(arrays) + (label is not None) < len(self._fields):
            raise DataError(
                f"sample {index} of {file.name} has one field twice: {', '.join(self._fields)}. "
                "Give each input one name."
            )
        return arrays if label is None else (arrays, label)

    def _opened(self, number: int) -> tuple[NDArray[np.int64], IO[bytes]]:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        while len(self._open) >= _MAX_OPEN:
            _, (_, stream) = self._open.popitem(last=False)
            stream.close()
        self._fields, spans = index_tar(self._files[number], self._fields or None)
        self._open[number] = spans, self._files[number].open()
        return self._open[number]


def _close(opened: Mapping[int, tuple[NDArray[np.int64], IO[bytes]]]) -> None:
    for _, stream in opened.values():
        stream.close()


def _label(data: bytes, *, name: str) -> int:
    text = data[: _DIGITS + 4].strip()
    if not text.isdigit() or int(text) > np.iinfo(np.int64).max:
        raise DataError(
            f"{name} is {data[:40]!r}, expected a class index: digits, within the range of int64."
        )
    return int(text)
