"""Constants that are cut out of tensors of the model, or joined from several of them.

A constant is read as lines (rows, blocks of rows, columns), each found by the sum of its bits among
the lines of the model. Lines that follow each other in the model as in the constant are a run; a
constant of a few runs is a slice or a concatenation of what they come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gate.parity.graph.layouts import differing
from gate.parity.graph.line_index import LineIndex, Matrix
from gate.parity.graph.pool import Stored, Values

_RUNS = 24
"""More runs than this are a selection of rows, whose order nothing here could check."""
_ENOUGH = 0.5
"""The share of lines that must be found, for the others to be told from them."""
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
        """How many lines the tensor has before the run."""
        return self.first

    @property
    def after(self) -> int:
        """How many lines it has behind the run."""
        return len(self.source.lines) - self.first - (self.stop - self.start)

    @property
    def offset(self) -> int:
        """Line of the tensor minus line of the constant."""
        return self.first - self.start

    def widened(self, start: int, stop: int) -> LineRun:
        """The same run over more lines of the constant."""
        return LineRun(self.source, start, stop, self.first - (self.start - start))

    @property
    def rows(self) -> Values:
        """What the lines of the constant should be."""
        return self.source.lines[self.first : self.first + self.stop - self.start]


@dataclass(frozen=True)
class Joined:
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
        """Of the tensors it comes from."""
        return tuple(dict.fromkeys(run.source.stored.name for run in self.runs))

    @property
    def ordered(self) -> bool:
        """False if parts of one tensor are in another order, as the gates of an LSTM may be: which
        order is right, nothing here could say."""
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

    def __init__(self, stored: Iterable[Stored]) -> None:
        self._stored = [one for one in stored if not one.integer]
        self._by_length: dict[int, LineIndex] = {}

    def read(self, values: Values) -> Joined | None:
        """The constant as a slice or concatenation of which at least half of the lines are bitwise
        those of the model: the reading with the fewest differences. None if there is none."""
        found: list[tuple[int, Joined]] = []
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
            self._by_length[length] = LineIndex.of(
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


def _matrices(one: Stored, length: int) -> Iterator[Values]:
    """A tensor of the model as lines of this length."""
    shape = tuple(dim for dim in one.shape if dim != 1)
    if len(shape) == 1 and length == 1:
        yield one.values.reshape(-1, 1)
    if any(int(np.prod(shape[axis:])) == length for axis in range(1, len(shape))):
        yield one.values.reshape(-1, length)
    if len(shape) > 1 and int(np.prod(shape[:-1])) == length:
        yield one.values.reshape(length, -1).T


def _runs(matrix: Values, index: LineIndex) -> list[LineRun]:
    """Which line comes from where; empty if too few are found, or in too many runs.

    Lines of a single value say nothing, and one that is found alone is another's copy.
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
) -> Joined:
    runs, gaps = filled
    rows = np.concatenate([run.rows for run in runs])
    doubtful = np.zeros(rows.shape, dtype=bool)
    for start, stop in gaps:
        # Lines of which half is right are surely those lines.
        wrong = differing(matrix[start:stop], rows[start:stop]).mean(axis=1)
        doubtful[start:stop] = (wrong > _ENOUGH)[:, None]
    shape = values.shape
    if columns:
        return Joined(tuple(runs), rows.T.reshape(shape), columns, doubtful.T.reshape(shape))
    return Joined(tuple(runs), rows.reshape(shape), columns, doubtful.reshape(shape))
