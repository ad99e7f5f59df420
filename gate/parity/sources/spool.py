"""An iterable, read once into files without a name: then it is counted, and every place is there.

Its samples go to the disk and not into memory. Reading it anew for each pass would need nothing,
but many give another order each time, and no place could be looked at again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError, StorageError
from gate.parity.arrays.mapped import MappedRows
from gate.parity.arrays.rows import Array
from gate.parity.arrays.shards import HeldShard
from gate.parity.sources.items import Items, Sample, guarded

_LOOK_BYTES = 1 << 26
"""So many are written between two looks at the room that is left, and are left there."""
_NOTHING = object()


def spooled(data: Iterable[Any], make: Callable[[Any], Items], *, origin: str) -> MappedRows:
    """The samples of an iterable. `make`: what the first item says of all.

    Raises DataError for what is no whole set of samples, StorageError where it does not fit into
    the temporary folder.
    """
    stream = _stream(data, origin)
    first = next(stream, _NOTHING)
    if first is _NOTHING:
        raise DataError(f"{origin} gave no sample: nothing to measure. Give samples.")
    items = make(first)
    with ExitStack() as opened:
        try:
            files: dict[str, IO[bytes]] = {
                spec.name: opened.enter_context(tempfile.TemporaryFile()) for spec in items.specs
            }
            spool = _Spool(items, files, opened.enter_context(tempfile.TemporaryFile()))
            spool.add(items.sample(first, 0))
            for place, item in enumerate(stream, start=1):
                spool.add(items.sample(item, place))
            shard, labels = spool.mapped()
        except OSError as error:
            raise StorageError(
                f"cannot spool the samples of {origin}: {error.strerror or error}. {_REMEDY}"
            ) from error
    return MappedRows([shard], origin=origin, labels=labels)


_REMEDY = (
    "An iterable is copied to the disk once. Free space, set TMPDIR, or give a data set with "
    "a length and places, Parquet or .tar shards, which are not copied. Does it end?"
)


class _Spool:
    """One file an input, and one of labels."""

    def __init__(self, items: Items, files: dict[str, IO[bytes]], labels: IO[bytes]) -> None:
        self._items, self._files, self._labels = items, files, labels
        self._count, self._unlooked = 0, 0

    def add(self, sample: Sample) -> None:
        """Write one. Raises OSError, StorageError."""
        for name, file in self._files.items():
            self._unlooked += file.write(np.ascontiguousarray(sample.arrays[name]).tobytes())
        if sample.label is not None:
            self._labels.write(np.int64(sample.label).tobytes())
        self._count += 1
        if self._unlooked > _LOOK_BYTES:
            self._unlooked = 0
            free = shutil.disk_usage(tempfile.gettempdir()).free
            if free < _LOOK_BYTES:
                raise StorageError(
                    f"no room to spool samples into {tempfile.gettempdir()} after {self._count} of "
                    f"them: {free} bytes are left. {_REMEDY}"
                )

    def mapped(self) -> tuple[HeldShard, NDArray[np.int64] | None]:
        """What was written."""
        arrays = {
            spec.name: _map(self._files[spec.name], spec.dtype, (self._count, *spec.shape[1:]))
            for spec in self._items.specs
        }
        labels = _map(self._labels, "int64", (self._count,)) if self._items.labelled else None
        return HeldShard(arrays), None if labels is None else labels.astype(np.int64)


def _map(file: IO[bytes], dtype: str, shape: tuple[Any, ...]) -> Array:
    file.flush()
    return np.memmap(file, np.dtype(dtype), mode="r", shape=shape)


def _stream(data: Iterable[Any], origin: str) -> Iterator[Any]:
    stream = guarded(lambda: iter(data), what=f"the iterable of {origin}")
    place = 0
    while True:
        try:
            item = guarded(lambda: next(stream), what=f"sample {place} of {origin}")
        except StopIteration:
            return
        yield item
        place += 1
