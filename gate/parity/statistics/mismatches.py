"""Elements of integers and bools that differ, one by one, so that near-ties can be told apart."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gate.parity.statistics.worst import Worst

Array = NDArray[np.generic]

MOST = 100_000
"""Elements that are kept; where more differ, none of them is a near-tie."""


class Mismatches:
    """Accumulates the places where two outputs of integers or bools differ.

    merge is associative and commutative.
    """

    def __init__(self) -> None:
        self._kept: dict[int, dict[int, tuple[float, object]]] = {}
        """By sample, and by place in it: |c - r|, and what the candidate says."""
        self._count = 0
        self._excused: list[float] = []
        """|c - r| of each near-tie."""
        self._widths: set[int] = set()
        """Elements of a sample; of all pairs of a batch, more than one number."""
        self._overflown = False

    def update(
        self, diff: NDArray[np.float64], candidate: NDArray[np.generic], *, start: int
    ) -> None:
        """Add |c - r| and c, shape (samples, elements), whose first row is sample `start`."""
        self._widths.add(diff.shape[1])
        rows, columns = np.nonzero(diff)
        self._count += len(rows)
        if self._count > MOST:
            self._overflown = True
            return
        sizes, values = diff[rows, columns].tolist(), candidate[rows, columns].tolist()
        for row, column, size, value in zip(
            rows.tolist(), columns.tolist(), sizes, values, strict=True
        ):
            self._kept.setdefault(start + row, {})[column] = size, value

    def merge(self, other: Mismatches) -> Mismatches:
        """The elements of both streams."""
        merged = Mismatches()
        merged._kept = {
            s: dict(places) for s, places in (*self._kept.items(), *other._kept.items())
        }
        merged._count = self._count + other._count
        merged._excused = self._excused + other._excused
        merged._widths = self._widths | other._widths
        merged._overflown = self._overflown or other._overflown or merged._count > MOST
        if merged._overflown:
            merged._kept = {}
        return merged

    @property
    def doubtful(self) -> list[int]:
        """Samples that differ; none where too much differs to be ties."""
        return [] if self._overflown else sorted(self._kept)

    def look(self, sample: int, alternative: Array) -> None:
        """Excuse the elements of a sample of which the candidate says what `alternative` has there:
        the float64 truth, or what random rounding makes of it."""
        places = self._kept.get(sample, {})
        if not places or {alternative.size} != self._widths:
            return
        flat = alternative.reshape(-1)
        ties = [place for place, (_, value) in places.items() if flat[place].item() == value]
        self._excused += [places.pop(place)[0] for place in ties]
        if not places:
            del self._kept[sample]

    def unexplained(self, sample: int) -> int:
        """How many elements of a sample are not excused."""
        return len(self._kept.get(sample, ()))

    @property
    def excused(self) -> int:
        """Number of near-ties."""
        return len(self.excused_sizes)

    @property
    def excused_sizes(self) -> list[float]:
        """|c - r| of the near-ties."""
        return [] if self._overflown else self._excused

    @property
    def largest(self) -> dict[int, float]:
        """Of what is not excused: the largest |c - r| of each sample."""
        return {
            sample: max(size for size, _ in places.values())
            for sample, places in self._kept.items()
        }

    def remaining(self) -> tuple[Worst, float, tuple[float, float]]:
        """Of what is not excused: the worst |c - r|, the sum of all, and the sum and the largest of
        the Euclidean norms of the samples."""
        worst, total = Worst(0.0, 0), 0.0
        norms = []
        for sample, places in self._kept.items():
            sizes = [size for size, _ in places.values()]
            worst = worst.merge(Worst(max(sizes), sample))
            total += sum(sizes)
            norms.append(math.sqrt(sum(size * size for size in sizes)))
        return worst, total, (sum(norms), max(norms, default=0.0))
