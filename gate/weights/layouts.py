"""Permuted, joined, sliced and packed layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gate.weights.model_tensors import ModelTensor, Values, model_tensor

_AXES = 5
"""Tensors of more axes are only compared as they are and reshaped."""

_SAMPLE = 61


def same(values: Values, stored: Values) -> str | None:
    """The way in which `values` holds exactly the elements of `stored`; None: in none of these.

    `as it is`, `reshaped`, `transposed` (any order of the axes, also before or after a reshape)
    or `flipped` along the last axes, as kernels are.
    """
    for way, arranged in (*_orders(values, stored), *_merged(values, stored)):
        if equal(values, arranged):
            return way
    return "flipped" if any(equal(values, one) for one in _flips(values, stored)) else None


def arrangements(values: Values, stored: Values) -> Iterator[Values]:
    """`stored` in every order of its axes that has the shape of `values` up to axes of one."""
    return (arranged for _, arranged in _orders(values, stored))


def equal(one: Values, other: Values) -> bool:
    """Equal shapes and elements; NaN equals NaN."""
    if one.shape != other.shape or not (_sample(one) == _sample(other)).all():
        return False
    if np.array_equal(one, other):
        return True
    return one.dtype.kind == "f" and bool(np.array_equal(one, other, equal_nan=True))


def differing(one: Values, other: Values) -> NDArray[np.bool_]:
    """Return where two arrays of one shape differ; NaN equals NaN."""
    wrong: NDArray[np.bool_] = one != other
    if one.dtype.kind == "f":
        wrong &= ~(np.isnan(one) & np.isnan(other))
    return wrong


def sampled_share(values: Values, arranged: Values) -> float:
    """The share of some elements in which both are bitwise equal."""
    return float((_sample(values) == _sample(arranged)).mean())


def _orders(values: Values, stored: Values) -> Iterator[tuple[str, Values]]:
    if values.size != stored.size:
        return
    if stored.shape == values.shape:
        yield "as it is", stored
    else:
        yield "reshaped", stored.reshape(values.shape)
    if stored.ndim > _AXES:
        return
    wanted = _squeezed(values.shape)
    for order in permutations(range(stored.ndim)):
        shape = tuple(stored.shape[axis] for axis in order)
        if _squeezed(shape) == wanted and not _keeps(order, stored.shape):
            yield "transposed", stored.transpose(order).reshape(values.shape)


def _merged(values: Values, stored: Values) -> Iterator[tuple[str, Values]]:
    """Transposed before or after a reshape that joins or splits axes."""
    if stored.ndim <= _AXES:
        for order in permutations(range(stored.ndim)):
            if not _keeps(order, stored.shape):
                yield "transposed", stored.transpose(order).reshape(values.shape)
    if values.ndim <= _AXES:
        for order in permutations(range(values.ndim)):
            if not _keeps(order, values.shape):
                shape = tuple(values.shape[axis] for axis in order)
                back = tuple(int(axis) for axis in np.argsort(order))
                yield "transposed", stored.reshape(shape).transpose(back)


def _flips(values: Values, stored: Values) -> Iterator[Values]:
    for arranged in arrangements(values, stored):
        axes = [axis for axis in range(2, values.ndim) if values.shape[axis] > 1]
        for count in range(1, len(axes) + 1):
            for chosen in combinations(axes, count):
                yield np.flip(arranged, chosen)


def _keeps(order: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """True if the order only moves axes of one."""
    moved = [axis for axis in order if shape[axis] != 1]
    return moved == sorted(moved)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dim for dim in shape if dim != 1)


def _sample(values: Values) -> Values:
    """The bits of some elements, spread over the array."""
    where = np.linspace(0, values.size - 1, min(_SAMPLE, values.size)).astype(np.int64)
    rows = np.atleast_1d(values)  # a scalar has no places to choose
    chosen = np.ascontiguousarray(rows[np.unravel_index(where, rows.shape)])
    return chosen.view(np.uint32 if chosen.itemsize == 4 else np.uint64)


class Matrix(NamedTuple):
    """A tensor of the model as lines."""

    stored: ModelTensor
    lines: Values


class LineIndex(NamedTuple):
    """All lines of one length, one tensor behind the other, to find them by the sums of bits."""

    matrices: list[Matrix]
    starts: NDArray[np.int64]
    """Number of the first line of each tensor."""
    sums: NDArray[np.uint64]
    order: NDArray[np.int64]
    """That sorts the sums."""

    @classmethod
    def from_matrices(cls, matrices: list[Matrix]) -> LineIndex:
        """Over these tensors."""
        sums = [_sums(one.lines) for one in matrices] or [np.zeros(0, np.uint64)]
        everything = np.concatenate(sums)
        starts = np.cumsum([0, *(len(one) for one in sums)])
        return cls(matrices, starts, everything, np.argsort(everything, kind="stable"))

    def find(self, matrix: Values) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The number of a line like each of these, and whether there is one."""
        mine = _sums(matrix)
        at = np.searchsorted(self.sums, mine, sorter=self.order)
        place = self.order[np.minimum(at, len(self.order) - 1)]
        hit: NDArray[np.bool_] = self.sums[place] == mine
        return place, hit


def _sums(matrix: Values) -> NDArray[np.uint64]:
    """The sum of the bits of every line."""
    words = np.ascontiguousarray(matrix).view(np.uint32)
    sums: NDArray[np.uint64] = words.sum(axis=1, dtype=np.uint64)
    return sums


# A constant is read as lines (rows, blocks of rows, columns), each found by the sum of its bits
# among the lines of the model. Lines that follow each other in the model as in the constant are a
# run; a constant of a few runs is a slice or a concatenation of what they come from.
_RUNS = 24
"""More runs than this are a selection of rows, whose order nothing here could check."""

_ENOUGH = 0.5
"""The share of lines that must be found, for the others to count as wrong."""

_LINES = 1 << 18


@dataclass(frozen=True)
class LineRun:
    """Lines `start` to `stop` of a constant are those of `source` from `first` on."""

    source: Matrix
    start: int
    stop: int
    first: int

    @property
    def before(self) -> int:
        """The number of lines of the tensor before the run."""
        return self.first

    @property
    def after(self) -> int:
        """The number of lines of the tensor after the run."""
        return len(self.source.lines) - self.first - (self.stop - self.start)

    @property
    def offset(self) -> int:
        """Line of the tensor minus line of the constant."""
        return self.first - self.start

    def widened(self, start: int, stop: int) -> LineRun:
        """Return the run, extended to more lines of the constant."""
        return LineRun(self.source, start, stop, self.first - (self.start - start))

    @property
    def rows(self) -> Values:
        """The expected lines of the constant."""
        return self.source.lines[self.first : self.first + self.stop - self.start]


@dataclass(frozen=True)
class JoinedSlices:
    """A constant as the runs that it consists of."""

    runs: tuple[LineRun, ...]
    expected: Values
    """What the runs say that the constant is, in its shape."""
    columns: bool
    """Its lines are columns of its last axis."""
    doubtful: NDArray[np.bool_]
    """Elements that no run surrounds and that complete no tensor: they may be something else."""

    @property
    def way(self) -> str:
        """`sliced` from one tensor, or `joined` from several."""
        return "sliced" if len({run.source.stored.name for run in self.runs}) == 1 else "joined"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors from which the constant is built."""
        return tuple(dict.fromkeys(run.source.stored.name for run in self.runs))

    @property
    def ordered(self) -> bool:
        """False if parts of one tensor are in another order, as the gates of an LSTM may be.

        The right order can't be derived here.
        """
        last: dict[int, int] = {}
        for run in self.runs:
            if run.first < last.get(id(run.source.stored), 0):
                return False
            last[id(run.source.stored)] = run.first
        return True

    def owner(self, flat: int) -> str:
        """The tensor that the element with this flat index comes from."""
        lines = self.runs[-1].stop
        length = self.expected.size // lines
        line = flat % lines if self.columns else flat // length
        return next(run.source.stored.name for run in self.runs if line < run.stop)


class Lines:
    """The lines of the model's tensors of floats, by their length."""

    def __init__(self, stored: Iterable[ModelTensor]) -> None:
        self._stored = [one for one in stored if not one.integer]
        self._by_length: dict[int, LineIndex] = {}

    def read(self, values: Values) -> JoinedSlices | None:
        """The constant as a slice or concatenation of which at least half of the lines are bitwise
        those of the model: the reading with the fewest differences. None if there is none."""
        found: list[tuple[int, JoinedSlices]] = []
        for matrix, columns in _readings(values):
            if not 1 < len(matrix) <= _LINES:
                continue
            runs = _runs(matrix, self._of_length(matrix.shape[1]))
            filled = _filled(runs, len(matrix)) if runs else None
            if filled is None:
                continue
            one = _joined(values, matrix, filled, columns=columns)
            wrong = int(differing(values, one.expected).sum())
            if not wrong:
                return one
            found.append((wrong, one))
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def _of_length(self, length: int) -> LineIndex:
        if length not in self._by_length:
            self._by_length[length] = LineIndex.from_matrices(
                [Matrix(one, lines) for one in self._stored for lines in _matrices(one, length)]
            )
        return self._by_length[length]


def _readings(values: Values) -> Iterator[tuple[Values, bool]]:
    """The array as a matrix of lines; True: the lines are columns of the last axis."""
    squeezed = values.squeeze()
    if squeezed.ndim <= 1:
        yield squeezed.reshape(-1, 1), False
        return
    for axis in range(1, squeezed.ndim):
        yield squeezed.reshape(int(np.prod(squeezed.shape[:axis])), -1), False
    yield squeezed.reshape(-1, squeezed.shape[-1]).T, True


def _matrices(one: ModelTensor, length: int) -> Iterator[Values]:
    """A tensor of the model as lines of this length."""
    shape = tuple(dim for dim in one.shape if dim != 1)
    if len(shape) == 1 and length == 1:
        yield one.values.reshape(-1, 1)
    if any(int(np.prod(shape[axis:])) == length for axis in range(1, len(shape))):
        yield one.values.reshape(-1, length)
    if len(shape) > 1 and int(np.prod(shape[:-1])) == length:
        yield one.values.reshape(length, -1).T


def _runs(matrix: Values, index: LineIndex) -> list[LineRun]:
    """Return which line comes from where; empty if too few are found, or in too many runs.

    Lines of a single value are not distinctive, and one that is found alone is a copy of another.
    """
    if not len(index.sums):
        return []
    place, hit = index.find(matrix)
    if matrix.shape[1] > 1:
        hit &= (matrix != matrix[:, :1]).any(axis=1)
    else:
        hit &= ~np.isin(matrix[:, 0], (0.0, 1.0, -1.0))
    lines = len(matrix)
    offsets = place - np.arange(lines)
    where = np.flatnonzero(hit)
    if len(where) < _ENOUGH * lines:
        return []
    number = np.searchsorted(index.starts, place, side="right") - 1
    changes = (np.diff(offsets[where]) != 0) | (np.diff(number[where]) != 0)
    breaks = np.flatnonzero(changes) + 1
    groups = [group for group in np.split(where, breaks) if len(group) > 1 or lines == 2]
    if not 0 < len(groups) <= _RUNS or sum(map(len, groups)) < _ENOUGH * lines:
        return []
    runs = []
    for group in groups:
        source = int(number[group[0]])
        first = int(place[group[0]] - index.starts[source])
        runs.append(LineRun(index.matrices[source], int(group[0]), int(group[-1]) + 1, first))
    return _bridged(runs)


def _bridged(runs: list[LineRun]) -> list[LineRun]:
    """Two runs of one tensor with the same offset are one."""
    whole = [runs[0]]
    for run in runs[1:]:
        last = whole[-1]
        if run.source is last.source and run.offset == last.offset:
            whole[-1] = last.widened(last.start, run.stop)
        else:
            whole.append(run)
    return whole


def _filled(runs: list[LineRun], lines: int) -> tuple[list[LineRun], list[tuple[int, int]]] | None:
    """The runs with the lines between them, and the lines that might as well be something else.

    Lines that complete the tensors on both sides are theirs. None where no tensor could hold them.
    """
    doubtful: list[tuple[int, int]] = []
    whole: list[LineRun] = []
    for run in runs:
        end = whole[-1].stop if whole else 0
        gap, after = run.start - end, whole[-1].after if whole else 0
        taken = min(gap, after)
        if gap > after + run.before:
            return None
        if gap != after + run.before and gap not in (after, run.before):
            doubtful.append((end, run.start))
        if gap == run.before:
            taken = 0
        if taken and whole:
            whole[-1] = whole[-1].widened(whole[-1].start, end + taken)
        whole.append(run.widened(end + taken, run.stop))
    last = whole[-1]
    gap = lines - last.stop
    if gap > last.after:
        return None
    if gap and gap != last.after:
        doubtful.append((last.stop, lines))
    whole[-1] = last.widened(last.start, lines)
    return whole, doubtful


def _joined(
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
        # Lines of which half is right are surely those lines.
        wrong = differing(matrix[start:stop], rows[start:stop]).mean(axis=1)
        doubtful[start:stop] = (wrong > _ENOUGH)[:, None]
    shape = values.shape
    if columns:
        return JoinedSlices(tuple(runs), rows.T.reshape(shape), columns, doubtful.T.reshape(shape))
    return JoinedSlices(tuple(runs), rows.reshape(shape), columns, doubtful.reshape(shape))


# ONNX: W (directions, gates * hidden, inputs), R (directions, gates * hidden, hidden), B
# (directions, 2 * gates * hidden) = [of W, of R]. Gates of LSTM: input, output, forget, cell; of
# GRU: update, reset, hidden (operators LSTM and GRU of the ONNX specification). PyTorch: input,
# forget, cell, output; reset, update, new.
_ORDERS = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN_TANH": (0,), "RNN_RELU": (0,)}


def match_packed_rnn(model: nn.Module) -> Iterator[ModelTensor]:
    """W, R and B of every layer of every recurrent module, scripted ones too."""
    for path, module in model.named_modules():
        order = _ORDERS.get(str(getattr(module, "mode", "")))
        if order is not None and hasattr(module, "weight_ih_l0"):
            for layer in range(int(getattr(module, "num_layers", 1))):
                yield from _layer(module, f"{path}." if path else "", layer, order)


def misplaced(module: nn.Module, arrays: Iterable[Values]) -> dict[str, list[str]]:
    """Return the weights of a recurrent module whose elements the constants of a file have in
    another order: those with swapped `directions`, and those with other `gates`."""
    constants = list(arrays)
    turned: list[str] = []
    moved: list[str] = []
    for stored in match_packed_rnn(module):
        want = stored.values
        alike = [got for got in constants if got.shape == want.shape and _same_elements(got, want)]
        if not alike or any(np.array_equal(got, want) for got in alike):
            continue
        if any(np.array_equal(got, want[::-1]) for got in alike):
            turned += stored.names
        else:
            moved += [
                name
                for region, name in stored.parts
                if not np.array_equal(alike[0][region], want[region])
            ]
    found = {"directions": turned, "gates": moved}
    return {kind: list(dict.fromkeys(names)) for kind, names in found.items() if names}


def _same_elements(one: Values, other: Values) -> bool:
    return bool(np.array_equal(np.sort(one, axis=None), np.sort(other, axis=None)))


def _layer(module: Any, prefix: str, layer: int, order: tuple[int, ...]) -> Iterator[ModelTensor]:
    suffixes = [f"_l{layer}", *([f"_l{layer}_reverse"] if module.bidirectional else [])]
    for kind in ("weight_ih", "weight_hh"):
        names = [f"{kind}{suffix}" for suffix in suffixes]
        parts = tuple(((slice(at, at + 1),), f"{prefix}{name}") for at, name in enumerate(names))
        rows = [_reordered(getattr(module, name), order) for name in names]
        yield _stored(rows, parts)
    if not module.bias:
        return
    biases, regions = [], []
    for at, suffix in enumerate(suffixes):
        pair = [_reordered(getattr(module, f"bias_{kind}{suffix}"), order) for kind in ("ih", "hh")]
        half = len(pair[0])
        for region, kind in ((slice(0, half), "ih"), (slice(half, None), "hh")):
            regions.append(((slice(at, at + 1), region), f"{prefix}bias_{kind}{suffix}"))
        biases.append(np.concatenate(pair))
    yield _stored(biases, tuple(regions))


def _stored(rows: list[Values], parts: tuple[tuple[tuple[slice, ...], str], ...]) -> ModelTensor:
    values = np.stack(rows)
    names = tuple(dict.fromkeys(name for _, name in parts))
    return ModelTensor(names, lambda: values, values.shape, parts=parts)


def _reordered(tensor: torch.Tensor, order: tuple[int, ...]) -> Values:
    values = model_tensor(("",), tensor).values
    gates = values.reshape(len(order), -1, *values.shape[1:])
    arranged: Values = gates[list(order)].reshape(values.shape)
    return arranged
