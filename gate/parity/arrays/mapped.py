"""Samples in arrays with the samples on axis 0, in one shard or several."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError
from gate.parity.arrays.rows import Array, Block, SourceRows, rows_within, spec_of
from gate.parity.arrays.shards import Form, Shard, forget_pages

_CHUNK_BYTES = 1 << 24


class MappedRows(SourceRows):
    """Named arrays of bool, int or float, shape (samples, ...)."""

    def __init__(
        self, shards: Sequence[Shard], *, origin: str, labels: NDArray[np.int64] | None = None
    ) -> None:
        """`labels`: one of each sample. Raises DataError for what is no whole set of samples."""
        if not shards or not shards[0].forms:
            raise DataError(f"{origin} holds no array. Give at least one array of samples.")
        for shard in shards:
            _check_shard(shard, shards[0], origin=origin)
        forms = shards[0].forms
        self.origin = origin
        self.specs = tuple(
            spec_of(name, form.dtype, form.shape[1:]) for name, form in forms.items()
        )
        self.labelled = labels is not None
        self._shards, self._labels = list(shards), labels
        self._ends = list(accumulate(shard.forms[self.names[0]].shape[0] for shard in self._shards))

    def __len__(self) -> int:
        """Number of samples."""
        return self._ends[-1]

    def read(self, places: Sequence[int]) -> Block:
        """The samples at these places."""
        labels = None if self._labels is None else np.array(self._labels[list(places)])
        if isinstance(places, range) and places.step == 1:
            span = (places.start, places.stop)
            return Block({name: self._rows(name, *span) for name in self.names}, labels)
        return Block(
            {
                name: np.concatenate([self._rows(name, place, place + 1) for place in places])
                for name in self.names
            },
            labels,
        )

    def column(self, name: str, places: range) -> Iterator[Array]:
        """The rows of one input, without a look at the others."""
        (spec,) = (spec for spec in self.specs if spec.name == name)
        step = rows_within(_CHUNK_BYTES, [spec])
        for start in range(places.start, places.stop, step):
            yield self._rows(name, start, min(start + step, places.stop))

    def labels(self, places: range) -> NDArray[np.int64] | None:
        """Class indices of a range."""
        return None if self._labels is None else np.array(self._labels[places.start : places.stop])

    def _rows(self, name: str, start: int, stop: int) -> Array:
        parts = []
        what = f"samples {start} to {stop - 1}" if stop - start > 1 else f"sample {start}"
        for number in range(bisect_right(self._ends, start), len(self._shards)):
            end = self._ends[number]
            shard = self._shards[number]
            begin = end - shard.forms[name].shape[0]
            if begin >= stop:
                break
            shard.check(what)  # a map of a file that was cut off ends the process
            array = shard.arrays()[name]
            inside = array[max(start - begin, 0) : stop - begin]
            native = array.dtype.newbyteorder("=")
            parts.append(np.array(inside, dtype=native, order="C", subok=False))
            forget_pages(array)
            shard.check(what)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _check_shard(shard: Shard, first: Shard, *, origin: str) -> None:
    if list(shard.forms) != list(first.forms):
        raise DataError(
            f"shards of {origin} hold different arrays: {list(shard.forms)} and "
            f"{list(first.forms)}. Save every shard with the same names in the same order."
        )
    for name, form in shard.forms.items():
        _check_form(name, form, origin=origin)
        like = first.forms[name]
        if form.dtype != like.dtype or form.shape[1:] != like.shape[1:]:
            raise DataError(
                f"shards of {origin} differ in '{name}': {form.dtype} {form.shape[1:]} a sample, "
                f"elsewhere {like.dtype} {like.shape[1:]}. Save all shards alike."
            )
    lengths = {name: form.shape[0] for name, form in shard.forms.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"arrays of {origin} have different numbers of samples: {lengths}. "
            "Axis 0 is the sample and must be equal for all inputs."
        )


def _check_form(name: str, form: Form, *, origin: str) -> None:
    check_dtype(name, form.dtype, origin=origin)
    if not form.shape:
        raise DataError(f"'{name}' of {origin} is a scalar. Axis 0 must be the samples.")
    if 0 in form.shape:
        raise DataError(
            f"'{name}' of {origin} has shape {form.shape}: nothing to measure. Give samples."
        )


def check_dtype(name: str, dtype: np.dtype[np.generic], *, origin: str) -> None:
    """Raise DataError unless it is one that samples may have."""
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise DataError(
            f"'{name}' of {origin} has dtype {dtype}. "
            "Expected bool, integers, or floats of at most 64 bits."
        )
