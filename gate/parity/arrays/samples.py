"""The samples that both sides compute on: named arrays with one common axis 0.

They stream from memory maps in batches; nothing is ever held whole.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError
from gate.parity.arrays.shards import Array, forget_pages, open_array, open_shards
from gate.records.evidence import TensorSpec
from gate.storage.digest import Digest, canonical_json

_DIGEST_CHUNK = 1 << 24
"""Bytes that are hashed at a time."""


class Samples:
    """Named arrays of bool, int or float, shape (samples, ...), possibly in several shards.

    Law: the digest depends on names, dtypes, shapes and values only, not on how the samples
    are spread over files: `Samples.of(a).digest() == Samples.open(saved(a)).digest()`.
    """

    def __init__(self, shards: Sequence[Mapping[str, Array]], *, origin: str) -> None:
        if not shards or not shards[0]:
            raise DataError(f"{origin} holds no array. Give at least one array of samples.")
        for shard in shards:
            _check_shard(shard, shards[0], origin=origin)
        self._shards = [dict(shard) for shard in shards]
        first = self._shards[0]
        self.names: tuple[str, ...] = tuple(first)
        self._gaps = False
        self._range: range | None = None
        self._lengths = [len(shard[self.names[0]]) for shard in self._shards]
        self.specs: tuple[TensorSpec, ...] = tuple(
            TensorSpec(name=name, dtype=array.dtype.name, shape=("samples", *array.shape[1:]))
            for name, array in first.items()
        )

    @classmethod
    def open(cls, path: Path) -> Samples:
        """Open `FILE.npy` (one array, named `input`), `FILE.npz`, or a folder of such shards.

        Raises DataError for anything that is not a whole set of numeric arrays with equal
        numbers of samples, and StorageError where an `.npz` can't be unpacked for lack of room.
        """
        return cls(open_shards(path), origin=str(path))

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[np.generic]]) -> Samples:
        """Samples from arrays in memory. Raises DataError as `open` does."""
        return cls([arrays], origin="the mapping of arrays")

    def __len__(self) -> int:
        """Number of samples."""
        return sum(self._lengths)

    def with_gaps(self) -> Samples:
        """The same samples, of which NaN and infinities are values that the model takes."""
        gaps = copy.copy(self)
        gaps._gaps = True
        return gaps

    def between(self, start: int, stop: int) -> Samples:
        """The samples from `start` up to `stop`."""
        part = copy.copy(self)
        part._range = range(start, stop)
        return part

    def batches(self, size: int) -> Iterator[dict[str, Array]]:
        """Yield batches of `size` samples in order (the last may be smaller), as own copies.

        Arrays are contiguous, writable and in native byte order. Raises DataError on the first
        NaN or infinite value of a float array, naming the input and the sample, but for
        samples `with_gaps`.
        """
        whole = self._range or range(len(self))
        for start in range(whole.start, whole.stop, size):
            stop = min(start + size, whole.stop)
            batch = {name: self._rows(name, start, stop) for name in self.names}
            for name, array in batch.items() if not self._gaps else ():
                _check_finite(name, array, start=start)
            yield batch

    def pick(self, places: Sequence[int]) -> Samples:
        """The samples at these places, in memory."""
        picked = Samples.of(self.at(places))
        return picked.with_gaps() if self._gaps else picked

    def at(self, places: Sequence[int]) -> dict[str, Array]:
        """The samples at these places as one batch; values are not looked at."""
        return {
            name: np.concatenate([self._rows(name, place, place + 1) for place in places])
            for name in self.names
        }

    def digest(self) -> Digest:
        """SHA-256 over names, dtypes, shapes and little-endian values, read in chunks."""
        sha256 = hashlib.sha256()
        for spec in self.specs:
            shape = [len(self), *spec.shape[1:]]
            header = {"name": spec.name, "dtype": spec.dtype, "shape": shape}
            sha256.update(canonical_json(header) + b"\n")
            for shard in self._shards:
                array = shard[spec.name]
                row_bytes = max(1, array.nbytes // len(array))
                step = max(1, _DIGEST_CHUNK // row_bytes)
                little = array.dtype.newbyteorder("<")
                for start in range(0, len(array), step):
                    rows = np.ascontiguousarray(array[start : start + step], dtype=little)
                    sha256.update(rows.reshape(-1).view(np.uint8).data)
                    forget_pages(array)
        return Digest(sha256.hexdigest())

    def _rows(self, name: str, start: int, stop: int) -> Array:
        parts = []
        begin = 0
        for shard, length in zip(self._shards, self._lengths, strict=True):
            array = shard[name]
            inside = array[max(start - begin, 0) : max(stop - begin, 0)]
            if len(inside):
                native = array.dtype.newbyteorder("=")
                parts.append(np.array(inside, dtype=native, order="C", subok=False))
                forget_pages(array)
            begin += length
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def open_labels(path: Path, *, samples: int) -> NDArray[np.int64]:
    """Class indices of the samples, shape (samples,), from an integer `.npy` file.

    Raises DataError on another length, rank or dtype, and on negative labels.
    """
    if path.suffix.lower() != ".npy":
        raise DataError(f"{path.name} is no .npy file. Save the labels with numpy.save.")
    return check_labels(open_array(path), samples=samples)


def check_labels(labels: Array, *, samples: int) -> NDArray[np.int64]:
    """`labels` as int64, shape (samples,). Raises DataError if they don't fit the samples."""
    if labels.shape != (samples,):
        raise DataError(
            f"labels have shape {labels.shape}, the samples need ({samples},). "
            "Give one class index for each sample, in the same order."
        )
    if labels.dtype.kind not in "iu":
        raise DataError(
            f"labels are {labels.dtype}, integers are expected. "
            "Give class indices, one for each sample."
        )
    indices = np.array(labels, dtype=np.int64, subok=False)
    if (indices < 0).any():
        raise DataError(
            f"the label of sample {int((indices < 0).argmax())} is {indices.min()}. "
            "Class indices start at 0."
        )
    return indices


def _check_shard(shard: Mapping[str, Array], first: Mapping[str, Array], *, origin: str) -> None:
    if list(shard) != list(first):
        raise DataError(
            f"shards of {origin} hold different arrays: {list(shard)} and {list(first)}. "
            "Save every shard with the same names in the same order."
        )
    for name, array in shard.items():
        _check_array(name, array, origin=origin)
        like = first[name]
        if array.dtype != like.dtype or array.shape[1:] != like.shape[1:]:
            raise DataError(
                f"shards of {origin} differ in '{name}': {array.dtype} {array.shape[1:]} a sample, "
                f"elsewhere {like.dtype} {like.shape[1:]}. Save all shards alike."
            )
    lengths = {name: len(array) for name, array in shard.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"arrays of {origin} have different numbers of samples: {lengths}. "
            "Axis 0 is the sample and must be equal for all inputs."
        )


def _check_array(name: str, array: Array, *, origin: str) -> None:
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise DataError(
            f"'{name}' of {origin} has dtype {array.dtype}. "
            "Expected bool, integers, or floats of at most 64 bits."
        )
    if array.ndim == 0:
        raise DataError(f"'{name}' of {origin} is a scalar. Axis 0 must be the samples.")
    if array.size == 0:
        raise DataError(
            f"'{name}' of {origin} has shape {array.shape}: nothing to measure. Give samples."
        )


def _check_finite(name: str, array: Array, *, start: int) -> None:
    if array.dtype.kind != "f":
        return
    finite = np.isfinite(array)
    if not finite.all():
        bad = ~finite.reshape(len(array), -1).all(axis=1)
        sample = int(bad.argmax())
        raise DataError(
            f"input '{name}' has NaN or infinite values, first in sample {start + sample}. "
            "Outputs of such samples prove nothing: mend the preprocessing or drop the sample. If "
            "the model itself treats them, say nonfinite: same_places in the policy."
        )
