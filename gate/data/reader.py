"""The interface of sample readers: named arrays of a range."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError
from gate.records.evidence import TensorSpec
from gate.storage.arrays import STRING, Batch, dtype_name

if TYPE_CHECKING:
    from gate.storage.arrays import RowsArray


_CHUNK_BYTES = 1 << 24
"""Number of bytes to read at a time if no batch size is set."""

_TEXT_BYTES = 256
"""Estimated size of a string."""


@dataclass(frozen=True)
class Block:
    """Some samples as arrays with a common axis 0, and their labels if the source has labels."""

    arrays: dict[str, RowsArray]
    """Contiguous, writable arrays in native byte order, by input name."""
    labels: NDArray[np.int64] | None = None
    """Class indices, shape (samples,)."""


class SampleReader(ABC):
    """One source of samples. An index gives the same sample each time, or raises an error.

    A subclass defines `__len__` and `read`. A streaming source keeps its position, so that reading
    in order does not restart.
    """

    origin: str
    """The name of the source in messages."""
    specs: tuple[TensorSpec, ...]
    """The dtype and shape ("samples", ...) of each input."""
    labelled = False
    """True if the blocks have labels."""
    repeated = False
    """True if repeated reads are compared with the first one."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the inputs."""
        return tuple(spec.name for spec in self.specs)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of the whole array of each input."""
        return {spec.name: (len(self), *map(int, spec.shape[1:])) for spec in self.specs}

    def rearranged(self, axes: Mapping[str, int | None]) -> SampleReader:
        """Return the same samples with the batch axis on axis 0.

        `axes`: the batch axis of each array; None: all samples share the array. Raises DataError.
        """
        if any(axis != 0 for axis in axes.values()):
            raise DataError(
                f"{self.origin} returns single samples, so the batch axis of every input is axis "
                f"0, not {dict(axes)}. Leave the batch axis out of each sample."
            )
        return self

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples, at least one."""

    @abstractmethod
    def read(self, indices: Sequence[int]) -> Block:
        """Return the samples with these indices, in this order. Raises DataError."""

    def batches(self, indices: range, size: int) -> Iterator[Block]:
        """Yield the samples of a range in blocks of `size`; the last block may be smaller."""
        for start in range(0, len(indices), size):
            yield self.read(indices[start : start + size])

    def column(self, name: str, indices: range) -> Iterator[RowsArray]:
        """Yield the rows of one input, in chunks."""
        for block in self.batches(indices, self.chunk):
            yield block.arrays[name]

    def labels(self, indices: range) -> NDArray[np.int64] | None:
        """Return the class indices of a range, shape (samples,), or None without labels."""
        if not self.labelled:
            return None
        parts = [block.labels for block in self.batches(indices, self.chunk)]
        return np.concatenate([part for part in parts if part is not None])

    @property
    def chunk(self) -> int:
        """Return the number of samples in a chunk of some MB."""
        return rows_within(_CHUNK_BYTES, self.specs)


def rows_within(size_bytes: int, specs: Sequence[TensorSpec]) -> int:
    """Return the number of samples of at most this size in total, at least one."""
    row = sum(math.prod(map(int, spec.shape[1:])) * _item_bytes(spec.dtype) for spec in specs)
    return max(1, size_bytes // max(1, row))


def _item_bytes(dtype: str) -> int:
    return _TEXT_BYTES if dtype == STRING else np.dtype(dtype).itemsize


def spec_of(name: str, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> TensorSpec:
    """Return the spec of an input. `shape`: the shape of one sample."""
    return TensorSpec(name=name, dtype=dtype_name(dtype), shape=("samples", *shape))


def length(batch: Batch) -> int:
    """Return the number of samples in a batch."""
    return len(next(iter(batch.values())))
