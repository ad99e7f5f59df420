"""Wall-clock time of the batches of one runtime."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from gate.records.cost import Latency

KEPT = 4096
"""Batches whose times are kept: the latest, so that memory does not grow with the samples."""


class Stopwatch:
    """Collects seconds a batch. The first batch warms up, and counts only if it is alone.

    A last batch that is not full is left out, because it would mix two batch sizes.
    """

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._rest: deque[float] = deque(maxlen=KEPT)

    @property
    def is_running(self) -> bool:
        """Whether a batch was timed."""
        return self._first is not None

    @property
    def is_cold(self) -> bool:
        """Whether the only full batch was the first one, which warms up."""
        return self.is_running and not self._rest

    def add(self, seconds: float, *, batch_size: int) -> None:
        """Add one batch."""
        if self._first is None:
            self._first = (seconds, batch_size)
        elif batch_size == self._first[1]:
            self._rest.append(seconds)

    def drain(self) -> tuple[float, ...]:
        """The seconds that were collected since the last time, without the first batch's."""
        taken = tuple(self._rest)
        self._rest.clear()
        return taken

    def extend(self, seconds: Sequence[float]) -> None:
        """Take what another one drained, of batches of the same size."""
        self._rest.extend(seconds)

    def result(self) -> Latency | None:
        """Median and 95th percentile in milliseconds; None if nothing was timed."""
        if self._first is None:
            return None
        seconds, batch_size = self._first
        milliseconds = 1000.0 * np.array(self._rest or [seconds])
        return Latency(
            batch_size=batch_size,
            batches=len(milliseconds),
            median_ms=float(np.median(milliseconds)),
            p95_ms=float(np.percentile(milliseconds, 95)),
            cold=self.is_cold,
        )
