"""Parquet and Arrow: columns are inputs, read in batches of rows and never a whole file."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from gate.errors import DataError
from gate.parity.arrays.rows import Array, Block, SourceRows, spec_of
from gate.parity.sources.column_arrays import (
    indices,
    is_picture_column,
    numbers,
    picture_tensors,
)
from gate.parity.sources.column_file import ColumnFile, HeldFiles, RowGroup
from gate.parity.sources.files import SourceFile
from gate.parity.sources.named import Fields
from gate.parity.sources.pictures import Pictures


class ColumnRows(SourceRows):
    """The rows of all files in order.

    A file is read group by group (a row group of Parquet, a record batch of Arrow), a group batch
    by batch. Where the last reading ended is kept: going on from there begins nothing anew.
    """

    def __init__(
        self, files: Sequence[SourceFile], fields: Fields, pictures: Pictures, *, origin: str
    ) -> None:
        """Reads what stands at the ends of the files. Raises DataError."""
        self.origin, self._pictures = origin, pictures
        held = HeldFiles()
        opened = [ColumnFile(file, held) for file in files]
        schema = opened[0].schema
        for file in opened[1:]:
            if not file.schema.equals(schema):
                raise DataError(
                    f"{file.name} has other columns than {opened[0].name}, or other types: "
                    f"{file.schema.names} and {schema.names}. Write all shards alike."
                )
        self._groups = [group for file in opened for group in file.groups if group.rows]
        if not self._groups:
            raise DataError(f"{origin} has no rows: nothing to measure. Give samples.")
        self._ends = list(accumulate(group.rows for group in self._groups))
        self._reading = _Reading()
        self._choose(schema, fields)
        first = self._block(0, 1)
        self.specs = tuple(
            spec_of(name, array.dtype, array.shape[1:]) for name, array in first.arrays.items()
        )

    def __len__(self) -> int:
        """Number of samples."""
        return self._ends[-1]

    def read(self, places: Sequence[int]) -> Block:
        """The samples at these places."""
        blocks = [self._block(start, stop) for start, stop in _runs(places)]
        for block in blocks:
            self._check(block, places[0])
        return _joined(blocks)

    def _choose(self, schema: Any, fields: Fields) -> None:
        import pyarrow as pa

        names = list(schema.names)
        if len(set(names)) < len(names):
            raise DataError(f"{self.origin} has two columns of one name: {names}. Rename one.")
        self._inputs, self._label = fields.of(names)
        if self._label is not None and not pa.types.is_integer(schema.field(self._label).type):
            if fields.label is not None:
                raise DataError(
                    f"column '{self._label}' of {self.origin} holds "
                    f"{schema.field(self._label).type}, labels are integers. Name another column."
                )
            self._label = None
            self._inputs = fields.inputs or tuple(names)
        if not self._inputs:
            raise DataError(f"{self.origin} has no column but the label. Give inputs.")
        self.labelled = self._label is not None

    def _block(self, start: int, stop: int) -> Block:
        parts = []
        for number in range(bisect_right(self._ends, start), len(self._groups)):
            begin = self._ends[number - 1] if number else 0
            if begin >= stop:
                break
            group = self._groups[number]
            group.file.check(f"samples {start} to {stop - 1}")
            span = range(max(start - begin, 0), min(stop - begin, group.rows))
            wanted = [*self._inputs, *([self._label] if self._label else [])]
            for batch, first in self._reading.rows(group, span, wanted):
                parts.append(self._converted(batch, begin + first))
        return _joined(parts)

    def _converted(self, batch: Any, start: int) -> Block:
        arrays: dict[str, Array] = {}
        for name in self._inputs:
            column = batch.column(name)
            arrays[name] = (
                picture_tensors(column, name=name, start=start, pictures=self._pictures)
                if is_picture_column(column.type)
                else numbers(column, name=name, start=start)
            )
        if self._label is None:
            return Block(arrays)
        labels = indices(batch.column(self._label), name=self._label, start=start)
        return Block(arrays, labels.astype(np.int64))

    def _check(self, block: Block, place: int) -> None:
        for spec in self.specs:
            array = block.arrays[spec.name]
            if (array.dtype.name, array.shape[1:]) != (spec.dtype, spec.shape[1:]):
                raise DataError(
                    f"'{spec.name}' of {self.origin} has shape {array.shape[1:]} ({array.dtype}) "
                    f"from sample {place} on, at sample 0 {tuple(spec.shape[1:])} ({spec.dtype}). "
                    "Give all samples one shape: pad, crop or resize them."
                )


class _Reading:
    """Where the last reading of a group ended."""

    def __init__(self) -> None:
        self._group: RowGroup | None = None
        self._columns: list[str] = []
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        self._start = 0

    def rows(self, group: RowGroup, span: range, columns: list[str]) -> Iterator[tuple[Any, int]]:
        """Record batches of these rows, each with the place of its first row in the group."""
        behind = span.start < self._start
        if group is not self._group or behind or columns != self._columns:
            self._group, self._columns = group, columns
            self._batches, self._batch, self._start = group.batches(columns), None, 0
        at = span.start
        while at < span.stop:
            if self._batch is None:
                self._batch = next(self._batches, None)
                if self._batch is None:
                    self._group = None
                    raise DataError(
                        f"{group.file.name} has fewer rows than it says: {group.rows} in a group. "
                        "Write it anew."
                    )
            end = self._start + self._batch.num_rows
            if end > at:
                stop = min(end, span.stop)
                yield self._batch.slice(at - self._start, stop - at), at
                at = stop
            if end <= at:
                self._start, self._batch = end, None


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Places that follow each other, as ranges."""
    start = before = places[0]
    for place in places[1:]:
        if place != before + 1:
            yield start, before + 1
            start = place
        before = place
    yield start, before + 1


def _joined(blocks: Sequence[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    names = blocks[0].arrays
    for block in blocks:
        for name in names:
            one, first = block.arrays[name], names[name]
            if one.shape[1:] != first.shape[1:]:
                raise DataError(
                    f"'{name}' has samples of shape {one.shape[1:]} and of {first.shape[1:]}. Give "
                    "all samples one shape: pad, crop or resize them."
                )
    arrays = {name: np.concatenate([block.arrays[name] for block in blocks]) for name in names}
    labels = [block.labels for block in blocks if block.labels is not None]
    return Block(arrays, np.concatenate(labels) if labels else None)
