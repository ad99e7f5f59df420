"""Read Parquet and Arrow files by row group."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np

from gate.data.array_files import as_texts, check_dtype, check_indices
from gate.data.datasets import PictureDecoder, is_picture
from gate.data.location import EXTRA, Fields, LocalFile, SourceFile
from gate.data.reader import Block, SampleReader, spec_of
from gate.errors import DataError, GateError, first_line
from gate.storage.arrays import RowsArray, dtype_name

_PICTURE_FIELDS = {"bytes", "path"}


def is_picture_column(kind: Any) -> bool:
    """Return whether a column of this type may contain pictures: bytes, strings (paths), or structs
    of both, as Hugging Face writes them."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return {field.name for field in kind} == _PICTURE_FIELDS
    binary = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    return any(of(kind) for of in binary) or _is_text(kind)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def numbers(column: Any, *, name: str, start: int) -> RowsArray:
    """Return the values of a `pyarrow.Array`: primitives, lists of them, or tensors.

    `start`: index of the first sample, for errors. Raises DataError for nulls, ragged lists and
    other types.
    """
    array = _numbers(column, name, np.arange(start, start + len(column)))
    check_dtype(name, array.dtype, origin=f"the column of sample {start}")
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")


def indices(column: Any, *, name: str, start: int) -> RowsArray:
    """Return the labels of a column. Raises DataError."""
    try:
        return check_indices(numbers(column, name=name, start=start), start=start)
    except DataError as error:
        raise DataError(f"{error} To use no labels, append #label= to the source.") from error


def picture_tensors(column: Any, *, name: str, start: int, pictures: PictureDecoder) -> RowsArray:
    """Return the model inputs of a column of pictures. Raises DataError."""
    tensors: list[RowsArray] = []
    for index, value in enumerate(column, start):
        picture = value.as_py()
        if picture is None or not is_picture(picture):
            raise DataError(f"sample {index} has no picture in '{name}'. Remove the sample.")
        tensor = pictures.tensor(picture, label=f"'{name}' of sample {index}")
        if tensors and tensor.shape != tensors[0].shape:
            raise _ragged(name, index, str(tensor.shape), str(tensors[0].shape))
        tensors.append(tensor)
    return np.stack(tensors)


def _numbers(column: Any, name: str, indices: RowsArray) -> RowsArray:
    """`indices`: the sample index of each element."""
    import pyarrow as pa

    kind = column.type
    if column.null_count:
        empty = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise DataError(
            f"sample {indices[empty]} has no value in '{name}'. Fill it, or remove the sample."
        )
    if isinstance(kind, pa.FixedShapeTensorType):
        _numbers(column.storage, name, indices)  # Raises for nulls inside the tensors.
        array: RowsArray = column.to_numpy_ndarray()
        return array
    if isinstance(kind, pa.BaseExtensionType):
        return _numbers(column.storage, name, indices)
    if pa.types.is_dictionary(kind):
        return _numbers(column.dictionary_decode(), name, indices)
    if pa.types.is_fixed_size_list(kind):
        return _inner(column, kind.list_size, name, indices)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        if len(set(lengths)) > 1:
            odd = int(np.argmax(lengths != lengths[0]))
            raise _ragged(name, indices[odd], str(lengths[odd]), str(lengths[0]))
        return _inner(column, int(lengths[0]), name, indices)
    plain = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if plain or _is_text(kind):
        return as_texts(column.to_numpy(zero_copy_only=False))
    raise DataError(
        f"column '{name}' has type {kind}; expected numbers, lists of numbers or tensors. Name the "
        "input columns: append #inputs=COLUMN,COLUMN&label=COLUMN to the source."
    )


def _inner(column: Any, size: int, name: str, indices: RowsArray) -> RowsArray:
    if size == 0:
        raise DataError(f"sample {indices[0]} has an empty list in '{name}': nothing to measure.")
    values = _numbers(column.flatten(), name, np.repeat(indices, size))
    return values.reshape(len(column), size, *values.shape[1:])


def _ragged(name: str, sample: int, shape: str, first: str) -> DataError:
    return DataError(
        f"'{name}' of sample {sample} has shape {shape}, earlier samples have {first}. Give all "
        "samples the same shape: pad, crop or resize them."
    )


_BATCH_BYTES = 1 << 20

_MAX_OPEN = 3
"""Maximum number of open files."""

_MAX_ROWS = 4096
"""Maximum number of rows of a batch."""


@dataclass(frozen=True, eq=False)
class RowGroup:
    """A row group of Parquet or a record batch of Arrow, which is read from its start."""

    file: SourceFile
    opened: Callable[[], _Parquet | _Batches | _Stream]
    """Returns the open file, from a cache."""
    number: int
    rows: int
    size: int
    """Approximate size in bytes."""

    def batches(self, columns: list[str]) -> Iterator[Any]:
        """Yield record batches with these columns, about 1 MB each. Raises DataError."""
        step = max(1, min(_MAX_ROWS, self.rows * _BATCH_BYTES // max(1, self.size)))
        with _named_errors(self.file.name):
            yield from self.opened().read(self.number, columns, step)


@contextlib.contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Turn the exceptions of pyarrow into DataError."""
    try:
        yield
    except (GateError, MemoryError):
        raise
    except Exception as error:
        raise DataError(
            f"cannot read {name} as columns: {first_line(error, empty=type(error).__name__)}. "
            "Expected a complete Parquet or Arrow file; write it again."
        ) from error


class _Parquet:
    def __init__(self, file: SourceFile) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        # Without pre_buffer, which would read whole row groups into memory.
        self._file = pq.ParquetFile(
            _seekable(file, pa.OSFile), buffer_size=1 << 20, pre_buffer=False
        )
        self.schema = self._file.schema_arrow

    def groups(self) -> Iterator[tuple[int, int]]:
        metadata = self._file.metadata
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            yield group.num_rows, group.total_byte_size

    def read(self, number: int, columns: list[str], step: int) -> Iterator[Any]:
        yield from self._file.iter_batches(step, row_groups=[number], columns=columns)


class _Batches:
    """Arrow's file format, including Feather: record batches with random access."""

    def __init__(self, file: SourceFile) -> None:
        import pyarrow as pa

        self._reader = pa.ipc.open_file(_seekable(file, pa.memory_map))
        self.schema = self._reader.schema

    def groups(self) -> Iterator[tuple[int, int]]:
        for number in range(self._reader.num_record_batches):
            batch = self._reader.get_batch(number)
            yield batch.num_rows, batch.nbytes

    def read(self, number: int, columns: list[str], step: int) -> Iterator[Any]:
        batch = self._reader.get_batch(number).select(columns)
        for start in range(0, batch.num_rows, step):
            yield batch.slice(start, step)


class _Stream:
    """Arrow's stream format, which Hugging Face uses for its cache: read as one group."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        with self._reader() as reader:
            self.schema = reader.schema

    def groups(self) -> Iterator[tuple[int, int]]:
        rows = size = 0
        with self._reader() as reader:
            for batch in reader:
                rows, size = rows + batch.num_rows, size + batch.nbytes
        yield rows, size

    def read(self, number: int, columns: list[str], step: int) -> Iterator[Any]:  # noqa: ARG002
        with self._reader() as reader:
            for batch in reader:
                chosen = batch.select(columns)
                for start in range(0, chosen.num_rows, step):
                    yield chosen.slice(start, step)

    @contextlib.contextmanager
    def _reader(self) -> Iterator[Any]:
        import pyarrow as pa

        with self._file.open() as stream, pa.ipc.open_stream(stream) as reader:
            yield reader


def _open_file(file: SourceFile) -> _Parquet | _Batches | _Stream:
    try:
        import pyarrow as pa
    except ModuleNotFoundError as error:
        raise DataError(f"{file.name} needs pyarrow, which is not installed: {EXTRA}.") from error
    if file.suffix == ".parquet":
        return _Parquet(file)
    try:
        return _Batches(file)
    except pa.ArrowInvalid:
        return _Stream(file)


def _seekable(file: SourceFile, local: Callable[[str], Any]) -> Any:
    """Open a file for pyarrow. `local`: opens a path. Raises DataError if it was replaced."""
    if not isinstance(file, LocalFile):
        return file.open()
    opened = local(str(file.path))
    file.open().close()
    return opened


class ColumnReader(SampleReader):
    """Reads the rows of several files, in order.

    A file is read group by group, a group batch by batch. The position of the last read is kept, so
    that reading on in order does not restart a group.
    """

    def __init__(
        self, files: Sequence[SourceFile], fields: Fields, pictures: PictureDecoder, *, origin: str
    ) -> None:
        """Reads the metadata of the files. Raises DataError."""
        self.origin, self._pictures, self._fields = origin, pictures, fields
        open_file = lru_cache(_MAX_OPEN)(_open_file)  # There may be thousands of shards.
        self._groups: list[RowGroup] = []
        first: Any = None
        for file in files:
            with _named_errors(file.name):
                opened = open_file(file)
                first = opened.schema if first is None else first
                if not opened.schema.equals(first):
                    raise DataError(
                        f"the columns or types of {file.name} differ from {files[0].name}: "
                        f"{opened.schema.names} and {first.names}. Write all shards with the same "
                        "schema."
                    )
                self._groups += [
                    RowGroup(file, partial(open_file, file), number, rows, size)
                    for number, (rows, size) in enumerate(opened.groups())
                    if rows
                ]
        if not self._groups:
            raise DataError(f"{origin} has no rows: nothing to measure. Add samples.")
        self._ends = list(accumulate(group.rows for group in self._groups))
        self._position = _ReadPosition()
        self._choose(first, fields)
        block = self._block(0, 1)
        self.specs = tuple(
            spec_of(name, array.dtype, array.shape[1:]) for name, array in block.arrays.items()
        )

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, indices: Sequence[int]) -> Block:
        """Return the samples with these indices."""
        blocks = [self._block(start, stop) for start, stop in _runs(indices)]
        for block in blocks:
            self._check(block, indices[0])
        return _concatenate(blocks)

    def _choose(self, schema: Any, fields: Fields) -> None:
        import pyarrow as pa

        names = list(schema.names)
        if len(set(names)) < len(names):
            raise DataError(
                f"{self.origin} has two columns with the same name: {names}. Rename one."
            )
        self._inputs, self._label = fields.select(names)
        if self._label is not None and not pa.types.is_integer(schema.field(self._label).type):
            if fields.label is not None:
                raise DataError(
                    f"column '{self._label}' of {self.origin} has type "
                    f"{schema.field(self._label).type}, but labels are integers. Name another "
                    "column."
                )
            self._label = None
            self._inputs = fields.inputs or tuple(names)
        if not self._inputs:
            raise DataError(f"{self.origin} has only a label column. Add columns for the inputs.")
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
            columns = [*self._inputs, *([self._label] if self._label else [])]
            for batch, first in self._position.rows(group, span, columns):
                parts.append(self._convert(batch, begin + first))
        return _concatenate(parts)

    def _convert(self, batch: Any, start: int) -> Block:
        arrays: dict[str, RowsArray] = {}
        for name in self._inputs:
            column = batch.column(name)
            texts = _is_text(column.type) and self._pictures.takes_texts(name, self._fields)
            arrays[name] = (
                picture_tensors(column, name=name, start=start, pictures=self._pictures)
                if is_picture_column(column.type) and not texts
                else numbers(column, name=name, start=start)
            )
        if self._label is None:
            return Block(arrays)
        labels = indices(batch.column(self._label), name=self._label, start=start)
        return Block(arrays, labels.astype(np.int64))

    def _check(self, block: Block, sample: int) -> None:
        for spec in self.specs:
            array = block.arrays[spec.name]
            if (dtype_name(array.dtype), array.shape[1:]) != (spec.dtype, spec.shape[1:]):
                raise DataError(
                    f"'{spec.name}' of {self.origin} has shape {array.shape[1:]} ({array.dtype}) "
                    f"from sample {sample} on, but {tuple(spec.shape[1:])} ({spec.dtype}) at "
                    "sample 0. Give all samples the same shape: pad, crop or resize them."
                )


class _ReadPosition:
    """The position at which the last read of a group ended."""

    def __init__(self) -> None:
        self._group: RowGroup | None = None
        self._columns: list[str] = []
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        self._start = 0

    def rows(self, group: RowGroup, span: range, columns: list[str]) -> Iterator[tuple[Any, int]]:
        """Yield record batches of these rows, each with the index of its first row in the group."""
        is_behind = span.start < self._start
        if group is not self._group or is_behind or columns != self._columns:
            self._group, self._columns = group, columns
            self._batches, self._batch, self._start = group.batches(columns), None, 0
        row = span.start
        while row < span.stop:
            if self._batch is None:
                self._batch = next(self._batches, None)
                if self._batch is None:
                    self._group = None
                    raise DataError(
                        f"{group.file.name} has fewer rows than its metadata states: {group.rows} "
                        "in a group. Write it again."
                    )
            end = self._start + self._batch.num_rows
            if end > row:
                stop = min(end, span.stop)
                yield self._batch.slice(row - self._start, stop - row), row
                row = stop
            if end <= row:
                self._start, self._batch = end, None


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of consecutive indices as (start, stop)."""
    start = previous = indices[0]
    for index in indices[1:]:
        if index != previous + 1:
            yield start, previous + 1
            start = index
        previous = index
    yield start, previous + 1


def _concatenate(blocks: Sequence[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    names = blocks[0].arrays
    for block in blocks:
        for name in names:
            array, first = block.arrays[name], names[name]
            if array.shape[1:] != first.shape[1:]:
                raise DataError(
                    f"'{name}' has samples of shape {array.shape[1:]} and of {first.shape[1:]}. "
                    "Give all samples the same shape: pad, crop or resize them."
                )
    arrays = {name: np.concatenate([block.arrays[name] for block in blocks]) for name in names}
    labels = [block.labels for block in blocks if block.labels is not None]
    return Block(arrays, np.concatenate(labels) if labels else None)
