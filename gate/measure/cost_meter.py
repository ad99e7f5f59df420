"""Measure latency and memory."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from gate.records.evidence import Cost, Latency
from gate.runtimes.peak_memory import PeakMemory
from gate.runtimes.runtime import Proof, Session, count_of, seconds_of

# Allocators do not release memory, so a query after each step finds the peak. The device reports
# the memory used by all processes together.


class DeviceMemory:
    """The growth of used memory on the first CUDA device since this object was created."""

    def __init__(self) -> None:
        self._before = _used()
        self.grown: int | None = None
        """In bytes; None without a device, or if it can't be queried."""

    def update(self) -> None:
        """Query the used memory after a step."""
        now = _used()
        if self._before is None or now is None:
            self._before = self.grown = None
        else:
            self.grown = max(self.grown or 0, now - self._before)


def _used() -> int | None:
    try:
        if not torch.cuda.is_available():
            return None
        free, total = torch.cuda.mem_get_info(0)
    except Exception:  # the device is full or gone, which the runtimes report themselves
        return None
    return int(total - free)


KEPT = 4096
"""Number of latest batches whose times are stored; this bounds the memory."""


class Stopwatch:
    """Collects seconds per batch.

    The first batch warms up and counts only if it is the only one. A smaller last batch is ignored,
    because it would mix two batch sizes.
    """

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._rest: deque[float] = deque(maxlen=KEPT)

    @property
    def is_running(self) -> bool:
        """Return whether a batch was timed."""
        return self._first is not None

    @property
    def is_cold(self) -> bool:
        """Return whether the only full batch was the first one, which warms up."""
        return self.is_running and not self._rest

    def add(self, seconds: float, *, batch_size: int) -> None:
        """Add one batch."""
        if self._first is None:
            self._first = (seconds, batch_size)
        elif batch_size == self._first[1]:
            self._rest.append(seconds)

    def drain(self) -> tuple[float, ...]:
        """Return and remove the collected seconds, without those of the first batch."""
        seconds = tuple(self._rest)
        self._rest.clear()
        return seconds

    def extend(self, seconds: Sequence[float]) -> None:
        """Add the seconds that another stopwatch drained, for batches of the same size."""
        self._rest.extend(seconds)

    def result(self) -> Latency | None:
        """Return median and 95th percentile in milliseconds; None if nothing was timed."""
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


class CostMeter:
    """The times and memory of one runtime, or the times of the reference.

    Times are in seconds, measured by the process that ran the batch.
    """

    def __init__(self) -> None:
        self.single_unmeasured: str | None = None
        """The reason why batches of one sample are not timed, if any."""
        self._memory = PeakMemory()
        self._device: DeviceMemory | None = None
        self._open_seconds: float | None = None
        self._first: tuple[float, int] | None = None
        """Seconds and batch size of the very first run."""
        self.batches = Stopwatch()
        """Times of the batches of the samples."""
        self.singles = Stopwatch()
        """Times of batches of one sample, which are not batches of the measurement."""

    def open(self, opened: Callable[[], Session], *, cuda: bool) -> Session:
        """Call `opened`, which may raise any exception, and return its session. `cuda`: also
        measure device memory."""
        if cuda:
            self._device = DeviceMemory()
        start = time.perf_counter()
        with self.watched():
            session = opened()
        reported = seconds_of(session.open_seconds)
        self._open_seconds = time.perf_counter() - start if reported is None else reported
        return session

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Measure memory until the end of the first batch of samples, unless the block fails.

        Later batches reuse this memory.
        """
        if self.batches.is_running:
            yield
            return
        with self._memory.watched():
            yield
        if self._device is not None:
            self._device.update()

    def first(self, seconds: float, *, batch_size: int) -> None:
        """Record the very first run."""
        self._first = (seconds, batch_size)

    def memory_bytes(self, proof: Proof) -> int | None:
        """Return the growth of memory in bytes, as reported by a runtime in another process."""
        return count_of(proof.memory_bytes) if _is_reported(proof) else self._memory.grown

    def cost(self, proof: Proof | None = None) -> Cost:
        """Return the record of times and memory. `proof`: of a runtime; None for the reference."""
        single = self.singles.result()
        batches = self.batches.result()
        if batches is not None and batches.batch_size == 1:
            single = batches
        reported = proof is not None and _is_reported(proof)
        first_seconds, first_batch_size = self._first or (None, None)
        return Cost(
            open_ms=_milliseconds(self._open_seconds),
            first_ms=_milliseconds(first_seconds),
            first_batch_size=first_batch_size,
            single=single,
            single_unmeasured=self.single_unmeasured,
            peak_bytes=count_of(proof.peak_bytes) if proof and reported else self._memory.peak,
            cuda_bytes=None if self._device is None else self._device.grown,
        )


def _is_reported(proof: Proof) -> bool:
    return proof.own_process or proof.memory_bytes is not None


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000.0 * seconds
