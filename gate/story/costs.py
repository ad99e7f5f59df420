"""The table of costs: time and memory of each runtime, PyTorch first. Every surface prints it."""

from __future__ import annotations

from collections.abc import Iterator

from gate.decision.rules.costs import largest_ratio, latency_ratios
from gate.records.cost import Cost, Latency
from gate.records.evidence import Evidence
from gate.storage.record import Count, Measured, Record
from gate.story.wording import printable

COST_HEADINGS = (
    "runtime", "open", "first run", "one sample", "batch", "of PyTorch", "memory", "peak"
)  # fmt: skip
REFERENCE = "PyTorch, CPU"
_MB = 1e6


class CostRow(Record):
    """Of one runtime. None: not measured."""

    runtime: str
    open_ms: Measured | None = None
    first_ms: Measured | None = None
    single: Latency | None = None
    batch: Latency | None = None
    latency_ratio: Measured | None = None
    """Of the median times, by PyTorch's; of two batch sizes the larger one."""
    memory_bytes: Count | None = None
    """Growth at its peak, of a browser at the end."""
    peak_bytes: Count | None = None
    """Of its whole process."""
    cuda_bytes: Count | None = None

    def cells(self) -> tuple[str, ...]:
        """Below `COST_HEADINGS`; times as median / 95th percentile."""
        ratio = self.latency_ratio
        cuda = "" if self.cuda_bytes is None else f", CUDA {_memory(self.cuda_bytes)}"
        return (
            self.runtime,
            _time(self.open_ms),
            _time(self.first_ms),
            _both(self.single),
            _both(self.batch) + (f" ({self.batch.batch_size})" if self.batch else ""),
            "" if ratio is None else f"{ratio:.2g} ×",
            _memory(self.memory_bytes) + cuda,
            _memory(self.peak_bytes),
        )


def costs_of(evidence: Evidence) -> tuple[CostRow, ...]:
    """One row for each runtime that ran; none where nothing but batches was timed."""
    if not any(runtime.cost for runtime in evidence.runtimes):
        return ()
    return tuple(_rows(evidence))


def _rows(evidence: Evidence) -> Iterator[CostRow]:
    if evidence.reference_cost is not None:
        yield _row(REFERENCE, evidence.reference_cost, evidence.reference_latency)
    for runtime in evidence.runtimes:
        if runtime.measured and runtime.cost is not None:
            row = _row(printable(runtime.runtime), runtime.cost, runtime.latency)
            ratio = largest_ratio(latency_ratios(evidence, runtime)[0])
            yield row.model_copy(
                update={"latency_ratio": ratio, "memory_bytes": runtime.memory_bytes}
            )


def _row(name: str, cost: Cost, batch: Latency | None) -> CostRow:
    return CostRow(
        runtime=name,
        open_ms=cost.open_ms,
        first_ms=cost.first_ms,
        single=cost.single,
        batch=batch,
        peak_bytes=cost.peak_bytes,
        cuda_bytes=cost.cuda_bytes,
    )


def _time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return ""
    return f"{milliseconds:.3g} ms" if abs(milliseconds) < 999.5 else f"{milliseconds / 1e3:.3g} s"


def _both(latency: Latency | None) -> str:
    """In one unit, that of the larger."""
    if latency is None:
        return ""
    median, p95 = latency.median_ms, latency.p95_ms
    if max(median, p95) < 999.5:
        return f"{median:.3g} / {p95:.3g} ms"
    return f"{median / 1e3:.3g} / {p95 / 1e3:.3g} s"


def _memory(size: int | None) -> str:
    if size is None:
        return ""
    return f"{size / _MB:.3g} MB" if size < 999.5 * _MB else f"{size / _MB / 1e3:.3g} GB"
