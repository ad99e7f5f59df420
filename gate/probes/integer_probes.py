"""Probes of integer inputs, masks and the indices of table lookups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gate.measure.context import MeasurementContext
from gate.probes.probe import Probe, SampleProfile
from gate.reference.torch_session import DispatchMode
from gate.storage.arrays import Batch, OutputArray

_EMBEDDINGS = {
    "aten::embedding", "aten::embedding_bag", "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
}  # fmt: skip

_AXIS_LOOKUPS = {"aten::index_select", "aten::gather"}

_INDEXING = {"aten::index", "aten::_unsafe_index"}

_COMPARISONS = {"aten::lt", "aten::le", "aten::gt", "aten::ge", "aten::eq", "aten::ne"}


class Lookup(NamedTuple):
    """One read of a table by index."""

    size: int
    """Rows of the table."""
    indices: OutputArray
    """The indices of the rows that were read, flattened."""


class Lookups(DispatchMode):
    """Records table lookups and comparisons of integer inputs while a model runs."""

    def __init__(self, inputs: Batch | None = None) -> None:
        """`inputs`: the integer inputs of the batch that is run."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.lookups: list[Lookup] = []
        self._inputs = inputs or {}
        self.bounds: dict[str, list[OutputArray]] = {name: [] for name in self._inputs}
        """By input: the numbers that its elements are compared with, in the input's shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in _COMPARISONS:
            self._record_bounds(*args[:2])
        for size, indices in _table_reads(name, args):
            flat = indices.detach().cpu().numpy().ravel()
            self.lookups.append(Lookup(size, flat.astype(np.int64)))
        return func(*args, **(kwargs or {}))

    def _record_bounds(self, *sides: Any) -> None:
        for side, opposite in (sides, sides[::-1]) if all(map(_is_plain, sides)) else ():
            if not isinstance(side, torch.Tensor):
                continue
            for name, array in self._inputs.items():
                bounds = self.bounds[name]
                if len(bounds) < _MAX_BOUNDS and _is_input(side, array):
                    bound = _floor_of(opposite, side.shape, array.shape)
                    if bound is not None and not any(np.array_equal(bound, b) for b in bounds):
                        bounds.append(bound)


def _is_plain(side: Any) -> bool:
    """Return True for a value that can be an array of real numbers."""
    if isinstance(side, torch.Tensor):
        return side.layout == torch.strided and not side.is_complex()
    return isinstance(side, int | float)


def _is_input(side: torch.Tensor, array: OutputArray) -> bool:
    """Return True if one side of a comparison is the input itself or its cast to floats."""
    if side.dtype == torch.bool or side.numel() != array.size:
        return False
    return np.array_equal(side.detach().cpu().double().numpy().ravel(), array.ravel())


def _floor_of(
    opposite: Any, compared: tuple[int, ...], shape: tuple[int, ...]
) -> NDArray[np.float64] | None:
    """Return the other side rounded down, in the shape of the input; infinite where it is not
    finite.

    None if each element is compared with several numbers.
    """
    wide = opposite.detach().cpu().double() if isinstance(opposite, torch.Tensor) else opposite
    bound = np.asarray(wide, np.float64)
    bound = np.where(np.isfinite(bound), np.floor(bound), np.inf)
    try:
        return np.broadcast_to(bound, compared).reshape(shape)
    except ValueError:
        return None


def lookups(context: MeasurementContext, batch: Batch) -> list[Lookup]:
    """Return the table lookups of the reference for this batch; empty if it can't run."""
    return context.watch(batch, Lookups).lookups


def _table_reads(name: str, args: tuple[Any, ...]) -> Iterator[tuple[int, torch.Tensor]]:
    if name in _EMBEDDINGS:
        yield args[0].shape[0], args[1]
    elif name in _AXIS_LOOKUPS:
        table, axis, indices = args[:3]
        if table.ndim:
            yield table.shape[axis], indices
    elif name in _INDEXING:
        table, index_arrays = args[:2]
        for axis, indices in enumerate(index_arrays):
            if indices is not None and axis < table.ndim and not _is_mask_index(indices):
                yield table.shape[axis], indices


def _is_mask_index(indices: torch.Tensor) -> bool:
    return indices.dtype in (torch.bool, torch.uint8) or indices.is_floating_point()


# An integer may be an index, and beyond its table the model raises. Therefore the model's lookups
# are recorded while it runs the samples (`lookups`), and the model is run with the last row of the
# recorded table: for the whole input first, then for each column, because the columns of a
# recommender have separate tables. An input that reads no table gets values above and below the
# samples' range; 8-bit integers get all their values. A mask that is constant 1 becomes 0 in some
# positions.


_MAX_BOUNDS = 8
"""Largest number of comparisons that are kept per input."""

_BOUND_STEPS = (0, -1, 1)
"""Steps from the number that an integer is compared with. They distinguish `<` from `<=`, and
reveal a bound that is off by one."""

_MAX_COLUMNS = 64
"""Largest number of columns that may have different ranges."""

_EVERY_VALUE_UP_TO = 64
"""Number of values of a column up to which all are tried. Of more, as many as fit into
`_MIN_SAMPLES` samples."""

_MIN_SAMPLES = 8

_MAX_SAMPLES = 512
"""Largest number of samples of a probe whose columns have different ranges; such inputs are
small."""

_MAX_CANDIDATES = 2**16
"""Number of values among which unsampled ones are selected."""

_MAX_ELEMENTS = 2**18
"""Largest number of elements of a probe with more samples than `_MIN_SAMPLES`."""

_MAX_RUNS = 96
"""Largest number of forward passes for the table ends of one input."""

_EDGE_VALUES = 4
"""Number of values at both ends of the unsampled range that come first."""


_BEYOND_RANGE = ("below", "zero", "above", "far")
"""Probes of one value outside the samples' range, where a model may divide by zero."""

_EMPTY_MASKS = {"empty": 0, "full": 1}
"""Masks that leave nothing, in either convention: a mean over nothing is NaN, but a file may clamp
the divisor."""

_EXACT_FLOAT32 = 2**24
"""Integers beyond this lose digits if a file casts them to float32."""

_EXACT_FLOAT64 = 2**53
"""Samples that reach this are hashes or timestamps; other values would have no meaning."""


Values = NDArray[np.integer[Any]]


def integer_probes(context: MeasurementContext, profile: SampleProfile) -> Iterator[Probe]:
    """Yield the probes of each integer input and each mask."""
    integers = {n: array for n, array in profile.rows.items() if array.dtype.kind in "iu"}
    recorder = context.watch(profile.rows, partial(Lookups, integers)) if integers else Lookups()
    table_reads = recorder.lookups
    for name, array in profile.rows.items():
        if array.dtype.kind != "U" and _is_constant_mask(profile, name):
            yield from _probes(profile, f"masked_{name}", name, _masked_samples(profile, name))
        if _is_mask(profile, name):
            shape = (profile.small, *array.shape[1:])
            for title, value in _EMPTY_MASKS.items():
                if profile.low[name] == profile.high[name] == value:
                    continue  # the samples already have this value
                filled = np.full(shape, value, array.dtype)
                yield from _probes(profile, f"{title}_{name}", name, filled, emptied=True)
        if array.dtype.kind in "iu":
            column = _Column(context, profile, name)
            for title, rows in _value_changes(column, table_reads):
                beyond = title in _BEYOND_RANGE
                yield from _probes(profile, f"{title}_{name}", name, rows, beyond=beyond)
            bounds = recorder.bounds.get(name, [])[: column.most // (len(_BOUND_STEPS) + 3)]
            if bounds and not _is_mask(profile, name):
                rows_at_bounds = _at_bounds(bounds, profile, name)
                yield from _probes(profile, f"bounds_{name}", name, rows_at_bounds)


def _at_bounds(bounds: Sequence[OutputArray], profile: SampleProfile, name: str) -> OutputArray:
    """Return samples with each element at, just below and just above the number it is compared
    with.

    A fourth of the elements keep the sampled value, because an input that is only padding has no
    defined result. In two more samples only the first or the last position keeps it, because the
    number may mark padding, and the model may divide by the number of other positions. Elements
    whose new value is outside the samples' range keep theirs. The rows are those that `_probes`
    combines with the same sample: a bound may be another input of it.
    """
    array, low, high = profile.rows[name], int(profile.low[name]), int(profile.high[name])
    parts: list[OutputArray] = []
    ends = (0, array.shape[-1] - 1) if array.ndim > 1 and array.shape[-1] > 1 else ()
    for bound in bounds:
        padded = ends if np.all(bound == bound.flat[0]) else ()
        for turn in [*range(len(_BOUND_STEPS) + 1), *(-1 - end for end in padded)]:
            rows = slice(None)
            if not profile.fixed:
                row = 0 if name in profile.shared else len(parts) % len(array)
                rows = slice(row, row + 1)
            sampled = array[rows].astype(object)
            positions = np.arange(sampled.size).reshape(sampled.shape)
            changed = sampled
            for number, step in enumerate(_BOUND_STEPS):
                is_changed = (positions + turn) % (len(_BOUND_STEPS) + 1) == number
                if turn < 0:
                    is_changed = (step == 0) & (positions % array.shape[-1] != -1 - turn)
                changed = np.where(is_changed, bound[rows].astype(object) + step, changed)
            outside = (changed < low) | (changed > high)
            parts.append(np.where(outside, sampled, changed))
    return np.concatenate(parts).astype(array.dtype)


class _Column:
    """One integer input, with the values that the model accepts in it."""

    def __init__(self, context: MeasurementContext, profile: SampleProfile, name: str) -> None:
        self._context = context
        self.profile = profile
        self.name = name
        self.low = int(profile.low[name])
        self.high = int(profile.high[name])
        self.rows = profile.rows[name]
        self.limits: Any = np.iinfo(self.rows.dtype)
        self._runs_left = _MAX_RUNS

    @property
    def has_onnx_reference(self) -> bool:
        """Return whether an ONNX file is the reference."""
        return self._context.model.file is not None

    @property
    def is_mask_like(self) -> bool:
        return self.low >= 0 and self.high <= 1

    def ends(self, read: Sequence[Lookup]) -> list[int | None]:
        """Return, for each column, the number after the last value that the model accepts.

        One number if the same table is read with all columns; None where no table is read.
        """
        end_of_all = self._end(self.rows.ravel(), read, None)
        if end_of_all is not None or not self.by_column:
            return [end_of_all]
        flat = self.rows.reshape(len(self.rows), -1)
        return [self._end(flat[:, j], read, j) for j in range(flat.shape[1])]

    @property
    def most(self) -> int:
        """Largest number of samples of a probe; fewer if samples are large."""
        elements = sum(int(array[0].size) for array in self.profile.rows.values())
        return min(_MAX_SAMPLES, max(_MIN_SAMPLES, _MAX_ELEMENTS // max(elements, 1)))

    @property
    def by_column(self) -> bool:
        return self.rows.ndim == 2 and 1 < self.rows.shape[1] <= _MAX_COLUMNS

    def _end(self, values: OutputArray, read: Sequence[Lookup], column: int | None) -> int | None:
        """Return the size of the largest table read with exactly these values whose last row is
        accepted."""
        sizes = {lookup.size for lookup in read if _is_read_with(lookup, values)}
        for size in sorted(sizes, reverse=True):
            if size - 1 <= self.limits.max and self._accepts(size - 1, column):
                return size
        return None

    def _accepts(self, value: int, column: int | None) -> bool:
        if self._runs_left <= 0:
            return False
        self._runs_left -= 1
        batch = self.profile.batch(self.profile.small)
        flat = batch[self.name].reshape(len(batch[self.name]), -1)
        flat[:, slice(None) if column is None else column] = value
        return self._context.reference.accepts(batch)


def _is_read_with(lookup: Lookup, values: OutputArray) -> bool:
    """Return True if the table was read with these values, each repeated equally often
    (`gather`)."""
    repeats, rest = divmod(lookup.indices.size, values.size)
    return repeats > 0 and rest == 0 and np.array_equal(lookup.indices, np.repeat(values, repeats))


def _value_changes(column: _Column, read: Sequence[Lookup]) -> Iterator[tuple[str, OutputArray]]:
    limits = column.limits
    if column.rows.dtype.itemsize == 1 and not column.is_mask_like:
        values = _select_values(column, range(limits.min, limits.max + 1), column.rows)
        yield "values", _distribute(column, [values])
        return
    ends = column.ends(read)
    if not column.is_mask_like or any(end is not None and end > 2 for end in ends):
        yield "values", _distribute(column, _column_values(column, ends))
    if column.is_mask_like or max(-column.low, column.high) >= _EXACT_FLOAT64:
        return
    reads_tables = any(end is not None for end in ends)
    # ONNX's Gather counts negative indices from the end of the table; layers that replace it, as
    # EmbedLayerNormalization, refuse them, as PyTorch does.
    beyond = {} if reads_tables and column.has_onnx_reference else {"below": min(column.low, 0) - 1}
    if not reads_tables:
        beyond |= {"zero": 0, "above": column.high + 1, "far": 2 * column.high + 1}
        below = range(1, column.low)
        if below:  # for example lengths that are equal in all samples
            values = np.asarray(_spaced(below, _MIN_SAMPLES)).reshape(
                -1, *[1] * (column.rows.ndim - 1)
            )
            shape = (len(values), *column.rows.shape[1:])
            yield "less", np.broadcast_to(values, shape).astype(limits.dtype)
    shape = (column.profile.small, *column.rows.shape[1:])
    for title, value in beyond.items():
        if limits.min <= value <= limits.max and not column.low <= value <= column.high:
            yield title, np.full(shape, value, limits.dtype)


def _column_values(column: _Column, ends: Sequence[int | None]) -> list[Values]:
    """Return the values of each column, or one list for all columns."""
    sampled = column.profile.integers[column.name]
    if len(ends) == 1:
        return [_values(column, sampled, ends[0])]
    flat = sampled.reshape(len(sampled), -1)
    return [_values(column, flat[:, j], end) for j, end in enumerate(ends)]


def _values(column: _Column, sampled: OutputArray, end: int | None) -> Values:
    """Return the values from 0 to the end of the table; without a table, the samples' range."""
    low, high = int(sampled.min()), int(sampled.max())
    every = range(low, high + 1) if end is None else range(min(low, 0), end)
    return _select_values(column, every, sampled)


def _select_values(column: _Column, every: range, sampled: OutputArray) -> Values:
    """Return all values, or a selection if there are many; unsampled values come first.

    The order is: both ends and the neighbors of the samples' range, unsampled values, the rest.
    """
    limit = max(_MAX_SAMPLES, _MIN_SAMPLES * math.prod(column.rows.shape[1:]))
    above = range(int(sampled.max()) + 1, every.stop)
    inexact = range(max(every.start, _EXACT_FLOAT32) | 1, every.stop, 2)
    candidates = range(every.start, min(every.stop, every.start + _MAX_CANDIDATES))
    unsampled = np.setdiff1d(np.asarray(candidates), sampled).tolist()
    selected = [
        *every[-1:], *above[:_EDGE_VALUES], *above[-_EDGE_VALUES:], *every[:_EDGE_VALUES],
        *_spaced(inexact, _MIN_SAMPLES), *_spaced(unsampled, limit // 2),
        *_spaced(above, limit // 2), *_spaced(every, limit),
    ]  # fmt: skip
    return np.asarray(list(dict.fromkeys(selected)), column.rows.dtype)


def _spaced(values: Sequence[int], most: int) -> list[int]:
    length = _length(values)
    count = min(most, length)
    if length > _EXACT_FLOAT64:  # too large for linspace and `len`
        return [values[i * (length - 1) // (count - 1)] for i in range(count)]
    return [values[int(index)] for index in np.linspace(0, length - 1, count)]


def _length(values: Sequence[int]) -> int:
    if isinstance(values, range):
        return max(0, -((values.start - values.stop) // values.step))
    return len(values)


def _distribute(column: _Column, values: Sequence[Values]) -> OutputArray:
    """Return a batch of the input in which each column steps through its values.

    If the columns share a range of many values, these are divided among the columns.
    """
    shape = column.rows.shape[1:]
    width = max(1, math.prod(shape))
    longest = max(map(len, values))
    if len(values) == 1 and width > 1 and not (column.by_column and longest <= _EVERY_VALUE_UP_TO):
        size = min(_MIN_SAMPLES, math.ceil(longest / width))
        rows = column.profile.random(column.name).permuted(np.resize(values[0], size * width))
    else:
        size = min(longest, column.most)
        lists = list(values) * (width if len(values) == 1 else 1)
        steps = np.arange(size)
        rows = np.stack(
            [stepped[(steps + j) % len(stepped)] for j, stepped in enumerate(lists)], axis=1
        )
    return np.ascontiguousarray(rows.reshape(-1, *shape).astype(column.rows.dtype))


def _is_mask(profile: SampleProfile, name: str) -> bool:
    """Return True for integers and bools that are only 0 and 1, several in a sample."""
    array = profile.rows[name]
    if array.dtype.kind not in "iub" or array.ndim < 2:
        return False
    return int(profile.low[name]) >= 0 and int(profile.high[name]) <= 1


def _is_constant_mask(profile: SampleProfile, name: str) -> bool:
    """Return True for a constant 1, or an integer constant 0: the input may be a mask."""
    low, high = float(profile.low[name]), float(profile.high[name])
    return low == high and (low == 1.0 or (low == 0.0 and profile.rows[name].dtype.kind in "iu"))


def _masked_samples(profile: SampleProfile, name: str) -> OutputArray:
    """Return two samples with the other value in the last third, and in random positions.

    The first position never changes, because a fully masked sample has no defined result.
    """
    array = np.ascontiguousarray(np.resize(profile.rows[name], (2, *profile.rows[name].shape[1:])))
    width = array.shape[-1] if array.ndim > 1 else 1
    flipped = np.zeros(array.shape, np.bool_)
    if array.ndim == 1:  # one number per sample: change it in the second sample
        flipped[1] = True
    else:
        flipped[0, ..., width - math.ceil(width / 3) :] = True
    if width > 1:
        flipped[1] = profile.random(f"masked {name}").random(array.shape[1:]) < 0.5
        flipped[..., 0] = False
    return np.where(flipped, (1 - array.astype(np.int64)).astype(array.dtype), array)


def _probes(
    profile: SampleProfile,
    title: str,
    name: str,
    changed: OutputArray,
    *,
    beyond: bool = False,
    emptied: bool = False,
) -> Iterator[Probe]:
    """Yield probes with this input changed and the others sampled.

    There are several parts if the batch is fixed, or if a call accepts one value of the input.
    """
    alone = profile.fixed or name in profile.shared
    size = profile.small if alone else len(changed)
    parts = min(_MIN_SAMPLES, math.ceil(len(changed) / size))
    for part in range(parts):
        rows = np.take(changed, range(part * size, (part + 1) * size), axis=0, mode="wrap")
        suffix = f"_{part + 1}" if parts > 1 else ""
        build = partial(_replace_rows, profile, name, rows)
        yield Probe(f"{title}{suffix}", "value", size, build, beyond=beyond, emptied=emptied)


def _replace_rows(profile: SampleProfile, name: str, rows: OutputArray) -> Batch:
    return {**profile.batch(len(rows)), name: np.ascontiguousarray(rows)}
