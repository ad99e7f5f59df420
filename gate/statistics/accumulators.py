"""Count, mean and variance of a stream of numbers, of all or of each element, mergeable; and
whether its rows vary at all.

The scale of an output is its standard deviation without what is the same in every sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gate.parity.statistics.tally import Floats

Array = NDArray[np.generic]

MOST = 1 << 20
"""Elements of a sample that are followed one by one; larger samples are taken as they are."""


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
    def of(cls, values: NDArray[np.float64]) -> Moments:
        """Moments of finite values of any shape; equal values have deviations of exactly 0."""
        if values.size == 0:
            return cls()
        shifted = values.reshape(-1) - values.flat[0]
        mean = float(shifted.mean())
        deviations = float(np.square(shifted - mean).sum())
        return cls(values.size, float(values.flat[0]) + mean, deviations)

    def merge(self, other: Moments) -> Moments:
        """Moments of both sets of values together."""
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
        """Population standard deviation; NaN without values."""
        return math.sqrt(self.deviations / self.count) if self.count else math.nan


class ElementMoments:
    """Mean and variance of each element of a sample, and whether it ever differed.

    An element that is constant over the samples and equal on both sides, such as a mask of -1e9, is
    no part of the scale. merge is associative and commutative up to rounding (Chan, Golub, LeVeque
    1979), as that of Moments.
    """

    def __init__(self) -> None:
        self._counts: Floats | None = None
        self._means = self._deviations = np.zeros(0)
        self._unequal: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._whole = Moments()
        self._followed = True

    def update(self, reference: Floats, unequal: NDArray[np.bool_]) -> None:
        """Add rows, shape (samples, elements), and where the two sides differ."""
        finite = np.isfinite(reference)
        self._whole = self._whole.merge(Moments.of(reference[finite]))
        if not self._followed or not reference.size:
            return
        if reference.shape[1] > MOST or (
            self._counts is not None and len(self._counts) != reference.shape[1]
        ):
            self._followed = False
            return
        part = ElementMoments()
        values = np.where(finite, reference, 0.0)
        part._counts = finite.sum(axis=0).astype(np.float64)
        # From the first row on, so that equal values have a variance of exactly 0.
        shifted = np.where(finite, values - values[0], 0.0)
        means = shifted.sum(axis=0) / np.maximum(part._counts, 1.0)
        part._deviations = np.square(np.where(finite, shifted - means, 0.0)).sum(axis=0)
        part._means = values[0] + means
        # What is finite in some samples only is no constant either.
        part._unequal = np.asarray(unequal.any(axis=0) | (finite.any(axis=0) & ~finite.all(axis=0)))
        self._add(part)

    def merge(self, other: ElementMoments) -> ElementMoments:
        """Of both streams."""
        merged = ElementMoments()
        merged._followed = self._followed and other._followed
        merged._add(self)
        merged._add(other)
        merged._whole = self._whole.merge(other._whole)
        return merged

    @property
    def std(self) -> float:
        """Population standard deviation over all samples of the elements that vary, or of which the
        sides differ; of all where none varies. NaN without finite values."""
        if not self._followed or self._counts is None or not (self._deviations != 0.0).any():
            return self._whole.std
        kept = ((self._deviations != 0.0) | self._unequal) & (self._counts > 0.0)
        counts, means = self._counts[kept], self._means[kept]
        centre = float((counts * means).sum() / counts.sum())
        between = float((counts * np.square(means - centre)).sum())
        total = between + float(self._deviations[kept].sum())
        return float(np.sqrt(total / counts.sum()))

    @property
    def count(self) -> int:
        """Finite values."""
        return self._whole.count

    def _add(self, part: ElementMoments) -> None:
        if part._counts is None:
            return
        if self._counts is None:
            self._counts, self._means = part._counts, part._means
            self._deviations, self._unequal = part._deviations, part._unequal
            return
        if len(self._counts) != len(part._counts):
            self._followed = False
            return
        once = (self._counts > 0) != (part._counts > 0)
        counts = self._counts + part._counts
        share = part._counts / np.maximum(counts, 1.0)
        step = np.where((self._counts > 0) & (part._counts > 0), part._means - self._means, 0.0)
        start = np.where(self._counts > 0, self._means, part._means)
        self._means = start + step * share
        self._deviations = self._deviations + part._deviations + step * step * self._counts * share
        self._counts, self._unequal = counts, self._unequal | part._unequal | once


@dataclass(frozen=True, eq=False)
class Variation:
    """Whether the reference rows differ from each other; the first row stands for all."""

    rows: int = 0
    first: Array | None = None
    same: bool = True

    @classmethod
    def of(cls, rows: Array) -> Variation:
        """Of an array, shape (rows > 0, elements)."""
        same = len(rows) == 1 or _equal(rows, rows[:1])
        return cls(len(rows), rows[0].copy(), same)

    def merge(self, other: Variation) -> Variation:
        """Of both streams."""
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
        """True if all rows are equal. One row for several samples must vary within itself."""
        if self.first is None or not self.same:
            return self.first is None
        return self.rows > 1 or samples == 1 or _equal(self.first, self.first[:1])


def _equal(left: Array, right: Array) -> bool:
    """Equal element by element, `right` broadcast; NaN equals NaN."""
    both_nan = (left != left) & (right != right)  # noqa: PLR0124  (NaN is not itself)
    return bool(((left == right) | both_nan).all())
