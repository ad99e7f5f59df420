"""Count, mean and variance of a stream of numbers, mergeable."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
