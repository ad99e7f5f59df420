"""Open any source in any process; read ahead; compare repeated reads."""

from __future__ import annotations

import hashlib
import os
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
    changed,
    check_kinds,
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
    copy_files,
    remote_files,
)
from gate.data.reader import Block, SampleReader
from gate.errors import DataError, GateError, StorageError, by_name, first_line
from gate.preprocess.spec import PreprocessSpec
from gate.storage.arrays import RowsArray, dtype_name, value_bytes
from gate.storage.files import temporary_folder
from gate.storage.safe_text import redacted

TARS = (".tar",)

COLUMNS = (".parquet", ".arrow", ".feather")

KINDS = (*SUFFIXES, *COLUMNS, *TARS)


@dataclass(frozen=True)
class Opening:
    """All that another process needs in order to open the same samples."""

    inputs: str
    """As `gate check --inputs` takes it."""
    preprocessing: PreprocessSpec | None = None
    """How pictures become inputs."""

    def rows(self) -> SampleReader:
        """Open it. Raises DataError, StorageError."""
        named, pictures = SampleLocation.parse(self.inputs), PictureDecoder(self.preprocessing)
        if named.is_factory:
            from gate.data.datasets import rows_of_factory

            return rows_of_factory(named.place, named.fields, pictures)
        files = remote_files(named.place, kinds=KINDS) if named.is_url else _local(named.place)
        origin = redacted(named.place) if named.is_url else named.place
        kind = files[0].suffix if files else ".npy"
        if kind in TARS:
            from gate.data.tar_files import TarReader

            return TarReader(files, named.fields, pictures, origin=origin)
        if kind in COLUMNS:
            from gate.data.columnar_files import ColumnReader

            return ColumnReader(files, named.fields, pictures, origin=origin)
        if named.fields != Fields():
            raise DataError(
                f"{origin} has no fields to choose: a .npy is one input, and each array of a .npz. "
                "Leave away what stands behind #."
            )
        if not named.is_url:
            return MappedRows(open_shards(Path(named.place)), origin=origin)
        check_kinds([file.name for file in files], origin=origin, kinds=SUFFIXES)
        remote = [file for file in files if isinstance(file, RemoteFile)]
        with temporary_folder() as folder:  # the maps keep the bytes of what is removed
            copies = copy_files(remote, folder)
            return MappedRows([open_shard(copy) for copy in copies], origin=origin)


def _local(place: str) -> list[SourceFile]:
    """The files of columns and tars; none of what is mapped or strange."""
    path = Path(place)
    try:
        is_folder = path.is_dir()
    except OSError as error:  # such as a name that is too long
        raise DataError(f"cannot read {place[:200]}: {error.strerror}. Check the path.") from error
    if is_folder:
        return [LocalFile(file) for file in shard_files(path, kinds=KINDS)]
    return [LocalFile(path)] if path.suffix.lower() in (*TARS, *COLUMNS) else []


_DIGEST_BYTES = 8
"""Length of the stored digest of a sample. Digests are stored in an unnamed temporary file, so that
memory does not grow. Eight bytes detect accidents, not attacks."""


class RepeatedReadCheck(SampleReader):
    """Another source, of which each place gives the same sample each time, or a DataError."""

    repeated = True

    def __init__(self, rows: SampleReader) -> None:
        """Raises StorageError where short digests find no room."""
        self.origin, self.specs, self.labelled = rows.origin, rows.specs, rows.labelled
        self._rows = rows
        count = len(rows)
        try:
            with tempfile.TemporaryFile() as file:
                shape = (2 if self.labelled else 1, count)
                self._kept: RowsArray = np.memmap(file, np.uint64, mode="w+", shape=shape)
        except OSError as error:
            raise StorageError(
                f"no room for short digests of {count} samples: {error.strerror or error}. Free "
                "space, or set TMPDIR."
            ) from error

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._rows)

    def read(self, places: Sequence[int]) -> Block:
        """The samples at these places."""
        return self._compared(self._rows.read(places), places)

    def batches(self, places: range, size: int) -> Iterator[Block]:
        """The samples of a range by `size`."""
        start = 0
        for block in self._rows.batches(places, size):
            count = len(block.arrays[self.names[0]])
            yield self._compared(block, places[start : start + count])
            start += count

    def labels(self, places: range) -> NDArray[np.int64] | None:
        """Class indices of a range; nothing is read anew where all were read before."""
        if not self.labelled:
            return None
        span = slice(places.start, places.stop)
        if not np.all(self._kept[0, span]):
            for _ in self.batches(places, self.chunk):
                pass
        return np.array(self._kept[1, span]).astype(np.int64)

    def _compared(self, block: Block, places: Sequence[int]) -> Block:
        for row, place in enumerate(places):
            made = _short_digest(block, row, self.names)
            before = self._kept[0, place]
            if before and before != made:
                raise changed(
                    f"sample {place} of {self.origin} is another one than when it was read before: "
                    "the data set shuffles, augments or changes"
                )
            self._kept[0, place] = made
            if block.labels is not None:
                self._kept[1, place] = block.labels[row]
        forget_pages(self._kept)
        return block


def _short_digest(block: Block, row: int, names: Sequence[str]) -> np.uint64:
    """Return a short digest that is never 0, because 0 stands for none."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in names:
        digest.update(value_bytes(block.arrays[name][row]))
    if block.labels is not None:
        digest.update(block.labels[row].tobytes())
    return np.uint64(int.from_bytes(digest.digest(), "little") or 1)


_START_S = 8.0
"""Until workers have imported PyTorch: what is decoded in less is decoded here."""

_MOST = 4
"""The default number of workers."""

_Answer = tuple[dict[str, RowsArray], NDArray[np.int64] | None] | tuple[str, str]
"""Arrays and labels; or an error by its class and message, which would else come as a traceback."""


def read_ahead(rows: SampleReader, opening: Opening, *, workers: int | None) -> SampleReader:
    """The rows as samples need them: compared at each reading, and read ahead by so many processes
    (None: some, where it pays). Arrays that are mapped need neither."""
    if isinstance(rows, MappedRows):
        return rows
    return RepeatedReadCheck(rows if workers == 0 else AheadRows(rows, opening, workers))


class AheadRows(SampleReader):
    """Another source, of which batches in order are read by workers of PyTorch's DataLoader. A
    worker opens the samples itself, by their name, so that threads of ONNX Runtime are not
    forked."""

    def __init__(self, rows: SampleReader, opening: Opening, workers: int | None) -> None:
        """`workers`: None takes as many as there are cores for, once that pays."""
        self.origin, self.specs, self.labelled = rows.origin, rows.specs, rows.labelled
        self._rows, self._opening, self._wanted = rows, opening, workers
        self._spans = _Spans()
        self._loader: Any = None
        self._busy = False

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._rows)

    def read(self, places: Sequence[int]) -> Block:
        """The samples at these places, read here."""
        return self._rows.read(places)

    def batches(self, places: range, size: int) -> Iterator[Block]:
        """The samples of a range by `size`. The first batch is read here: many need no other."""
        began = time.perf_counter()
        first = self._rows.read(places[:size])
        one_s = time.perf_counter() - began
        yield first
        rest = [places[start : start + size] for start in range(size, len(places), size)]
        if self._busy or not self._pays(one_s * len(rest)):
            yield from (self._rows.read(span) for span in rest)
            return
        self._busy = True
        try:
            for span, answer in zip(rest, self._answers(rest), strict=True):
                yield self._block(answer, span)
        finally:
            self._busy = False

    def _block(self, answer: Any, span: range) -> Block:
        first, second = answer
        if isinstance(first, str):
            raise (by_name(first) or DataError)(second)
        forms = {spec.name: (spec.dtype, (len(span), *spec.shape[1:])) for spec in self.specs}
        if {n: (dtype_name(array.dtype), array.shape) for n, array in first.items()} != forms:
            raise DataError(
                f"samples {span.start} to {span.stop - 1} of {self.origin} are others in another "
                "process. Let the factory give the same samples each time it is called."
            )
        return Block(first, second)

    def _pays(self, alone_s: float) -> bool:
        if alone_s <= 0:
            return False
        if self._wanted is not None:
            return self._wanted > 0
        return _cores() > 1 and (self._loader is not None or alone_s > _START_S)

    def _answers(self, spans: Sequence[range]) -> Iterator[_Answer]:
        """Yield the results of the workers, in order. The workers stay for the next call."""
        self._spans.now = spans
        try:
            if self._loader is None:
                self._loader = self._started()
            yield from self._loader
        except GateError:
            raise
        except Exception as error:
            self._loader = None
            raise StorageError(
                f"a process that reads {self.origin} ahead ended: {first_line(error)}. If it was "
                "killed for its memory, give fewer: --decode-workers 1, or 0 for none."
            ) from error

    def _started(self) -> Any:
        from torch.utils.data import DataLoader

        workers = self._wanted or min(_MOST, _cores() - 1)
        with warnings.catch_warnings():  # of more workers than cores, which the user set
            warnings.simplefilter("ignore", UserWarning)
            return DataLoader(
                _Opened(self._opening),  # type: ignore[arg-type]  # all that it needs of a Dataset
                batch_size=None,
                sampler=self._spans,
                num_workers=workers,
                collate_fn=_as_it_is,  # arrays through a pipe: /dev/shm of a container is small
                multiprocessing_context="spawn",
                persistent_workers=True,
            )


class _Spans:
    """The sampler: which ranges are read, now."""

    now: Sequence[range] = ()

    def __iter__(self) -> Iterator[range]:
        return iter(self.now)

    def __len__(self) -> int:
        return len(self.now)


class _Opened:
    """The samples in a worker, opened by the first range that is read of them."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._rows: SampleReader | None = None

    def __getitem__(self, span: range) -> _Answer:
        try:
            if self._rows is None:
                self._rows = self._opening.rows()
            block = self._rows.read(span)
        except GateError as error:
            return type(error).__name__, str(error)
        return block.arrays, block.labels


def _as_it_is(answer: Any) -> Any:
    return answer


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
