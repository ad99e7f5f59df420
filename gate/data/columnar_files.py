"""One file of columns: its schema, its groups of rows, and streams of their batches."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gate.errors import DataError, GateError, first_line
from gate.parity.sources.files import EXTRA, LocalFile, SourceFile

_BATCH_BYTES = 1 << 22
_HELD = 3
"""Files that are open at a time."""
_MOST_ROWS = 4096
"""Of a batch of columns without many bytes."""


@dataclass(frozen=True, eq=False)
class RowGroup:
    """SourceRows that are read in order from their first: a row group, or a record batch."""

    file: ColumnFile
    number: int
    rows: int
    size: int
    """About so many bytes are in it."""

    def batches(self, columns: list[str]) -> Iterator[Any]:
        """Its record batches with these columns, some MB each. Raises DataError."""
        step = max(1, min(_MOST_ROWS, self.rows * _BATCH_BYTES // max(1, self.size)))
        with self.file.readable():
            yield from self.file.read(self.number, columns, step)


class ColumnFile:
    """Parquet, or Arrow's file or stream format."""

    def __init__(self, file: SourceFile, held: HeldFiles) -> None:
        """`held`: the files that stay open. Raises DataError."""
        self.name, self._file, self._held = file.name, file, held
        with self.readable():
            opened = held.opened(file)
            self.schema = opened.schema
            self.groups = [
                RowGroup(self, number, rows, size)
                for number, (rows, size) in enumerate(opened.groups())
            ]

    def check(self, what: str) -> None:
        """Raise DataError where the file is another one than before."""
        self._file.check(what)

    def read(self, number: int, columns: list[str], step: int) -> Iterator[Any]:
        """The record batches of a group."""
        return self._held.opened(self._file).read(number, columns, step)

    def readable(self) -> _Readable:
        """While this lasts, what pyarrow finds wrong is a DataError."""
        return _Readable(self.name)


class HeldFiles:
    """The latest files that were read: of thousands of shards few may be open."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, _Parquet | _Batches | _Stream] = OrderedDict()

    def opened(self, file: SourceFile) -> _Parquet | _Batches | _Stream:
        """The file, opened where it is not. Raises DataError, and what pyarrow raises."""
        if file.name in self._held:
            self._held.move_to_end(file.name)
            return self._held[file.name]
        while len(self._held) >= _HELD:
            self._held.popitem(last=False)
        self._held[file.name] = opened = _opened(file)
        return opened


class _Readable:
    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, GateError | MemoryError):
            raise DataError(
                f"cannot read {self._name} as columns: "
                f"{first_line(error, empty=type(error).__name__)}. Expected a whole Parquet or "
                "Arrow file; write it again."
            ) from error


class _Parquet:
    def __init__(self, file: SourceFile) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        # Pages are read as they are needed.
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
    """Arrow's file format, Feather among it: record batches at places that are written down."""

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
    """Arrow's stream format, as Hugging Face caches data sets: one group from its start."""

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


def _opened(file: SourceFile) -> _Parquet | _Batches | _Stream:
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
    """`local`: what opens a path. Raises DataError where another file has the name by now."""
    if not isinstance(file, LocalFile):
        return file.open()
    opened = local(str(file.path))
    file.open().close()
    return opened
