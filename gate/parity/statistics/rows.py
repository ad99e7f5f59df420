"""Rows of floats as wholes: as vectors (embeddings), and as probabilities without a softmax."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gate.parity.statistics.worst import worse
from gate.records.output_parity import RowParity

Floats = NDArray[np.float64]

LARGEST = 2**16
"""Elements of the longest row that is looked at: an image is no vector."""

_EDGES = (0.01, 0.05, 0.10)


class RowStatistics:
    """Accumulates over float64 arrays of shape (rows, 2 to 65 536).

    merge is associative and commutative; update(a + b) == update(a).merge(update(b)). A row with
    NaN on both sides in the same places is left out, as in agreement.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._cosine = 0.0
        self._confidence = 0.0
        self._bands = np.zeros(4, np.int64)
        self._sum_diff = 0.0
        self._sum_error = 0.0

    def update(self, r: Floats, c: Floats) -> None:
        """Add a batch of both sides."""
        nan = np.isnan(r)
        alike = nan.any(axis=1) & (nan == np.isnan(c)).all(axis=1)
        if alike.any():
            r, c = r[~alike], c[~alike]
        if not len(r):
            return
        self._rows += len(r)
        with np.errstate(all="ignore"):
            moved = np.abs(c.max(axis=1) - r.max(axis=1))
            sums_r, sums_c = r.sum(axis=1), c.sum(axis=1)
            self._cosine = worse(self._cosine, float(_distances(r, c).max()))
            self._sum_diff = worse(self._sum_diff, float(np.abs(sums_c - sums_r).max()))
            self._sum_error = worse(self._sum_error, float(np.abs(sums_r - 1.0).max()))
        self._confidence = worse(self._confidence, float(moved.max()))
        first, second, third = _EDGES
        within = [int((moved < first).sum()), int((moved < second).sum()),
                  int((moved <= third).sum()), len(moved)]  # fmt: skip
        self._bands += np.diff(within, prepend=0)  # false for NaN, so NaN is in the last band

    def merge(self, other: RowStatistics) -> RowStatistics:
        """Statistics of both streams."""
        merged = RowStatistics()
        merged._rows = self._rows + other._rows
        merged._bands = self._bands + other._bands
        for field in ("_cosine", "_confidence", "_sum_diff", "_sum_error"):
            setattr(merged, field, worse(getattr(self, field), getattr(other, field)))
        return merged

    def result(self) -> RowParity | None:
        """The record; None without rows."""
        if not self._rows:
            return None
        below_1, to_5, to_10, over_10 = (float(count) / self._rows for count in self._bands)
        return RowParity(
            cosine_distance=self._cosine,
            confidence_diff=self._confidence,
            bands=(below_1, to_5, to_10, over_10),
            sum_diff=self._sum_diff,
            sum_error=self._sum_error,
        )


def _distances(r: Floats, c: Floats) -> Floats:
    """1 - cos of each pair of rows, in [0, 2]; 0 for two zero rows, 1 where one is zero.

    By half the squared distance of the unit vectors, which keeps its digits near 0.
    """
    units = [row / _lengths(row) for row in (r, c)]
    distances: Floats = np.square(units[0] - units[1]).sum(axis=1) / 2.0
    return np.where((r == 0).all(axis=1) != (c == 0).all(axis=1), 1.0, distances)


def _lengths(rows: Floats) -> Floats:
    """Euclidean, shape (rows, 1); 1 for zero rows."""
    largest = np.abs(rows).max(axis=1, keepdims=True)
    scale = np.where(largest > 0.0, largest, 1.0)
    lengths = scale * np.sqrt(np.square(rows / scale).sum(axis=1, keepdims=True))
    return np.where(lengths > 0.0, lengths, 1.0)
