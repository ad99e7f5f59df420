"""Read WebDataset shards through an index of offsets, without pickle."""

from __future__ import annotations

import tarfile
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gate.data.array_files import SINGLE_NAME
from gate.data.datasets import ItemConverter, PictureDecoder
from gate.data.location import Fields, SourceFile
from gate.data.reader import Block, SampleReader
from gate.errors import DataError, first_line
from gate.storage.arrays import npy_array

# As WebDataset has it: the members of a sample lie together and have one name up to the first dot.


PICTURES = frozenset({"png", "jpg", "jpeg", "bmp", "webp", "tif", "tiff", "gif"})

ARRAY, LABEL = "npy", "cls"

MEMBER_BYTES = 1 << 30
"""Of one member at most."""

_BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True)
class Member:
    """What a member's name says: `0001.left.npy` is the array `left` of sample `0001`."""

    key: str
    field: str
    """All after the first dot, in small letters."""

    @property
    def name(self) -> str:
        """Of the field, without what it is written in; empty where it has none."""
        return self.field.rpartition(".")[0]

    @property
    def kind(self) -> str:
        """What it is written in."""
        return self.field.rpartition(".")[2]

    @property
    def matters(self) -> bool:
        """Whether it is an array, a picture or a label; texts and pickles are passed over."""
        return self.kind in {ARRAY, LABEL} | PICTURES


class TarIndex:
    """Where the fields of each sample of one tar begin, and how long they are."""

    def __init__(self, file: SourceFile, fields: tuple[str, ...] | None = None) -> None:
        """`fields`: those of the first sample of the set; None: this is its tar. Raises
        DataError."""
        self._file = file
        spans: list[NDArray[np.int64]] = []
        for key, found in _samples(file):
            fields = fields or tuple(found)
            if found.keys() != set(fields):
                raise DataError(
                    f"sample {key} of {file.name} has {sorted(found)}, the first one has "
                    f"{sorted(fields)}. Give each sample the same fields."
                )
            spans.append(np.array([found[field] for field in fields], np.int64))
        if not spans or not fields:
            raise DataError(
                f"{file.name} holds neither arrays (.npy) nor pictures: nothing to measure. "
                "Expected members such as 0001.npy, 0001.jpg and 0001.cls, as WebDataset has them."
            )
        self.fields = fields
        self.spans = np.stack(spans)
        """Offset and length in bytes, shape (samples, fields, 2)."""

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.spans)


def _samples(file: SourceFile) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """Key, and the fields that matter with offset and length, sample by sample."""
    key, found = "", dict[str, tuple[int, int]]()
    done: set[str] = set()
    for member, span in _members(file):
        if member.key != key:
            if found:
                yield key, found
            done.add(key)
            key, found = member.key, {}
            if key in done:
                raise DataError(
                    f"{file.name} has members of sample {key} in two places. Keep the members of a "
                    "sample together, and give each sample its own name."
                )
        if member.field in found:
            raise DataError(f"{file.name} has {key}.{member.field} twice. Keep one of the two.")
        found[member.field] = span
    if found:
        yield key, found


def _members(file: SourceFile) -> Iterator[tuple[Member, tuple[int, int]]]:
    with file.open() as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                end = 0
                for info in archive:
                    archive.members = []  # type: ignore[attr-defined]  # or it keeps all
                    end = info.offset_data + -(-info.size // _BLOCK) * _BLOCK
                    member = _member(info, file)
                    if member is not None:
                        yield member, (info.offset_data, info.size)
                _check_end(stream, end, file)
        except tarfile.TarError as error:
            raise DataError(
                f"cannot read {file.name} as .tar: {first_line(error)}. Expected a whole tar that "
                "is not compressed; unpack a .tar.gz with gunzip."
            ) from error


def _member(info: tarfile.TarInfo, file: SourceFile) -> Member | None:
    """None: it does not matter."""
    if info.isdir():
        return None
    folders, base = info.name.split("/")[:-1], info.name.split("/")[-1]
    if info.name.startswith("/") or ".." in folders:
        raise _strange(info, file, "leads out of its folder")
    if not info.isreg() or info.issparse():
        raise _strange(info, file, "is a link, a device, or has holes")
    if info.size > MEMBER_BYTES:
        raise _strange(info, file, f"has {info.size} bytes, more than {MEMBER_BYTES}")
    stem, dot, field = base.partition(".")
    member = Member("/".join([*folders, stem]).removeprefix("./"), field.lower())
    return member if stem and dot and member.matters else None


def _check_end(stream: IO[bytes], end: int, file: SourceFile) -> None:
    """What was cut off between two members looks like a shorter tar, but for its last block."""
    stream.seek(end)
    if stream.read(_BLOCK) != bytes(_BLOCK):
        raise DataError(
            f"{file.name} has no end: it was cut off after its last member. Copy it again."
        )


def _strange(info: tarfile.TarInfo, file: SourceFile, how: str) -> DataError:
    return DataError(
        f"member {info.name!r} of {file.name} {how}. Expected plain files of samples only; write "
        "the tar anew."
    )


_HELD = 3
"""Tars that are open with their index at a time."""

_DIGITS = 20
"""Of a label; as many as 64 bits have."""


class TarReader(SampleReader):
    """The samples of all tars in order."""

    def __init__(
        self, files: Sequence[SourceFile], fields: Fields, pictures: PictureDecoder, *, origin: str
    ) -> None:
        """Walks over all headers, to count. Raises DataError."""
        self.origin = origin
        self._files = list(files)
        self._open: OrderedDict[int, tuple[TarIndex, IO[bytes]]] = OrderedDict()
        weakref.finalize(self, _close, self._open)
        self._fields: tuple[str, ...] | None = None
        counts = [len(self._opened(number)[0]) for number in range(len(self._files))]
        self._ends = list(accumulate(counts))
        self._items = ItemConverter(self._item(0), fields, pictures, origin=origin)
        self.specs, self.labelled = self._items.specs, self._items.labelled

    def __len__(self) -> int:
        """Number of samples."""
        return self._ends[-1]

    def read(self, places: Sequence[int]) -> Block:
        """The samples at these places."""
        return self._items.block(self._item, places)

    def _item(self, place: int) -> Any:
        number = bisect_right(self._ends, place)
        file = self._files[number]
        file.check(f"sample {place}")
        index, stream = self._opened(number)
        row = place - (self._ends[number - 1] if number else 0)
        arrays, label = dict[str, Any](), None
        for field, (offset, size) in zip(index.fields, index.spans[row], strict=True):
            stream.seek(int(offset))
            data = stream.read(int(size))
            what = f"{field} of sample {place} of {file.name}"
            if len(data) < size:
                raise DataError(f"{what} is cut off. Copy the file again.")
            member = Member("", field)
            if member.kind == LABEL:
                label = _label(data, what=what)
            else:
                array = npy_array(data, name=what) if member.kind == ARRAY else data
                arrays[member.name or SINGLE_NAME] = array
        if len(arrays) + (label is not None) < len(index.fields):
            raise DataError(
                f"sample {place} of {file.name} has one field twice: {', '.join(index.fields)}. "
                "Give each input one name."
            )
        return arrays if label is None else (arrays, label)

    def _opened(self, number: int) -> tuple[TarIndex, IO[bytes]]:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        while len(self._open) >= _HELD:
            _, (_, stream) = self._open.popitem(last=False)
            stream.close()
        index = TarIndex(self._files[number], self._fields)
        self._fields = index.fields
        self._open[number] = index, self._files[number].open()
        return self._open[number]


def _close(opened: Mapping[int, tuple[TarIndex, IO[bytes]]]) -> None:
    for _, stream in opened.values():
        stream.close()


def _label(data: bytes, *, what: str) -> int:
    text = data[: _DIGITS + 4].strip()
    if not text.isdigit() or int(text) > np.iinfo(np.int64).max:
        raise DataError(
            f"{what} is {data[:40]!r}, expected a class index: digits, at most those of an int64."
        )
    return int(text)
