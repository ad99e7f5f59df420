"""A second reading is compared with the first: what a shuffled or changing source gives is noticed.

Of each sample a short digest is kept, in a file without a name, so that memory does not grow.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from gate.errors import StorageError
from gate.parity.arrays.rows import Array, Block, SourceRows
from gate.parity.arrays.shards import forget_pages
from gate.parity.arrays.stamp import changed

_DIGEST_BYTES = 8
"""Enough to notice chance, and no proof against somebody who wants to deceive himself."""


class RepeatedRows(SourceRows):
    """Another source, of which each place gives the same sample each time, or a DataError."""

    repeated = True

    def __init__(self, rows: SourceRows) -> None:
        """Raises StorageError where short digests find no room."""
        self.origin, self.specs, self.labelled = rows.origin, rows.specs, rows.labelled
        self._rows = rows
        count = len(rows)
        try:
            with tempfile.TemporaryFile() as file:
                shape = (2 if self.labelled else 1, count)
                self._kept: Array = np.memmap(file, np.uint64, mode="w+", shape=shape)
        except OSError as error:
            raise StorageError(
                f"no room for short digests of {count} samples: {error.strerror or error}. Free "
                "space, or set TMPDIR."
            ) from error

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._rows)

    def read(self, places: Sequence[int]) -> Block:
        """The samples at these places."""
        return self._compared(self._rows.read(places), places)

    def batches(self, places: range, size: int) -> Iterator[Block]:
        """The samples of a range by `size`."""
        start = 0
        for block in self._rows.batches(places, size):
            count = len(block.arrays[self.names[0]])
            yield self._compared(block, places[start : start + count])
            start += count

    def labels(self, places: range) -> NDArray[np.int64] | None:
        """Class indices of a range; nothing is read anew where all were read before."""
        if not self.labelled:
            return None
        span = slice(places.start, places.stop)
        if not np.all(self._kept[0, span]):
            for _ in self.batches(places, self.chunk):
                pass
        return np.array(self._kept[1, span]).astype(np.int64)

    def _compared(self, block: Block, places: Sequence[int]) -> Block:
        for row, place in enumerate(places):
            made = _short_digest(block, row, self.names)
            before = self._kept[0, place]
            if before and before != made:
                raise changed(
                    f"sample {place} of {self.origin} is another one than when it was read before: "
                    "the data set shuffles, augments or changes"
                )
            self._kept[0, place] = made
            if block.labels is not None:
                self._kept[1, place] = block.labels[row]
        forget_pages(self._kept)
        return block


def _short_digest(block: Block, row: int, names: Sequence[str]) -> np.uint64:
    """Never 0, which is none."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in names:
        digest.update(np.ascontiguousarray(block.arrays[name][row]).reshape(-1).view(np.uint8).data)
    if block.labels is not None:
        digest.update(block.labels[row].tobytes())
    return np.uint64(int.from_bytes(digest.digest(), "little") or 1)
