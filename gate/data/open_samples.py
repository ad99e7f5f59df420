"""Open any source in any process; read ahead; compare repeated reads."""

from __future__ import annotations

import hashlib
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.data.array_files import (
    SUFFIXES,
    MappedRows,
    forget_pages,
    open_shard,
    open_shards,
    shard_files,
)
from gate.data.datasets import PictureDecoder
from gate.data.location import (
    Fields,
    LocalFile,
    RemoteFile,
    SampleLocation,
    SourceFile,
    changed,
    check_kinds,
    copy_files,
    remote_files,
)
from gate.data.reader import Block, SampleReader
from gate.errors import DataError, GateError, StorageError, by_name, first_line
from gate.installation import logical_cores
from gate.preprocess.spec import PreprocessSpec
from gate.storage.arrays import RowsArray, dtype_name, value_bytes
from gate.storage.files import temporary_folder
from gate.storage.safe_text import redacted

TARS = (".tar",)

COLUMNS = (".parquet", ".arrow", ".feather")

KINDS = (*SUFFIXES, *COLUMNS, *TARS)


@dataclass(frozen=True)
class Opening:
    """The arguments with which another process can open the same samples."""

    inputs: str
    """The value of `gate check --inputs`."""
    preprocessing: PreprocessSpec | None = None
    """The preprocessing of pictures."""

    def rows(self) -> SampleReader:
        """Open the samples. Raises DataError, StorageError."""
        location, pictures = SampleLocation.parse(self.inputs), PictureDecoder(self.preprocessing)
        source = location.source
        if location.is_factory:
            from gate.data.datasets import rows_of_factory

            return rows_of_factory(source, location.fields, pictures)
        files = remote_files(source, kinds=KINDS) if location.is_url else _local(source)
        origin = redacted(source) if location.is_url else source
        kind = files[0].suffix if files else ".npy"
        if kind in TARS:
            from gate.data.tar_files import TarReader

            return TarReader(files, location.fields, pictures, origin=origin)
        if kind in COLUMNS:
            from gate.data.columnar_files import ColumnReader

            return ColumnReader(files, location.fields, pictures, origin=origin)
        if location.fields != Fields():
            raise DataError(
                f"{origin} has no fields to choose from: a .npy is one input, and so is each array "
                "of a .npz. Remove the part after #."
            )
        if not location.is_url:
            return MappedRows(open_shards(Path(source)), origin=origin)
        check_kinds([file.name for file in files], origin=origin, kinds=SUFFIXES)
        remote = [file for file in files if isinstance(file, RemoteFile)]
        with temporary_folder() as folder:  # Mapped files stay readable after they are removed.
            copies = copy_files(remote, folder)
            return MappedRows([open_shard(copy) for copy in copies], origin=origin)


def _local(name: str) -> list[SourceFile]:
    """Return the files of a folder, or a columnar or tar file. Empty for other files."""
    path = Path(name)
    try:
        is_folder = path.is_dir()
    except OSError as error:  # For example, the name is too long.
        raise DataError(f"cannot read {name[:200]}: {error.strerror}. Check the path.") from error
    if is_folder:
        return [LocalFile(file) for file in shard_files(path, kinds=KINDS)]
    return [LocalFile(path)] if path.suffix.lower() in (*TARS, *COLUMNS) else []


_DIGEST_BYTES = 8
"""Length of the stored digest of a sample. Digests are stored in an unnamed temporary file, so that
memory does not grow. Eight bytes detect accidents, not attacks."""


class RepeatedReadCheck(SampleReader):
    """Wraps a reader. Raises DataError if a repeated read of a sample differs from the first."""

    repeated = True

    def __init__(self, rows: SampleReader) -> None:
        """Raises StorageError if there is not enough space for short digests."""
        self.origin, self.specs, self.labelled = rows.origin, rows.specs, rows.labelled
        self._rows = rows
        count = len(rows)
        try:
            with tempfile.TemporaryFile() as file:
                shape = (2 if self.labelled else 1, count)
                self._stored: RowsArray = np.memmap(file, np.uint64, mode="w+", shape=shape)
        except OSError as error:
            raise StorageError(
                f"not enough space for short digests of {count} samples: "
                f"{error.strerror or error}. Free space, or set TMPDIR."
            ) from error

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: Sequence[int]) -> Block:
        """Return the samples with these indices."""
        return self._compared(self._rows.read(indices), indices)

    def batches(self, indices: range, size: int) -> Iterator[Block]:
        """Yield the samples of a range in blocks of `size`."""
        start = 0
        for block in self._rows.batches(indices, size):
            count = len(block.arrays[self.names[0]])
            yield self._compared(block, indices[start : start + count])
            start += count

    def labels(self, indices: range) -> NDArray[np.int64] | None:
        """Return the class indices of a range. Reads it only if it was not read completely yet."""
        if not self.labelled:
            return None
        span = slice(indices.start, indices.stop)
        if not np.all(self._stored[0, span]):
            for _ in self.batches(indices, self.chunk):
                pass
        return np.array(self._stored[1, span]).astype(np.int64)

    def _compared(self, block: Block, indices: Sequence[int]) -> Block:
        for row, index in enumerate(indices):
            digest = _short_digest(block, row, self.names)
            stored = self._stored[0, index]
            if stored and stored != digest:
                raise changed(
                    f"sample {index} of {self.origin} differs from when it was read before: the "
                    "data set shuffles, augments or changes"
                )
            self._stored[0, index] = digest
            if block.labels is not None:
                self._stored[1, index] = block.labels[row]
        forget_pages(self._stored)
        return block


def _short_digest(block: Block, row: int, names: Sequence[str]) -> np.uint64:
    """Return a short digest that is never 0, because 0 means that none is stored."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in names:
        digest.update(value_bytes(block.arrays[name][row]))
    if block.labels is not None:
        digest.update(block.labels[row].tobytes())
    return np.uint64(int.from_bytes(digest.digest(), "little") or 1)


_START_S = 8.0
"""Time in which workers import PyTorch. Shorter work is done in this process."""

_MAX_WORKERS = 4
"""Maximum number of workers that are started by default."""

_Result = tuple[dict[str, RowsArray], NDArray[np.int64] | None] | tuple[str, str]
"""Arrays and labels, or class name and message of an error, which would arrive as a traceback."""


def read_ahead(rows: SampleReader, opening: Opening, *, workers: int | None) -> SampleReader:
    """Return a reader that compares repeated reads and reads ahead with worker processes.

    workers: None chooses the number. Mapped arrays need neither and are returned unchanged.
    """
    if isinstance(rows, MappedRows):
        return rows
    return RepeatedReadCheck(rows if workers == 0 else ReadAheadReader(rows, opening, workers))


class ReadAheadReader(SampleReader):
    """Wraps a reader whose batches are read ahead by workers of PyTorch's DataLoader. Each worker
    opens the samples itself, because forking the threads of ONNX Runtime is unsafe."""

    def __init__(self, rows: SampleReader, opening: Opening, workers: int | None) -> None:
        """`workers`: number of workers; None: by the number of cores, if there is enough work."""
        self.origin, self.specs, self.labelled = rows.origin, rows.specs, rows.labelled
        self._rows, self._opening, self._workers = rows, opening, workers
        self._spans = _Spans()
        self._loader: Any = None
        self._busy = False

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: Sequence[int]) -> Block:
        """Return the samples with these indices, read in this process."""
        return self._rows.read(indices)

    def batches(self, indices: range, size: int) -> Iterator[Block]:
        """Yield the samples of a range in blocks of `size`. This process reads the first block:
        many callers need no other."""
        started = time.perf_counter()
        first = self._rows.read(indices[:size])
        batch_s = time.perf_counter() - started
        yield first
        remaining = [indices[start : start + size] for start in range(size, len(indices), size)]
        if self._busy or not self._is_worthwhile(batch_s * len(remaining)):
            yield from (self._rows.read(span) for span in remaining)
            return
        self._busy = True
        try:
            for span, result in zip(remaining, self._results(remaining), strict=True):
                yield self._block(result, span)
        finally:
            self._busy = False

    def _block(self, result: Any, span: range) -> Block:
        first, second = result
        if isinstance(first, str):
            raise (by_name(first) or DataError)(second)
        forms = {spec.name: (spec.dtype, (len(span), *spec.shape[1:])) for spec in self.specs}
        if {n: (dtype_name(array.dtype), array.shape) for n, array in first.items()} != forms:
            raise DataError(
                f"samples {span.start} to {span.stop - 1} of {self.origin} differ in another "
                "process. The factory must return the same samples each time it is called."
            )
        return Block(first, second)

    def _is_worthwhile(self, estimated_s: float) -> bool:
        if estimated_s <= 0:
            return False
        if self._workers is not None:
            return self._workers > 0
        return logical_cores() > 1 and (self._loader is not None or estimated_s > _START_S)

    def _results(self, spans: Sequence[range]) -> Iterator[_Result]:
        """Yield the results of the workers, in order. The workers stay for the next call."""
        self._spans.spans = spans
        try:
            if self._loader is None:
                self._loader = self._start_loader()
            yield from self._loader
        except GateError:
            raise
        except Exception as error:
            self._loader = None
            raise StorageError(
                f"a process that reads {self.origin} ahead ended: {first_line(error)}. If it ran "
                "out of memory, use fewer: --decode-workers 1, or 0 for none."
            ) from error

    def _start_loader(self) -> Any:
        from torch.utils.data import DataLoader

        workers = self._workers or min(_MAX_WORKERS, logical_cores() - 1)
        with warnings.catch_warnings():  # The user may choose more workers than cores.
            warnings.simplefilter("ignore", UserWarning)
            return DataLoader(
                _WorkerSamples(self._opening),  # type: ignore[arg-type]  # only __getitem__ is used
                batch_size=None,
                sampler=self._spans,
                num_workers=workers,
                collate_fn=_identity,  # No tensors: /dev/shm of a container is small.
                multiprocessing_context="spawn",
                persistent_workers=True,
            )


class _Spans:
    """The sampler of the DataLoader: the ranges of the current call."""

    spans: Sequence[range] = ()

    def __iter__(self) -> Iterator[range]:
        return iter(self.spans)

    def __len__(self) -> int:
        return len(self.spans)


class _WorkerSamples:
    """The samples in a worker, opened by the first read."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._rows: SampleReader | None = None

    def __getitem__(self, span: range) -> _Result:
        try:
            if self._rows is None:
                self._rows = self._opening.rows()
            block = self._rows.read(span)
        except GateError as error:
            return type(error).__name__, str(error)
        return block.arrays, block.labels


def _identity(result: Any) -> Any:
    return result
