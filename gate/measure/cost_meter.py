"""Measure latency and memory."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from gate.records.evidence import Cost, Latency
from gate.runtimes.peak_memory import PeakMemory
from gate.runtimes.runtime import Proof, Session, count_of, seconds_of

# Allocators keep their memory, so that a query after each step finds the peak. The device reports
# how much is used, not by which process: others count.


class DeviceMemory:
    """The growth of the used memory of the first CUDA device since this object was made.

    It is not measured without a device, nor where the device can't be queried.
    """

    def __init__(self) -> None:
        self._before = _used()
        self.grown: int | None = None
        """In bytes; None: there is no device, or it did not say."""

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
    except Exception:  # a device that is full, or gone: whether it computes, the outputs show
        return None
    return int(total - free)


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


class _Run(NamedTuple):
    seconds: float
    batch_size: int


class CostMeter:
    """The times and the memory of one runtime.

    All times are given in seconds, as measured by the process that ran it. The reference has a
    meter, too, of times alone.
    """

    def __init__(self) -> None:
        self.single_unmeasured: str | None = None
        """Why no batches of one sample are timed."""
        self._memory = PeakMemory()
        self._device: DeviceMemory | None = None
        self._open_seconds: float | None = None
        self._first: _Run | None = None
        self._batches, self._singles = Stopwatch(), Stopwatch()

    def open(self, opened: Callable[[], Session], *, cuda: bool) -> Session:
        """The session that `opened` gives, which may raise anything. `cuda`: it takes memory of
        such a device."""
        if cuda:
            self._device = DeviceMemory()
        start = time.perf_counter()
        with self.watched():
            session = opened()
        own = seconds_of(session.open_seconds)
        self._open_seconds = time.perf_counter() - start if own is None else own
        return session

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Count memory, up to the end of the first batch of the samples; later ones take what it
        left. What fails is not counted."""
        if self._batches.is_running:
            yield
            return
        self._memory.begin()
        yield
        self._memory.end()
        if self._device is not None:
            self._device.update()

    def first(self, seconds: float, *, batch_size: int) -> None:
        """The first run of all."""
        self._first = _Run(seconds, batch_size)

    def batch(self, seconds: float, *, batch_size: int) -> None:
        """A batch of the samples."""
        self._batches.add(seconds, batch_size=batch_size)

    def drain(self) -> tuple[float, ...]:
        """The times of batches since the last call, for a meter of another process."""
        return self._batches.drain()

    def add(self, seconds: Sequence[float]) -> None:
        """Take times of batches that another process drained."""
        self._batches.extend(seconds)

    def single(self, seconds: float) -> None:
        """Add the time of a batch of one sample, which is not one of the measurement's batches."""
        self._singles.add(seconds, batch_size=1)

    @property
    def is_cold(self) -> bool:
        """Whether no batch of the samples was timed but the first."""
        return self._batches.is_cold

    def latency(self) -> Latency | None:
        """Return the latency of the batches of the samples; None if there was none."""
        return self._batches.result()

    def memory_bytes(self, proof: Proof) -> int | None:
        """Return the growth of memory in bytes; a runtime in its own process reports its own."""
        return count_of(proof.memory_bytes) if _apart(proof) else self._memory.grown

    def cost(self, proof: Proof | None = None) -> Cost:
        """All else. `proof`: of a runtime, the reference has none."""
        single = self._singles.result()
        batches = self._batches.result()
        if batches is not None and batches.batch_size == 1:
            single = batches
        apart = proof is not None and _apart(proof)
        return Cost(
            open_ms=_milliseconds(self._open_seconds),
            first_ms=_milliseconds(self._first and self._first.seconds),
            first_batch_size=self._first and self._first.batch_size,
            single=single,
            single_unmeasured=self.single_unmeasured,
            peak_bytes=count_of(proof.peak_bytes) if proof and apart else self._memory.peak,
            cuda_bytes=None if self._device is None else self._device.grown,
        )


def _apart(proof: Proof) -> bool:
    return proof.own_process or proof.memory_bytes is not None


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000.0 * seconds
