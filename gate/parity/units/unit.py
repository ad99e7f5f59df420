"""Units of work: fixed ranges of whole batches.

What a batch holds changes numbers in their last digits, and so does the order of sums. Both are
fixed here, by the number of samples, the batch size and the lead alone: whoever measures a unit, in
whatever order, gets the same numbers.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

MOST = 256
"""Units beside the lead, unless somebody asks for another number."""
_LEAST = 4
"""Batches of a unit, so that what one costs by itself is little."""


@dataclass(frozen=True)
class Unit:
    """Samples `start` to `stop`, whole batches but for the last one of all."""

    index: int
    start: int
    stop: int

    def __len__(self) -> int:
        """Number of samples."""
        return self.stop - self.start


def cut(samples: int, *, batch_size: int, lead: int, most: int = MOST) -> tuple[Unit, ...]:
    """The units of a data set, in order; together they are all samples.

    The first is the lead: the batches of the first `lead` samples, by whose noise floor the others
    are judged. `most`: units beside it.
    """
    first = min(math.ceil(lead / batch_size) * batch_size, samples)
    batches = math.ceil((samples - first) / batch_size)
    step = max(_LEAST, math.ceil(batches / most)) * batch_size
    edges = sorted({0, *range(first, samples, step), samples})
    return tuple(
        Unit(index, start, stop) for index, (start, stop) in enumerate(itertools.pairwise(edges))
    )
