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
"""Bytes of one input that are read at a time where no batch size is set."""

_TEXT_BYTES = 256
"""Estimated size of a text."""


@dataclass(frozen=True)
class Block:
    """Some samples as arrays with a common axis 0, and their labels where the source has them."""

    arrays: dict[str, RowsArray]
    """By name of the input; own, contiguous, writable copies in native byte order."""
    labels: NDArray[np.int64] | None = None
    """Class indices, shape (samples,)."""


class SampleReader(ABC):
    """One source of samples. The same index gives the same sample each time, or raises an error.

    A subclass defines `__len__` and `read`. A source that is a stream keeps its position, so that
    reading on in order does not begin again.
    """

    origin: str
    """What people call it, for messages."""
    specs: tuple[TensorSpec, ...]
    """One array an input: dtype, and shape ("samples", ...)."""
    labelled = False
    """Whether its blocks have labels."""
    repeated = False
    """Whether a second reading is compared with the first."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the inputs."""
        return tuple(spec.name for spec in self.specs)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of the whole array of each input."""
        return {spec.name: (len(self), *map(int, spec.shape[1:])) for spec in self.specs}

    def rearranged(self, axes: Mapping[str, int | None]) -> SampleReader:
        """Return the same samples with the samples on axis 0.

        `axes`: their axis in each array; None: the array belongs to every sample. Raises DataError.
        """
        if any(axis != 0 for axis in axes.values()):
            raise DataError(
                f"{self.origin} gives its samples one by one, so axis 0 is the sample of every "
                f"input; {dict(axes)} was asked for. Leave the batch axis out of each sample."
            )
        return self

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples, at least one."""

    @abstractmethod
    def read(self, places: Sequence[int]) -> Block:
        """The samples at these places, in this order. Raises DataError."""

    def batches(self, places: range, size: int) -> Iterator[Block]:
        """The samples of a range by `size`; the last block may be smaller."""
        for start in range(0, len(places), size):
            yield self.read(places[start : start + size])

    def column(self, name: str, places: range) -> Iterator[RowsArray]:
        """The rows of one input, in chunks."""
        for block in self.batches(places, self.chunk):
            yield block.arrays[name]

    def labels(self, places: range) -> NDArray[np.int64] | None:
        """Class indices of a range, shape (samples,); None where the source has none."""
        if not self.labelled:
            return None
        found = [block.labels for block in self.batches(places, self.chunk)]
        return np.concatenate([part for part in found if part is not None])

    @property
    def chunk(self) -> int:
        """Samples that are some MB."""
        return rows_within(_CHUNK_BYTES, self.specs)


def rows_within(size_bytes: int, specs: Sequence[TensorSpec]) -> int:
    """Return how many samples fit into these bytes, at least one."""
    row = sum(math.prod(map(int, spec.shape[1:])) * _item_bytes(spec.dtype) for spec in specs)
    return max(1, size_bytes // max(1, row))


def _item_bytes(dtype: str) -> int:
    return _TEXT_BYTES if dtype == STRING else np.dtype(dtype).itemsize


def spec_of(name: str, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> TensorSpec:
    """Return the spec of an input, of which one sample has this shape."""
    return TensorSpec(name=name, dtype=dtype_name(dtype), shape=("samples", *shape))


def length(batch: Batch) -> int:
    """The number of samples in a batch."""
    return len(next(iter(batch.values())))
