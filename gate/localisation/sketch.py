"""A few elements of a tensor, always the same ones for the same number of elements."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gate.parity.statistics.output import Array

ELEMENTS = 8192
"""Enough to see one channel of hundreds, few enough that hundreds of layers cost nothing."""


@lru_cache(maxsize=512)
def places(size: int) -> NDArray[np.int64]:
    """Sorted places of at most `ELEMENTS` of `size` elements.

    Random ones, because a fixed step could hit the same channels only.
    """
    if size <= ELEMENTS:
        return np.arange(size)
    return np.sort(np.random.default_rng(size).integers(0, size, ELEMENTS))


def sketch(array: Array) -> Array:
    """The elements of `array` at its places, shape (at most `ELEMENTS`,), as a copy."""
    picked: Array = array.reshape(-1)[places(array.size)]
    return picked
