"""Lines of the model's tensors, found again by the sum of their bits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gate.parity.graph.pool import Stored, Values


class Matrix(NamedTuple):
    """A tensor of the model as lines."""

    stored: Stored
    lines: Values


class LineIndex(NamedTuple):
    """All lines of one length, one tensor behind the other, to find them by the sums of bits."""

    matrices: list[Matrix]
    starts: NDArray[np.int64]
    """Number of the first line of each tensor."""
    sums: NDArray[np.uint64]
    order: NDArray[np.int64]
    """That sorts the sums."""

    @classmethod
    def of(cls, matrices: list[Matrix]) -> LineIndex:
        """Over these tensors."""
        sums = [_sums(one.lines) for one in matrices] or [np.zeros(0, np.uint64)]
        everything = np.concatenate(sums)
        starts = np.cumsum([0, *(len(one) for one in sums)])
        return cls(matrices, starts, everything, np.argsort(everything, kind="stable"))

    def find(self, matrix: Values) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The number of a line like each of these, and whether there is one."""
        mine = _sums(matrix)
        at = np.searchsorted(self.sums, mine, sorter=self.order)
        place = self.order[np.minimum(at, len(self.order) - 1)]
        hit: NDArray[np.bool_] = self.sums[place] == mine
        return place, hit


def _sums(matrix: Values) -> NDArray[np.uint64]:
    """The sum of the bits of every line."""
    words = np.ascontiguousarray(matrix).view(np.uint32)
    sums: NDArray[np.uint64] = words.sum(axis=1, dtype=np.uint64)
    return sums
