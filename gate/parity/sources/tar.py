"""WebDataset shards: each sample is read from where it lies in its tar."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import IO, Any

import numpy as np

from gate.errors import DataError
from gate.parity.arrays.rows import Block, SourceRows
from gate.parity.arrays.shards import SINGLE_NAME
from gate.parity.sources.files import SourceFile
from gate.parity.sources.items import Items
from gate.parity.sources.named import Fields
from gate.parity.sources.npy import npy_array
from gate.parity.sources.pictures import Pictures
from gate.parity.sources.tar_index import ARRAY, LABEL, Member, TarIndex

_HELD = 3
"""Tars that are open with their index at a time."""
_DIGITS = 20
"""Of a label; as many as 64 bits have."""


class TarRows(SourceRows):
    """The samples of all tars in order."""

    def __init__(
        self, files: Sequence[SourceFile], fields: Fields, pictures: Pictures, *, origin: str
    ) -> None:
        """Walks over all headers, to count. Raises DataError."""
        self.origin = origin
        self._files = list(files)
        self._open: OrderedDict[int, tuple[TarIndex, IO[bytes]]] = OrderedDict()
        weakref.finalize(self, _close, self._open)
        self._fields: tuple[str, ...] | None = None
        counts = [len(self._opened(number)[0]) for number in range(len(self._files))]
        self._ends = list(accumulate(counts))
        self._items = Items(self._item(0), fields, pictures, origin=origin)
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
