"""What it takes to open a file and to run it: time and memory, on one machine at one moment."""

from __future__ import annotations

from gate.storage.record import Count, Measured, Record, later


class Latency(Record):
    """Wall-clock milliseconds of one run of a batch, device transfers included."""

    batch_size: Count
    batches: Count
    median_ms: Measured
    p95_ms: Measured
    cold: bool = later(False)
    """The only batch was the first one, which pays for what later ones find ready. Records of
    before don't say it."""


class Cost(Record):
    """Of one runtime, or of the reference, under the threads of its environment. None: not
    measured."""

    open_ms: Measured | None = None
    """From the bytes of the file to a session that can run, without the import of the library. The
    reference has none: its factory builds it."""
    first_ms: Measured | None = None
    """The first run of the session, of `first_batch_size` samples."""
    first_batch_size: Count | None = None
    single: Latency | None = None
    """Batches of one sample, in turns with the reference."""
    single_unmeasured: str | None = None
    """Why there are none: the file has a fixed batch."""
    peak_bytes: Count | None = None
    """Largest resident memory of the process in which it ran, while it opened the file and computed
    its first batches; of a process of its own, all batches. What else is in that process counts:
    PyTorch, the samples, other runtimes."""
    cuda_bytes: Count | None = None
    """By how much the used memory of the first CUDA device grew meanwhile, whoever took it."""
