"""Layouts of weights: permuted, concatenated, sliced and packed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, permutations
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gate.weights.model_tensors import ModelTensor, Values, model_tensor

_MAX_AXES = 5
"""Tensors with more axes are compared only unchanged and reshaped."""

_SAMPLED_ELEMENTS = 61


def same(values: Values, stored: Values) -> str | None:
    """Return how `values` contains exactly the elements of `stored`, or None.

    `as it is`, `reshaped`, `transposed` (any order of axes, also before or after a reshape) or
    `flipped` along the last axes, as kernels are.
    """
    for way, arranged in (*_orders(values, stored), *_merge_axes(values, stored)):
        if equal(values, arranged):
            return way
    return "flipped" if any(equal(values, flipped) for flipped in _flips(values, stored)) else None


def arrangements(values: Values, stored: Values) -> Iterator[Values]:
    """Yield `stored` in every order of axes that gives the shape of `values`, ignoring axes of
    one."""
    return (arranged for _, arranged in _orders(values, stored))


def equal(first: Values, second: Values) -> bool:
    """Return True for equal shapes and elements; NaN equals NaN."""
    if first.shape != second.shape or not (_sample_bits(first) == _sample_bits(second)).all():
        return False
    if np.array_equal(first, second):
        return True
    return first.dtype.kind == "f" and bool(np.array_equal(first, second, equal_nan=True))


def differing(first: Values, second: Values) -> NDArray[np.bool_]:
    """Return where two arrays of one shape differ; NaN equals NaN."""
    wrong: NDArray[np.bool_] = first != second
    if first.dtype.kind == "f":
        wrong &= ~(np.isnan(first) & np.isnan(second))
    return wrong


def sampled_share(values: Values, arranged: Values) -> float:
    """Return the share of sampled elements that are bitwise equal."""
    return float((_sample_bits(values) == _sample_bits(arranged)).mean())


def _orders(values: Values, stored: Values) -> Iterator[tuple[str, Values]]:
    if values.size != stored.size:
        return
    if stored.shape == values.shape:
        yield "as it is", stored
    else:
        yield "reshaped", stored.reshape(values.shape)
    if stored.ndim > _MAX_AXES:
        return
    squeezed = _drop_ones(values.shape)
    for order in permutations(range(stored.ndim)):
        shape = tuple(stored.shape[axis] for axis in order)
        if _drop_ones(shape) == squeezed and not _moves_only_ones(order, stored.shape):
            yield "transposed", stored.transpose(order).reshape(values.shape)


def _merge_axes(values: Values, stored: Values) -> Iterator[tuple[str, Values]]:
    """Yield transpositions before or after a reshape that merges or splits axes."""
    if stored.ndim <= _MAX_AXES:
        for order in permutations(range(stored.ndim)):
            if not _moves_only_ones(order, stored.shape):
                yield "transposed", stored.transpose(order).reshape(values.shape)
    if values.ndim <= _MAX_AXES:
        for order in permutations(range(values.ndim)):
            if not _moves_only_ones(order, values.shape):
                shape = tuple(values.shape[axis] for axis in order)
                back = tuple(int(axis) for axis in np.argsort(order))
                yield "transposed", stored.reshape(shape).transpose(back)


def _flips(values: Values, stored: Values) -> Iterator[Values]:
    for arranged in arrangements(values, stored):
        axes = [axis for axis in range(2, values.ndim) if values.shape[axis] > 1]
        for count in range(1, len(axes) + 1):
            for flipped_axes in combinations(axes, count):
                yield np.flip(arranged, flipped_axes)


def _moves_only_ones(order: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return True if the order only moves axes of size one."""
    moved = [axis for axis in order if shape[axis] != 1]
    return moved == sorted(moved)


def _drop_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dim for dim in shape if dim != 1)


def _sample_bits(values: Values) -> Values:
    """Return the bits of some elements, spread over the array."""
    indices = np.linspace(0, values.size - 1, min(_SAMPLED_ELEMENTS, values.size)).astype(np.int64)
    rows = np.atleast_1d(values)  # a scalar has no axis to index
    sampled = np.ascontiguousarray(rows[np.unravel_index(indices, rows.shape)])
    return sampled.view(np.uint32 if sampled.itemsize == 4 else np.uint64)


class Matrix(NamedTuple):
    """A tensor of the model as a matrix of lines."""

    stored: ModelTensor
    lines: Values


class LineIndex(NamedTuple):
    """All lines of one length of all tensors, indexed by the sums of their bits."""

    matrices: list[Matrix]
    starts: NDArray[np.int64]
    """Index of the first line of each tensor."""
    sums: NDArray[np.uint64]
    order: NDArray[np.int64]
    """Indices that sort the sums."""

    @classmethod
    def from_matrices(cls, matrices: list[Matrix]) -> LineIndex:
        """Create the index of these tensors."""
        sums = [_sum_lines(matrix.lines) for matrix in matrices] or [np.zeros(0, np.uint64)]
        all_sums = np.concatenate(sums)
        starts = np.cumsum([0, *(len(matrix) for matrix in sums)])
        return cls(matrices, starts, all_sums, np.argsort(all_sums, kind="stable"))

    def find(self, matrix: Values) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the index of an equal line for each line, and whether there is one."""
        sums = _sum_lines(matrix)
        positions = np.searchsorted(self.sums, sums, sorter=self.order)
        lines = self.order[np.minimum(positions, len(self.order) - 1)]
        is_equal: NDArray[np.bool_] = self.sums[lines] == sums
        return lines, is_equal


def _sum_lines(matrix: Values) -> NDArray[np.uint64]:
    """Return the sum of the bits of each line."""
    words = np.ascontiguousarray(matrix).view(np.uint32)
    sums: NDArray[np.uint64] = words.sum(axis=1, dtype=np.uint64)
    return sums


# A constant is read as lines (rows, blocks of rows, columns). Each is looked up among the lines of
# the model by the sum of its bits. Lines that are consecutive in both form a run; a constant of a
# few runs is a slice or a concatenation of their sources.
_MAX_RUNS = 24
"""Largest number of runs. More are a selection of rows, whose order can't be verified."""

_MIN_SHARE = 0.5
"""Share of lines that must be found; the others then count as wrong."""

_MAX_LINES = 1 << 18


@dataclass(frozen=True)
class LineRun:
    """Lines `start` to `stop` of a constant that equal lines of `source` from `first` on."""

    source: Matrix
    start: int
    stop: int
    first: int

    @property
    def after(self) -> int:
        """Return the number of lines of the tensor after the run."""
        return len(self.source.lines) - self.first - (self.stop - self.start)

    @property
    def offset(self) -> int:
        """Line index in the tensor minus line index in the constant."""
        return self.first - self.start

    def widened(self, start: int, stop: int) -> LineRun:
        """Return the run, extended to more lines of the constant."""
        return LineRun(self.source, start, stop, self.first - (self.start - start))

    @property
    def rows(self) -> Values:
        """Return the expected lines of the constant."""
        return self.source.lines[self.first : self.first + self.stop - self.start]


@dataclass(frozen=True)
class JoinedSlices:
    """A constant and the runs that it consists of."""

    runs: tuple[LineRun, ...]
    expected: Values
    """The values of the constant according to the runs, in its shape."""
    columns: bool
    """True if its lines are columns of its last axis."""
    uncertain: NDArray[np.bool_]
    """Elements that are not between runs and complete no tensor, so they may be something else."""

    @property
    def way(self) -> str:
        """Return `sliced` for one tensor, `joined` for several."""
        return "sliced" if len({run.source.stored.name for run in self.runs}) == 1 else "joined"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors in the constant."""
        return tuple(dict.fromkeys(run.source.stored.name for run in self.runs))

    @property
    def is_ordered(self) -> bool:
        """Return False if parts of one tensor are reordered, as the gates of an LSTM may be.

        The correct order can't be derived here.
        """
        last: dict[int, int] = {}
        for run in self.runs:
            if run.first < last.get(id(run.source.stored), 0):
                return False
            last[id(run.source.stored)] = run.first
        return True

    def owner(self, flat: int) -> str:
        """Return the tensor that contains the element with this flat index."""
        lines = self.runs[-1].stop
        length = self.expected.size // lines
        line = flat % lines if self.columns else flat // length
        return next(run.source.stored.name for run in self.runs if line < run.stop)


class Lines:
    """The lines of the model's float tensors by length."""

    def __init__(self, stored: Iterable[ModelTensor]) -> None:
        self._stored = [tensor for tensor in stored if not tensor.integer]
        self._by_length: dict[int, LineIndex] = {}

    def read(self, values: Values) -> JoinedSlices | None:
        """Return the constant as a slice or concatenation, if at least half of its lines are found.

        Of several readings, the one with the fewest differences; None if there is none.
        """
        candidates: list[tuple[int, JoinedSlices]] = []
        for matrix, columns in _as_matrices(values):
            if not 1 < len(matrix) <= _MAX_LINES:
                continue
            runs = _find_runs(matrix, self._of_length(matrix.shape[1]))
            filled = _extend_runs(runs, len(matrix)) if runs else None
            if filled is None:
                continue
            joined = _join_runs(values, matrix, filled, columns=columns)
            wrong = int(differing(values, joined.expected).sum())
            if not wrong:
                return joined
            candidates.append((wrong, joined))
        return min(candidates, key=lambda pair: pair[0])[1] if candidates else None

    def _of_length(self, length: int) -> LineIndex:
        if length not in self._by_length:
            self._by_length[length] = LineIndex.from_matrices(
                [Matrix(t, lines) for t in self._stored for lines in _split_lines(t, length)]
            )
        return self._by_length[length]


def _as_matrices(values: Values) -> Iterator[tuple[Values, bool]]:
    """Yield the array as matrices of lines, and whether the lines are columns of the last axis."""
    squeezed = values.squeeze()
    if squeezed.ndim <= 1:
        yield squeezed.reshape(-1, 1), False
        return
    for axis in range(1, squeezed.ndim):
        yield squeezed.reshape(int(np.prod(squeezed.shape[:axis])), -1), False
    yield squeezed.reshape(-1, squeezed.shape[-1]).T, True


def _split_lines(tensor: ModelTensor, length: int) -> Iterator[Values]:
    """Yield a tensor of the model as lines of this length."""
    shape = tuple(dim for dim in tensor.shape if dim != 1)
    if len(shape) == 1 and length == 1:
        yield tensor.values.reshape(-1, 1)
    if any(int(np.prod(shape[axis:])) == length for axis in range(1, len(shape))):
        yield tensor.values.reshape(-1, length)
    if len(shape) > 1 and int(np.prod(shape[:-1])) == length:
        yield tensor.values.reshape(length, -1).T


def _find_runs(matrix: Values, index: LineIndex) -> list[LineRun]:
    """Return the runs of a constant; empty if too few lines are found, or in too many runs.

    Lines of a single value are not distinctive. A distinctive line that is found alone is a copy.
    """
    if not len(index.sums):
        return []
    indices, is_equal = index.find(matrix)
    if matrix.shape[1] > 1:
        is_equal &= (matrix != matrix[:, :1]).any(axis=1)
    else:
        is_equal &= ~np.isin(matrix[:, 0], (0.0, 1.0, -1.0))
    lines = len(matrix)
    offsets = indices - np.arange(lines)
    rows = np.flatnonzero(is_equal)
    if len(rows) < _MIN_SHARE * lines:
        return []
    sources = np.searchsorted(index.starts, indices, side="right") - 1
    changes = (np.diff(offsets[rows]) != 0) | (np.diff(sources[rows]) != 0)
    breaks = np.flatnonzero(changes) + 1
    groups = [group for group in np.split(rows, breaks) if len(group) > 1 or lines == 2]
    if not 0 < len(groups) <= _MAX_RUNS or sum(map(len, groups)) < _MIN_SHARE * lines:
        return []
    runs = []
    for group in groups:
        source = int(sources[group[0]])
        first = int(indices[group[0]] - index.starts[source])
        runs.append(LineRun(index.matrices[source], int(group[0]), int(group[-1]) + 1, first))
    return _merge_runs(runs)


def _merge_runs(runs: list[LineRun]) -> list[LineRun]:
    """Merge consecutive runs of one tensor with equal offset."""
    merged = [runs[0]]
    for run in runs[1:]:
        last = merged[-1]
        if run.source is last.source and run.offset == last.offset:
            merged[-1] = last.widened(last.start, run.stop)
        else:
            merged.append(run)
    return merged


def _extend_runs(
    runs: list[LineRun], lines: int
) -> tuple[list[LineRun], list[tuple[int, int]]] | None:
    """Extend the runs to the lines between them; also return the lines that may be something else.

    Lines that complete the adjacent tensors belong to them. None if no tensor could contain the
    lines.
    """
    doubtful: list[tuple[int, int]] = []
    extended: list[LineRun] = []
    for run in runs:
        end = extended[-1].stop if extended else 0
        gap, after = run.start - end, extended[-1].after if extended else 0
        count = min(gap, after)
        before = run.first
        if gap > after + before:
            return None
        if gap != after + before and gap not in (after, before):
            doubtful.append((end, run.start))
        if gap == before:
            count = 0
        if count and extended:
            extended[-1] = extended[-1].widened(extended[-1].start, end + count)
        extended.append(run.widened(end + count, run.stop))
    last = extended[-1]
    gap = lines - last.stop
    if gap > last.after:
        return None
    if gap and gap != last.after:
        doubtful.append((last.stop, lines))
    extended[-1] = last.widened(last.start, lines)
    return extended, doubtful


def _join_runs(
    values: Values,
    matrix: Values,
    filled: tuple[list[LineRun], list[tuple[int, int]]],
    *,
    columns: bool,
) -> JoinedSlices:
    runs, gaps = filled
    rows = np.concatenate([run.rows for run in runs])
    doubtful = np.zeros(rows.shape, dtype=bool)
    for start, stop in gaps:
        # Lines that are at least half equal are certainly those lines.
        wrong = differing(matrix[start:stop], rows[start:stop]).mean(axis=1)
        doubtful[start:stop] = (wrong > _MIN_SHARE)[:, None]
    shape = values.shape
    if columns:
        return JoinedSlices(tuple(runs), rows.T.reshape(shape), columns, doubtful.T.reshape(shape))
    return JoinedSlices(tuple(runs), rows.reshape(shape), columns, doubtful.reshape(shape))


# ONNX: W (directions, gates * hidden, inputs), R (directions, gates * hidden, hidden), B
# (directions, 2 * gates * hidden) = [of W, of R]. Gates of LSTM: input, output, forget, cell; of
# GRU: update, reset, hidden (operators LSTM and GRU of the ONNX specification). PyTorch: input,
# forget, cell, output; reset, update, new.
_GATE_ORDERS = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN_TANH": (0,), "RNN_RELU": (0,)}

_MAX_DISTANCE = 0.5
"""Largest relative L1 difference at which a constant counts as a modified weight."""


def match_packed_rnn(model: nn.Module) -> Iterator[ModelTensor]:
    """Yield W, R and B of every layer of every recurrent module, including scripted ones."""
    for path, module in model.named_modules():
        order = _GATE_ORDERS.get(str(getattr(module, "mode", "")))
        if order is not None and hasattr(module, "weight_ih_l0"):
            for layer in range(int(getattr(module, "num_layers", 1))):
                yield from _layer_tensors(module, f"{path}." if path else "", layer, order)


def misplaced(module: nn.Module, arrays: Iterable[Values]) -> dict[str, list[str]]:
    """Return the weights of a recurrent module that are reordered in the file.

    By kind: swapped `directions`, reordered `gates`.
    """
    constants = list(arrays)
    swapped: list[str] = []
    reordered: list[str] = []
    for stored in match_packed_rnn(module):
        want = stored.values
        permuted = [a for a in constants if a.shape == want.shape and _same_elements(a, want)]
        if not permuted or any(np.array_equal(a, want) for a in permuted):
            continue
        if any(np.array_equal(a, want[::-1]) for a in permuted):
            swapped += stored.names
        else:
            reordered += [
                name
                for region, name in stored.parts
                if not np.array_equal(permuted[0][region], want[region])
            ]
    by_kind = {"directions": swapped, "gates": reordered}
    return {kind: list(dict.fromkeys(names)) for kind, names in by_kind.items() if names}


def differing_parts(
    module: nn.Module, arrays: Iterable[Values]
) -> Iterator[tuple[str, Values, Values]]:
    """Yield the weights of a recurrent module that differ in the file: name, the model's, the
    file's, both in the file's order of gates.

    Of the constants that hold no weight unchanged, one is identified by an equal weight in it, such
    as that of the other direction, by its shape if there is a single one, or by similarity.
    """
    packed, constants = list(match_packed_rnn(module)), list(arrays)
    wrong = [tensor for tensor in packed if not _holds(constants, tensor.values)]
    unused = [array for array in constants if not _holds([t.values for t in packed], array)]
    for stored in wrong:
        want = stored.values
        shaped = [(_l1_difference(a, want), a) for a in unused if a.shape == want.shape]
        is_single = len(shaped) == sum(other.shape == want.shape for other in wrong) == 1
        for distance, got in sorted(shaped, key=itemgetter(0)):
            equal_parts = [np.array_equal(got[region], want[region]) for region, _ in stored.parts]
            is_near = distance <= _MAX_DISTANCE * np.abs(want).sum()
            if is_single or is_near or any(equal_parts):
                for (region, name), is_equal in zip(stored.parts, equal_parts, strict=True):
                    if not is_equal:
                        yield name, want[region], got[region]
                break


def _holds(arrays: Iterable[Values], values: Values) -> bool:
    """Return whether an array has the shape and, in any order, the elements of `values`."""
    return any(a.shape == values.shape and _same_elements(a, values) for a in arrays)


def _l1_difference(first: Values, second: Values) -> float:
    return float(np.abs(np.nan_to_num(first) - second).sum())


def _same_elements(first: Values, second: Values) -> bool:
    return bool(np.array_equal(np.sort(first, axis=None), np.sort(second, axis=None)))


def _layer_tensors(
    module: Any, prefix: str, layer: int, order: tuple[int, ...]
) -> Iterator[ModelTensor]:
    suffixes = [f"_l{layer}", *([f"_l{layer}_reverse"] if module.bidirectional else [])]
    for kind in ("weight_ih", "weight_hh"):
        names = [f"{kind}{suffix}" for suffix in suffixes]
        parts = tuple(((slice(i, i + 1),), f"{prefix}{name}") for i, name in enumerate(names))
        rows = [_reorder_gates(getattr(module, name), order) for name in names]
        yield _stack(rows, parts)
    if not module.bias:
        return
    biases, regions = [], []
    for i, suffix in enumerate(suffixes):
        tensors = [getattr(module, f"bias_{kind}{suffix}") for kind in ("ih", "hh")]
        pair = [_reorder_gates(tensor, order) for tensor in tensors]
        half = len(pair[0])
        for region, kind in ((slice(0, half), "ih"), (slice(half, None), "hh")):
            regions.append(((slice(i, i + 1), region), f"{prefix}bias_{kind}{suffix}"))
        biases.append(np.concatenate(pair))
    yield _stack(biases, tuple(regions))


def _stack(rows: list[Values], parts: tuple[tuple[tuple[slice, ...], str], ...]) -> ModelTensor:
    values = np.stack(rows)
    names = tuple(dict.fromkeys(name for _, name in parts))
    return ModelTensor(names, lambda: values, values.shape, parts=parts)


def _reorder_gates(tensor: torch.Tensor, order: tuple[int, ...]) -> Values:
    values = model_tensor(("",), tensor).values
    gates = values.reshape(len(order), -1, *values.shape[1:])
    arranged: Values = gates[list(order)].reshape(values.shape)
    return arranged
