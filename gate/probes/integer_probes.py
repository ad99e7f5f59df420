"""Integers and table lookups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gate.errors import GateError
from gate.measure.context import MeasurementContext
from gate.probes.probe import Probe, SampleProfile
from gate.reference.torch_session import DispatchMode
from gate.storage.arrays import Batch, OutputArray

_EMBEDDINGS = {
    "aten::embedding", "aten::embedding_bag", "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
}  # fmt: skip

_ALONG = {"aten::index_select", "aten::gather"}

_INDEXED = {"aten::index", "aten::_unsafe_index"}


class Lookup(NamedTuple):
    """One reading of a table."""

    size: int
    """Rows of the table."""
    indices: OutputArray
    """Which of them were read, flat."""


class Lookups(DispatchMode):  # type: ignore[no-untyped-call]
    """Records the readings of tables while a model runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Lookup] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        for size, indices in _readings(name, args):
            flat = indices.detach().cpu().numpy().ravel()
            self.found.append(Lookup(size, flat.astype(np.int64)))
        return func(*args, **(kwargs or {}))


def lookups(stand: MeasurementContext, batch: Batch) -> list[Lookup]:
    """What the reference reads from tables for this batch; empty if it can't be computed so."""
    watch = Lookups()
    try:
        with watch:
            stand.reference.run(batch)
    except GateError:
        return []
    return watch.found


def _readings(name: str, args: tuple[Any, ...]) -> Iterator[tuple[int, torch.Tensor]]:
    if name in _EMBEDDINGS:
        yield args[0].shape[0], args[1]
    elif name in _ALONG:
        table, axis, indices = args[:3]
        if table.ndim:
            yield table.shape[axis], indices
    elif name in _INDEXED:
        table, places = args[:2]
        for axis, indices in enumerate(places):
            if indices is not None and axis < table.ndim and not _is_choice(indices):
                yield table.shape[axis], indices


def _is_choice(indices: torch.Tensor) -> bool:
    return indices.dtype in (torch.bool, torch.uint8) or indices.is_floating_point()


# An integer may be an index, and beyond its table the model raises. So the model is watched while
# it looks the samples up (`lookups`), and asked whether it takes the last row of the table that it
# read with them: of the whole input first, then of each column, because the columns of a
# recommender have tables of their own. What no table is read with goes beyond the samples' range
# and below it; 8 bits have no beyond. What is constant 1, as a mask is, becomes 0 in places.


_COLUMNS = 64
"""Columns that may each have a range of their own."""

_ALL = 64
"""Values of a column of which each one is tried; of more, as many as fit into `_FEW` samples."""

_FEW = 8

_MOST = 512
"""Samples, where each column has a range of its own: what has such columns is small."""

_LISTED = 2**16
"""Values of which those that no sample has are picked."""

_ELEMENTS = 2**18
"""Of a probe with more samples than `_FEW`."""

_TRIED = 96
"""Forwards that the ends of all tables of one input may cost."""

_EDGE = 4
"""Values next to both ends of what is new that come first."""


_BEYOND = ("below", "zero", "above", "far")
"""Probes of one value outside the samples' range: a model may divide by zero there."""

_FILLED = {"empty": 0, "full": 1}
"""Masks that leave nothing, in either convention: a mean over nothing is NaN, and a file may clamp
what it divides by."""

_EXACT = 2**24
"""Integers beyond it are lost where a file casts them to float32."""

_WIDE = 2**53
"""Samples that reach it are hashes or time stamps, and others than these have no meaning."""


Values = NDArray[np.integer[Any]]


def integer_probes(stand: MeasurementContext, observed: SampleProfile) -> Iterator[Probe]:
    """Of each input of integers, and of each mask."""
    names = [n for n, array in observed.rows.items() if array.dtype.kind in "iu"]
    read = lookups(stand, observed.rows) if names else []
    for name, array in observed.rows.items():
        if array.dtype.kind != "U" and _one_value(observed, name):
            yield from _probes(observed, f"masked_{name}", name, _masked(observed, name))
        if _is_mask(observed, name):
            shape = (observed.small, *array.shape[1:])
            for title, value in _FILLED.items():
                if observed.low[name] == observed.high[name] == value:
                    continue  # as the samples are
                filled = np.full(shape, value, array.dtype)
                yield from _probes(observed, f"{title}_{name}", name, filled, emptied=True)
        if array.dtype.kind in "iu":
            for title, changed in _of_input(_Column(stand, observed, name), read):
                beyond = title in _BEYOND
                yield from _probes(observed, f"{title}_{name}", name, changed, beyond=beyond)


class _Column:
    """One input of integers, and what the model takes in it."""

    def __init__(self, stand: MeasurementContext, observed: SampleProfile, name: str) -> None:
        self._stand = stand
        self.observed = observed
        self.name = name
        self.low = int(observed.low[name])
        self.high = int(observed.high[name])
        self.rows = observed.rows[name]
        self.limits: Any = np.iinfo(self.rows.dtype)
        self._left = _TRIED

    @property
    def like_a_mask(self) -> bool:
        return self.low >= 0 and self.high <= 1

    def ends(self, read: Sequence[Lookup]) -> list[int | None]:
        """For each column, or for all of them in one number, one past the last value that the
        model takes; None where no table is read with it."""
        whole = self._end(self.rows.ravel(), read, None)
        if whole is not None or not self.by_column:
            return [whole]
        flat = self.rows.reshape(len(self.rows), -1)
        return [self._end(flat[:, j], read, j) for j in range(flat.shape[1])]

    @property
    def most(self) -> int:
        """Samples of a probe: fewer where they are large."""
        elements = sum(int(array[0].size) for array in self.observed.rows.values())
        return min(_MOST, max(_FEW, _ELEMENTS // max(elements, 1)))

    @property
    def by_column(self) -> bool:
        return self.rows.ndim == 2 and 1 < self.rows.shape[1] <= _COLUMNS

    def _end(self, values: OutputArray, read: Sequence[Lookup], column: int | None) -> int | None:
        """The largest table that was read with just these values and whose last row is taken."""
        sizes = {lookup.size for lookup in read if _reads(lookup, values)}
        for size in sorted(sizes, reverse=True):
            if size - 1 <= self.limits.max and self._takes(size - 1, column):
                return size
        return None

    def _takes(self, value: int, column: int | None) -> bool:
        if self._left <= 0:
            return False
        self._left -= 1
        batch = self.observed.batch(self.observed.small)
        flat = batch[self.name].reshape(len(batch[self.name]), -1)
        flat[:, slice(None) if column is None else column] = value
        try:
            self._stand.reference.run(batch)
        except GateError:
            return False
        return True


def _reads(lookup: Lookup, values: OutputArray) -> bool:
    """True if the table was read with these values, each as often (as `gather` repeats them)."""
    often, rest = divmod(lookup.indices.size, values.size)
    return often > 0 and rest == 0 and np.array_equal(lookup.indices, np.repeat(values, often))


def _of_input(column: _Column, read: Sequence[Lookup]) -> Iterator[tuple[str, OutputArray]]:
    limits = column.limits
    if column.rows.dtype.itemsize == 1 and not column.like_a_mask:
        yield (
            "values",
            _dealt(column, [_new_first(column, range(limits.min, limits.max + 1), column.rows)]),
        )
        return
    ends = column.ends(read)
    if not column.like_a_mask or any(end is not None and end > 2 for end in ends):
        yield "values", _dealt(column, _of_columns(column, ends))
    if column.like_a_mask or max(-column.low, column.high) >= _WIDE:
        return
    below = min(column.low, 0) - 1
    beyond = {"below": below}
    if all(end is None for end in ends):
        beyond |= {"zero": 0, "above": column.high + 1, "far": 2 * column.high + 1}
        inside = range(1, column.low)
        if inside:  # such as lengths that are the same in all samples
            values = np.asarray(_spread(inside, _FEW)).reshape(-1, *[1] * (column.rows.ndim - 1))
            shape = (len(values), *column.rows.shape[1:])
            yield "less", np.broadcast_to(values, shape).astype(limits.dtype)
    for title, value in beyond.items():
        if limits.min <= value <= limits.max and not column.low <= value <= column.high:
            yield (
                title,
                np.full((column.observed.small, *column.rows.shape[1:]), value, limits.dtype),
            )


def _of_columns(column: _Column, ends: Sequence[int | None]) -> list[Values]:
    """The values of each column, or of all of them."""
    sampled = column.observed.integers[column.name]
    if len(ends) == 1:
        return [_values(column, sampled, ends[0])]
    flat = sampled.reshape(len(sampled), -1)
    return [_values(column, flat[:, j], end) for j, end in enumerate(ends)]


def _values(column: _Column, sampled: OutputArray, end: int | None) -> Values:
    """From 0 to the end of the table, or the range of the samples where there is none."""
    low, high = int(sampled.min()), int(sampled.max())
    every = range(low, high + 1) if end is None else range(min(low, 0), end)
    return _new_first(column, every, sampled)


def _new_first(column: _Column, every: range, sampled: OutputArray) -> Values:
    """All of them, or as many as are tried of very many: both ends and the neighbours of the
    samples' range, what no sample has, the rest."""
    room = max(_MOST, _FEW * math.prod(column.rows.shape[1:]))
    above = range(int(sampled.max()) + 1, every.stop)
    inexact = range(max(every.start, _EXACT) | 1, every.stop, 2)
    looked_at = range(every.start, min(every.stop, every.start + _LISTED))
    unseen = np.setdiff1d(np.asarray(looked_at), sampled).tolist()
    chosen = [
        *every[-1:], *above[:_EDGE], *above[-_EDGE:], *every[:_EDGE],
        *_spread(inexact, _FEW), *_spread(unseen, room // 2), *_spread(above, room // 2),
        *_spread(every, room),
    ]  # fmt: skip
    return np.asarray(list(dict.fromkeys(chosen)), column.rows.dtype)


def _spread(values: Sequence[int], most: int) -> list[int]:
    length = _length(values)
    count = min(most, length)
    if length > _WIDE:  # beyond the integers of linspace, and of `len`
        return [values[i * (length - 1) // (count - 1)] for i in range(count)]
    return [values[int(place)] for place in np.linspace(0, length - 1, count)]


def _length(values: Sequence[int]) -> int:
    if isinstance(values, range):
        return max(0, -((values.start - values.stop) // values.step))
    return len(values)


def _dealt(column: _Column, values: Sequence[Values]) -> OutputArray:
    """A batch of the input in which each column takes its values one after the other; the columns
    of one range share them where these are many."""
    shape = column.rows.shape[1:]
    width = max(1, math.prod(shape))
    longest = max(map(len, values))
    if len(values) == 1 and width > 1 and not (column.by_column and longest <= _ALL):
        size = min(_FEW, math.ceil(longest / width))
        dealt = column.observed.random(column.name).permuted(np.resize(values[0], size * width))
    else:
        size = min(longest, column.most)
        lists = list(values) * (width if len(values) == 1 else 1)
        steps = np.arange(size)
        dealt = np.stack([own[(steps + j) % len(own)] for j, own in enumerate(lists)], axis=1)
    return np.ascontiguousarray(dealt.reshape(-1, *shape).astype(column.rows.dtype))


def _is_mask(observed: SampleProfile, name: str) -> bool:
    """True for integers and bools that are nothing but 0 and 1, several in a sample."""
    array = observed.rows[name]
    if array.dtype.kind not in "iub" or array.ndim < 2:
        return False
    return int(observed.low[name]) >= 0 and int(observed.high[name]) <= 1


def _one_value(observed: SampleProfile, name: str) -> bool:
    """True for a constant 1, and for a constant 0 of integers: what may be a mask."""
    low, high = float(observed.low[name]), float(observed.high[name])
    return low == high and (low == 1.0 or (low == 0.0 and observed.rows[name].dtype.kind in "iu"))


def _masked(observed: SampleProfile, name: str) -> OutputArray:
    """Two samples of the other value: in the last third, and at random; never in the first place,
    because what is masked as a whole has no answer."""
    array = np.ascontiguousarray(
        np.resize(observed.rows[name], (2, *observed.rows[name].shape[1:]))
    )
    width = array.shape[-1] if array.ndim > 1 else 1
    flipped = np.zeros(array.shape, np.bool_)
    if array.ndim == 1:  # one number a sample: of one sample it is the other one
        flipped[1] = True
    else:
        flipped[0, ..., width - math.ceil(width / 3) :] = True
    if width > 1:
        flipped[1] = observed.random(f"masked {name}").random(array.shape[1:]) < 0.5
        flipped[..., 0] = False
    return np.where(flipped, (1 - array.astype(np.int64)).astype(array.dtype), array)


def _probes(
    observed: SampleProfile,
    title: str,
    name: str,
    changed: OutputArray,
    *,
    beyond: bool = False,
    emptied: bool = False,
) -> Iterator[Probe]:
    """The changed input beside samples as they are; in parts where the batch is fixed, and where
    a call takes one value of the input."""
    alone = observed.fixed or name in observed.shared
    size = observed.small if alone else len(changed)
    parts = min(_FEW, math.ceil(len(changed) / size))
    for part in range(parts):
        rows = np.take(changed, range(part * size, (part + 1) * size), axis=0, mode="wrap")
        suffix = f"_{part + 1}" if parts > 1 else ""
        build = partial(_beside, observed, name, rows)
        yield Probe(f"{title}{suffix}", "value", size, build, beyond=beyond, emptied=emptied)


def _beside(observed: SampleProfile, name: str, rows: OutputArray) -> Batch:
    return {**observed.batch(len(rows)), name: np.ascontiguousarray(rows)}
