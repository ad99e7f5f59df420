"""Elements of integers and bools that differ, one by one, so that near-ties can be told apart."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from gate.parity.worst import Worst

Array = NDArray[np.generic]

MOST = 10_000
"""Elements that are kept; where more differ, none of them is a near-tie."""


class Mismatches:
    """Accumulates the places where two outputs of integers or bools differ.

    merge is associative and commutative.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[float, object]] = {}
        """By sample and place in it: |c - r|, and what the candidate says."""
        self._excused: set[tuple[int, int]] = set()
        self._widths: set[int] = set()
        """Elements of a sample; of all pairs of a batch, more than one number."""
        self._overflown = False

    def update(
        self, diff: NDArray[np.float64], candidate: NDArray[np.generic], *, start: int
    ) -> None:
        """Add |c - r| and c, shape (samples, elements), whose first row is sample `start`."""
        self._widths.add(diff.shape[1])
        rows, columns = np.nonzero(diff)
        if len(self._kept) + len(rows) > MOST:
            self._overflown = True
            return
        sizes, values = diff[rows, columns].tolist(), candidate[rows, columns].tolist()
        places = zip((rows + start).tolist(), columns.tolist(), strict=True)
        self._kept.update(zip(places, zip(sizes, values, strict=True), strict=True))

    def merge(self, other: Mismatches) -> Mismatches:
        """The elements of both streams."""
        merged = Mismatches()
        merged._kept = {**self._kept, **other._kept}
        merged._excused = self._excused | other._excused
        merged._widths = self._widths | other._widths
        merged._overflown = self._overflown or other._overflown or len(merged._kept) > MOST
        return merged

    @property
    def doubtful(self) -> list[int]:
        """Samples that differ; none where too much differs to be ties."""
        return [] if self._overflown else sorted({sample for sample, _ in self._kept})

    def look(self, sample: int, alternatives: Collection[Array]) -> None:
        """Excuse the elements of a sample of which the candidate says what one of `alternatives`
        has there: the float64 truth, or what random rounding makes of it."""
        flat = [array.reshape(-1) for array in alternatives if {array.size} == self._widths]
        for row, place in self._kept:
            value = self._kept[row, place][1]
            if row == sample and any(other[place].item() == value for other in flat):
                self._excused.add((row, place))

    @property
    def excused(self) -> int:
        """Number of near-ties."""
        return 0 if self._overflown else len(self._excused)

    def remaining(self) -> tuple[Worst, float, tuple[float, float]]:
        """Of what is not excused: the worst |c - r|, the sum of all, and the sum and the largest of
        the Euclidean norms of the samples."""
        worst, total = Worst(0.0, 0), 0.0
        squares: dict[int, float] = {}
        for (sample, place), (size, _) in self._kept.items():
            if (sample, place) not in self._excused:
                worst = worst.merge(Worst(size, sample))
                total += size
                squares[sample] = squares.get(sample, 0.0) + size * size
        norms = [float(np.sqrt(square)) for square in squares.values()]
        return worst, total, (sum(norms), max(norms, default=0.0))
