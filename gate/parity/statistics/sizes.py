"""Sizes of differences as counts in bins of equal ratio: `gate.records.samples.Histogram`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gate.records.samples import EDGES, PER_OCTAVE, Histogram

Floats = NDArray[np.float64]

_LEAST = -1022
"""Exponent of the smallest normal float64; smaller numbers count as it does."""
_OCTAVES = 1024 - _LEAST
_BINS = PER_OCTAVE * _OCTAVES
_MANTISSA = 5
"""Leading bits of the mantissa that decide a bin."""
_CHUNK = 1 << 15
"""Elements at a time, so that what is made of them stays in the cache."""


def _bins() -> NDArray[np.intp]:
    """The bin of each value of the leading bits of a float64, sign, exponent and mantissa; the
    last bin is for NaN and infinity."""
    step = 1 << _MANTISSA
    leading = np.arange(1 << (12 + _MANTISSA))
    exponent = leading // step % 2048 - 1023
    parts = np.searchsorted(EDGES, 1.0 + leading % step / step, side="right") - 1
    bins = PER_OCTAVE * (exponent - _LEAST) + parts
    bins = np.where(exponent < _LEAST, 0, bins)
    return np.where(exponent == 1024, _BINS, bins).astype(np.intp)


_BIN_OF = _bins()


class SizeHistogram:
    """Counts sizes by the leading bits of their float64: exact, whatever the order.

    merge is associative and commutative; update(a + b) == update(a).merge(update(b)).
    """

    def __init__(self) -> None:
        self._zeros = 0
        self._counts = np.zeros(_BINS + 1, np.int64)

    def update(self, sizes: Floats) -> None:
        """Add absolute values, of any shape; NaN and infinity are counted apart."""
        flat = np.ascontiguousarray(sizes).reshape(-1)
        zeros = flat.size - int(np.count_nonzero(flat))
        bits = flat.view(np.uint64)
        for start in range(0, flat.size, _CHUNK):
            leading = (bits[start : start + _CHUNK] >> np.uint64(52 - _MANTISSA)).view(np.int64)
            self._counts += np.bincount(_BIN_OF[leading], minlength=_BINS + 1)
        self._zeros += zeros
        self._counts[0] -= zeros

    def merge(self, other: SizeHistogram) -> SizeHistogram:
        """Of both streams."""
        merged = SizeHistogram()
        merged._zeros = self._zeros + other._zeros
        merged._counts = self._counts + other._counts
        return merged

    def __getstate__(self) -> dict[str, object]:
        """The bins between the first and the last that are filled: most are empty."""
        filled = np.flatnonzero(self._counts)
        first = int(filled[0]) if filled.size else 0
        last = int(filled[-1]) + 1 if filled.size else 0
        return {"zeros": self._zeros, "first": first, "counts": self._counts[first:last]}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._zeros, first, counts = state["zeros"], state["first"], state["counts"]
        self._counts = np.zeros(_BINS + 1, np.int64)
        self._counts[first : first + len(counts)] = counts

    def without(self, sizes: ArrayLike) -> SizeHistogram:
        """The same with these of the sizes as zeros."""
        moved = SizeHistogram()
        moved.update(np.asarray(sizes, np.float64))
        less = SizeHistogram()
        less._counts = self._counts - moved._counts
        less._zeros = self._zeros + int(moved._counts.sum())
        return less

    def result(self) -> Histogram:
        """The record."""
        filled = np.flatnonzero(self._counts[:-1])
        first, last = (int(filled[0]), int(filled[-1])) if filled.size else (0, -1)
        return Histogram(
            zeros=self._zeros,
            first=first + PER_OCTAVE * _LEAST if filled.size else 0,
            counts=tuple(self._counts[first : last + 1].tolist()),
            nonfinite=int(self._counts[-1]),
        )
