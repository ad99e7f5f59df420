"""The worst number seen: NaN is worse than everything."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def worse(left: float, right: float) -> float:
    """The larger number; NaN if either is NaN, so that NaN is never hidden."""
    return math.nan if math.isnan(left) or math.isnan(right) else max(left, right)


@dataclass(frozen=True, slots=True)
class Worst:
    """The worst of the numbers of a stream, and its sample: of equals, the first.

    merge is associative and commutative.
    """

    value: float = math.nan
    sample: int | None = None

    @classmethod
    def of(cls, values: NDArray[np.float64], *, start: int) -> Worst:
        """Worst of values, shape (rows > 0,), whose first belongs to sample `start`."""
        index = int(values.argmax())  # the first NaN, if there is one
        return cls(float(values[index]), start + index)

    def merge(self, other: Worst) -> Worst:
        """The worse of the two."""
        return max(self, other, key=Worst._badness)

    def _badness(self) -> tuple[bool, bool, float, int]:
        found, nan = self.sample is not None, math.isnan(self.value)
        return (found, nan, 0.0 if nan else self.value, -(self.sample or 0))
