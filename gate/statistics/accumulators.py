"""Mergeable statistics: moments, histograms, worst values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gate.records.outputs import EDGES, PER_OCTAVE, Histogram
from gate.statistics.error_groups import Floats
from gate.storage.arrays import OutputArray

Array = NDArray[np.generic]


def distances(left: Array, right: Array) -> Floats:
    """Return |left - right| for each element of two arrays of equal shape, as float64, never NaN.

    NaN on both sides and equal infinities have the distance 0. NaN or infinity on one side only,
    and infinities of different sign, have an infinite distance. Different integers have a distance
    of at least 1, also beyond 2^53.
    """
    with np.errstate(all="ignore"):
        # Without copies of both arrays in float64. A ufunc returns no array for scalars.
        distance = np.asarray(np.subtract(left, right, dtype=np.float64))
    np.abs(distance, out=distance)
    if left.dtype.kind != "f":
        return np.where(left != right, np.maximum(distance, 1.0), 0.0)
    if np.isfinite(distance).all():
        return distance
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    return np.where(same, 0.0, np.nan_to_num(distance, nan=np.inf, posinf=np.inf))


def finite_distances(left: OutputArray, right: OutputArray) -> Floats:
    """Return |left - right| for each element, as float64; 0 where it is not finite."""
    with np.errstate(all="ignore"):
        distance = np.abs(np.subtract(right, left, dtype=np.float64))
    return np.where(np.isfinite(distance), distance, 0.0)


def interleave(lists: Iterable[Sequence[int]]) -> list[int]:
    """Return the first number of each list, then the second ones, ..., without duplicates."""
    turns = chain.from_iterable(zip_longest(*lists))
    return list(dict.fromkeys(number for number in turns if number is not None))


def by_column(left: OutputArray, right: OutputArray) -> Floats:
    """Return the largest distance in each column (index of the last axis), shape (columns,).

    Integers and bools count as one column: shape (1,), at least 1 if any differ."""
    distance = distances(left, right)
    if left.dtype.kind == "f":
        return columns(distance)
    return np.array([distance.max(initial=0.0)])


def columns(errors: Floats) -> Floats:
    """Return the largest error of each column, shape (columns,); arrays with fewer than two axes
    count as one column."""
    if errors.ndim < 2 or not errors.size:
        return np.array([errors.max(initial=0.0)])
    return np.asarray(errors.max(axis=tuple(range(errors.ndim - 1)), initial=0.0))


def worse_columns(left: Floats, right: Floats) -> Floats:
    """Return the larger error of each column. A single column is broadcast; if the numbers of
    columns differ, all count as one column."""
    if len(left) != len(right) and 1 not in (len(left), len(right)):
        left, right = np.array([left.max()]), np.array([right.max()])
    return np.asarray(np.maximum(left, right))


def worst_ratio(change: Floats, unit: Floats) -> float:
    """Return the largest ratio of change to unit over the columns: 0 without a change, infinite for
    an infinite change or a unit of 0."""
    if len(change) != len(unit) and 1 not in (len(change), len(unit)):
        change, unit = np.array([change.max()]), np.array([unit.max()])
    with np.errstate(all="ignore"):
        ratios = np.where((change == 0.0) | np.isinf(change), change, change / unit)
    return float(ratios.max())


# The scale of an output is its standard deviation without elements that are equal in all samples.


MAX_TRACKED = 1 << 20
"""Maximum number of elements of a sample that are tracked individually."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations of float64 values.

    merge is associative and commutative up to rounding (Chan, Golub, LeVeque 1979:
    "Updating formulae and a pairwise algorithm for computing sample variances").
    """

    count: int = 0
    mean: float = 0.0
    deviations: float = 0.0
    """Sum of squared deviations from the mean."""

    @classmethod
    @np.errstate(all="ignore")
    def from_values(cls, values: NDArray[np.float64]) -> Moments:
        """Moments of finite values of any shape; equal values have deviations of exactly 0."""
        if values.size == 0:
            return cls()
        shifted = values.reshape(-1) - values.flat[0]
        mean = float(shifted.mean())
        deviations = float(np.square(shifted - mean).sum())
        return cls(values.size, float(values.flat[0]) + mean, deviations)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets of values together."""
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        step = other.mean - self.mean
        share = other.count / count
        return Moments(
            count,
            self.mean + step * share,
            self.deviations + other.deviations + step * step * self.count * share,
        )

    @property
    def std(self) -> float:
        """Return the population standard deviation; 0 without values, infinite on overflow."""
        return _root(self.deviations / self.count) if self.count else 0.0


class ElementMoments:
    """Mean and variance of each element of a sample, and whether the two sides ever differed.

    An element that is constant over the samples and equal on both sides, such as a mask of -1e9, is
    excluded from the scale. merge is associative and commutative up to rounding (Chan, Golub,
    LeVeque 1979), like that of `Moments`.
    """

    def __init__(self) -> None:
        self._counts: Floats | None = None
        self._means = self._deviations = np.zeros(0)
        self._unequal: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._all = Moments()
        self._tracks_elements = True

    @np.errstate(all="ignore")
    def update(self, reference: Floats, unequal: NDArray[np.bool_]) -> None:
        """Add rows of shape (samples, elements), and the mask in which the two sides differ."""
        finite = np.isfinite(reference)
        self._all = self._all.merge(Moments.from_values(reference[finite]))
        if not self._tracks_elements or not reference.size:
            return
        if reference.shape[1] > MAX_TRACKED or (
            self._counts is not None and len(self._counts) != reference.shape[1]
        ):
            self._tracks_elements = False
            return
        part = ElementMoments()
        values = np.where(finite, reference, 0.0)
        part._counts = finite.sum(axis=0).astype(np.float64)
        # Relative to the first row, so that equal values have a variance of exactly 0.
        shifted = np.where(finite, values - values[0], 0.0)
        means = shifted.sum(axis=0) / np.maximum(part._counts, 1.0)
        part._deviations = np.square(np.where(finite, shifted - means, 0.0)).sum(axis=0)
        part._means = values[0] + means
        # An element that is finite only in some samples is not constant either.
        part._unequal = np.asarray(unequal.any(axis=0) | (finite.any(axis=0) & ~finite.all(axis=0)))
        self._add(part)

    @np.errstate(all="ignore")
    def merge(self, other: ElementMoments) -> ElementMoments:
        """Return the moments of both streams."""
        merged = ElementMoments()
        merged._tracks_elements = self._tracks_elements and other._tracks_elements
        merged._add(self)
        merged._add(other)
        merged._all = self._all.merge(other._all)
        return merged

    @property
    def std(self) -> float:
        """Return the population standard deviation of the elements that vary or differ between the
        sides; of all elements if none varies. 0 without finite values, infinite on overflow."""
        if not self._tracks_elements or self._counts is None or not (self._deviations != 0.0).any():
            return self._all.std
        kept = ((self._deviations != 0.0) | self._unequal) & (self._counts > 0.0)
        counts, means = self._counts[kept], self._means[kept]
        with np.errstate(all="ignore"):
            centre = float((counts * means).sum() / counts.sum())
            between = float((counts * np.square(means - centre)).sum())
            total = between + float(self._deviations[kept].sum())
        return _root(total / float(counts.sum()))

    @property
    def count(self) -> int:
        """Return the number of finite values."""
        return self._all.count

    def _add(self, part: ElementMoments) -> None:
        if part._counts is None:
            return
        if self._counts is None:
            self._counts, self._means = part._counts, part._means
            self._deviations, self._unequal = part._deviations, part._unequal
            return
        if len(self._counts) != len(part._counts):
            self._tracks_elements = False
            return
        once = (self._counts > 0) != (part._counts > 0)
        counts = self._counts + part._counts
        share = part._counts / np.maximum(counts, 1.0)
        step = np.where((self._counts > 0) & (part._counts > 0), part._means - self._means, 0.0)
        start = np.where(self._counts > 0, self._means, part._means)
        self._means = start + step * share
        self._deviations = self._deviations + part._deviations + step * step * self._counts * share
        self._counts, self._unequal = counts, self._unequal | part._unequal | once


def _root(variance: float) -> float:
    """Return the square root; infinite for NaN, which only results from an overflow."""
    return math.inf if math.isnan(variance) else math.sqrt(variance)


@dataclass(frozen=True, eq=False)
class Variation:
    """The first row of the reference, and whether all rows are equal to it."""

    rows: int = 0
    first: Array | None = None
    same: bool = True

    @classmethod
    def from_rows(cls, rows: Array) -> Variation:
        """Return the variation of an array, shape (rows > 0, elements)."""
        same = len(rows) == 1 or _equal(rows, rows[:1])
        return cls(len(rows), rows[0].copy(), same)

    def merge(self, other: Variation) -> Variation:
        """Return the variation of both streams."""
        if self.first is None or other.first is None:
            return other if self.first is None else self
        same = (
            self.same
            and other.same
            and self.first.shape == other.first.shape
            and _equal(self.first, other.first)
        )
        return Variation(self.rows + other.rows, self.first, same)

    def constant(self, samples: int) -> bool:
        """Return whether all rows are equal; a single row for several samples must vary itself."""
        if self.first is None or not self.same:
            return self.first is None
        return self.rows > 1 or samples == 1 or _equal(self.first, self.first[:1])


def _equal(left: Array, right: Array) -> bool:
    """Return whether all elements are equal, with `right` broadcast; NaN equals NaN."""
    nan = (left != left) & (right != right)  # noqa: PLR0124  (NaN is not itself)
    return bool(((left == right) | nan).all())


_MIN_EXPONENT = -1022
"""Exponent of the smallest normal float64; smaller numbers are in its bin."""

_OCTAVES = 1024 - _MIN_EXPONENT

_BINS = PER_OCTAVE * _OCTAVES

_MANTISSA = 5
"""Number of leading bits of the mantissa that determine a bin."""

_CHUNK = 1 << 15
"""Number of elements per chunk, so that intermediate arrays stay in the cache."""


def _bins() -> NDArray[np.intp]:
    """Return the bin for each combination of a float64's leading bits (sign, exponent, mantissa).

    The last bin is for NaN and infinity."""
    step = 1 << _MANTISSA
    leading = np.arange(1 << (12 + _MANTISSA))
    exponent = leading // step % 2048 - 1023
    parts = np.searchsorted(EDGES, 1.0 + leading % step / step, side="right") - 1
    bins = PER_OCTAVE * (exponent - _MIN_EXPONENT) + parts
    bins = np.where(exponent < _MIN_EXPONENT, 0, bins)
    return np.where(exponent == 1024, _BINS, bins).astype(np.intp)


_BIN_OF = _bins()


class MagnitudeHistogram:
    """Counts magnitudes by the leading bits of their float64; independent of the order.

    merge is associative and commutative; update(a + b) == update(a).merge(update(b)).
    """

    def __init__(self) -> None:
        self._zeros = 0
        self._counts = np.zeros(_BINS + 1, np.int64)

    def update(self, sizes: Floats) -> None:
        """Add absolute values of any shape; NaN and infinity are counted separately."""
        flat = np.ascontiguousarray(sizes).reshape(-1)
        zeros = flat.size - int(np.count_nonzero(flat))
        bits = flat.view(np.uint64)
        for start in range(0, flat.size, _CHUNK):
            leading = (bits[start : start + _CHUNK] >> np.uint64(52 - _MANTISSA)).view(np.int64)
            self._counts += np.bincount(_BIN_OF[leading], minlength=_BINS + 1)
        self._zeros += zeros
        self._counts[0] -= zeros

    def merge(self, other: MagnitudeHistogram) -> MagnitudeHistogram:
        """Return the histogram of both streams."""
        merged = MagnitudeHistogram()
        merged._zeros = self._zeros + other._zeros
        merged._counts = self._counts + other._counts
        return merged

    def __getstate__(self) -> dict[str, object]:
        # Most bins are empty: store only those between the first and the last filled one.
        filled = np.flatnonzero(self._counts)
        first = int(filled[0]) if filled.size else 0
        last = int(filled[-1]) + 1 if filled.size else 0
        return {"zeros": self._zeros, "first": first, "counts": self._counts[first:last]}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._zeros, first, counts = state["zeros"], state["first"], state["counts"]
        self._counts = np.zeros(_BINS + 1, np.int64)
        self._counts[first : first + len(counts)] = counts

    def without(self, sizes: ArrayLike) -> MagnitudeHistogram:
        """Return the histogram with some of the magnitudes counted as zeros."""
        removed = MagnitudeHistogram()
        removed.update(np.asarray(sizes, np.float64))
        remaining = MagnitudeHistogram()
        remaining._counts = self._counts - removed._counts
        remaining._zeros = self._zeros + int(removed._counts.sum())
        return remaining

    def result(self) -> Histogram:
        """Return the record."""
        filled = np.flatnonzero(self._counts[:-1])
        first, last = (int(filled[0]), int(filled[-1])) if filled.size else (0, -1)
        return Histogram(
            zeros=self._zeros,
            first=first + PER_OCTAVE * _MIN_EXPONENT if filled.size else 0,
            counts=tuple(self._counts[first : last + 1].tolist()),
            nonfinite=int(self._counts[-1]),
        )


KEPT = 8
"""Number of worst samples of an output."""


def worse(left: float, right: float) -> float:
    """Return the larger number; NaN if either is NaN, so that NaN is never hidden."""
    return math.nan if math.isnan(left) or math.isnan(right) else max(left, right)


@dataclass(frozen=True, slots=True)
class WorstValue:
    """The worst number of a stream and its sample; the first one of equal numbers.

    merge is associative and commutative.
    """

    value: float = 0.0
    sample: int | None = None

    @classmethod
    def from_values(cls, values: NDArray[np.float64], *, start: int) -> WorstValue:
        """Worst of values, shape (rows > 0,), whose first belongs to sample `start`."""
        index = int(values.argmax())  # the first NaN, if there is one
        return cls(float(values[index]), start + index)

    def merge(self, other: WorstValue) -> WorstValue:
        """Return the worse of the two."""
        return max(self, other, key=WorstValue._badness)

    def _badness(self) -> tuple[bool, bool, float, int]:
        is_set, nan = self.sample is not None, math.isnan(self.value)
        return (is_set, nan, 0.0 if nan else self.value, -(self.sample or 0))
