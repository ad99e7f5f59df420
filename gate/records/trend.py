"""The trend: the numbers of the versions before, which each release takes along.

A registry shows no number across versions. It is there to be looked at: nothing is decided by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from gate.records.evidence import Evidence, RuntimeEvidence
from gate.storage.record import Measured, Record, Sha256

MOST_ROWS = 20
_SERVED_AS = ("ort-cpu-optimized", "ort-cpu")


class TrendRow(Record):
    """One release, by the evidence on it. None: not measured."""

    sha256: Sha256
    measured_at: str
    noise_ratio: Measured | None = None
    """The worst of its outputs."""
    agreement: Measured | None = None
    """Top-1, of the file with its own model."""
    accuracy: Measured | None = None
    latency_ms: Measured | None = None
    """Median of a batch. Another machine, or another batch, has another one."""

    @classmethod
    def of(cls, evidence: Evidence) -> TrendRow:
        """By the runtime that serves: ONNX Runtime on the CPU, optimised; else the first one."""
        runtime = _runtime(evidence)
        outputs = () if runtime is None else runtime.outputs
        classes = [output.classification for output in outputs if output.classification]
        return cls(
            sha256=evidence.subject.sha256,
            measured_at=evidence.measured_at,
            noise_ratio=_worst(output.noise.ratio for output in outputs if output.noise),
            agreement=_least(each.top1_agreement for each in classes),
            accuracy=_least(each.accuracy.candidate for each in classes if each.accuracy),
            latency_ms=runtime.latency.median_ms if runtime and runtime.latency else None,
        )


class Trend(Record):
    """Releases, the oldest first."""

    schema_version: Literal[1] = 1
    rows: Annotated[tuple[TrendRow, ...], Field(max_length=MOST_ROWS)] = ()

    def followed_by(self, evidence: Evidence) -> Trend:
        """With one more release, which is there once; the oldest ones go."""
        others = [row for row in self.rows if row.sha256 != evidence.subject.sha256]
        return Trend(rows=tuple([*others, TrendRow.of(evidence)][-MOST_ROWS:]))


def _runtime(evidence: Evidence) -> RuntimeEvidence | None:
    measured = {runtime.runtime: runtime for runtime in evidence.runtimes if runtime.measured}
    preferred = next((measured[name] for name in _SERVED_AS if name in measured), None)
    return preferred or next(iter(measured.values()), None)


def _worst(values: Iterable[float]) -> float | None:
    """The largest, where NaN is larger than all."""
    numbers = list(values)
    return math.nan if any(map(math.isnan, numbers)) else max(numbers, default=None)


def _least(values: Iterable[float]) -> float | None:
    """The smallest, where NaN is smaller than all."""
    worst = _worst(-value for value in values)
    return None if worst is None else -worst
