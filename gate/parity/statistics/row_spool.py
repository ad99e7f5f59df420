"""Rows of a table, in a file without a name: memory does not grow with their number."""

from __future__ import annotations

import contextlib
import tempfile
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_HELD_BYTES = 1 << 20
"""Held in memory before there is a file: a check of some thousand samples needs none."""
_STEP = 1 << 13
"""Rows that are read back at a time."""


class _Run(NamedTuple):
    """Rows that were added together."""

    first: int
    """Index of the first."""
    offset: int
    """Bytes before it in the file."""
    length: int


class RowSpool:
    """Takes rows of several outputs and gives those of each back by their index, step by step.

    What comes back does not depend on the order of `add`, because the rows of one call are a range
    of samples by index, and no two ranges of an output overlap.

    A disk that is full, or a temporary folder that is not there, loses all rows and stops nothing:
    the table is no part of the evidence, most checks are asked for none, and hours of measuring
    must not end for it. `lost` says why, in the place of the rows; some of them without the others
    would look like all there are.
    """

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        """`dtype`: of a row, with a field `index`."""
        self.lost: str | None = None
        self._dtype = dtype
        self._runs: dict[str, list[_Run]] = {}
        self._end = 0
        self._file = tempfile.SpooledTemporaryFile(_HELD_BYTES)  # noqa: SIM115 - as long as this
        weakref.finalize(self, self._file.close)

    def __contains__(self, output: str) -> bool:
        """Whether rows of it were given."""
        return output in self._runs

    def add(self, output: str, rows: NDArray[np.void]) -> None:
        """Take rows, sorted by index."""
        if not len(rows):
            return
        runs = self._runs.setdefault(output, [])
        if self.lost is not None:
            return
        try:
            self._file.seek(self._end)
            self._file.write(rows.tobytes())
            self._file.flush()  # or a full disk is noticed when they are read
        except OSError as error:
            self._lose(error)
            return
        runs.append(_Run(int(rows["index"][0]), self._end, len(rows)))
        self._end += rows.nbytes

    def steps(self, output: str) -> Iterator[NDArray[np.void]]:
        """Its rows by index, some at a time, as own copies. Raises OSError."""
        for run in sorted(self._runs.get(output, ())):
            for start in range(0, run.length, _STEP):
                count = min(_STEP, run.length - start)
                self._file.seek(run.offset + start * self._dtype.itemsize)
                data = self._file.read(count * self._dtype.itemsize)
                yield np.frombuffer(data, self._dtype, count).copy()

    def _lose(self, error: OSError) -> None:
        self.lost = str(error.strerror or error)
        self._runs = {output: [] for output in self._runs}
        with contextlib.suppress(OSError):  # what could not be written is tried once more
            self._file.close()  # others need the room
