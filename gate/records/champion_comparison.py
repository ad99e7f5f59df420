"""Comparison with the champion; the trend over versions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Field

from gate.records.evidence import Evidence, Latency, RuntimeEvidence
from gate.records.metrics import ChampionMetric, MetricValue
from gate.records.outputs import largest
from gate.storage.record import Count, Measured, Record, Sha256, added_field

# Both files compute on the same samples in one process, or their evidence has what each computed
# on them; `champion_…` is of the version that serves, what has no such name is of the new file.


IncumbentState = Literal["compared", "first", "unvouched", "unrecorded", "incomparable"]
"""`first`: no version serves; `unvouched`: no line of the ledger says that the gate passed what
serves; `unrecorded`: it has no evidence; `incomparable`: it can't be run on these samples."""


class ChampionAnswers(Record):
    """One output of classes, of both files."""

    name: str
    samples: Count
    """Those without NaN in the same places on both sides."""
    disagreements: Count | None
    """Samples that the two put into different classes. None: the two were not run."""
    champion_accuracy: Measured | None = None
    """Top-1 on labels. None: there are none."""
    accuracy: Measured | None = None

    @property
    def agreement(self) -> float | None:
        """The share of samples with the same answer; NaN without samples; None: not compared."""
        if self.disagreements is None:
            return None
        return 1.0 - self.disagreements / self.samples if self.samples else math.nan

    @property
    def accuracy_drop(self) -> float | None:
        """`champion_accuracy` - `accuracy`; None without labels, NaN for what is no share."""
        if self.champion_accuracy is None or self.accuracy is None:
            return None
        both = (self.champion_accuracy, self.accuracy)
        if not all(0.0 <= share <= 1.0 for share in both):
            return math.nan
        return self.champion_accuracy - self.accuracy


class ChampionComparison(Record):
    """A comparison of the new file with the serving version, on the same samples."""

    state: IncumbentState
    absent: str | None = None
    """Why nothing was compared; None: it was."""
    version: str | None = None
    """Its number in the registry."""
    sha256: Sha256 | None = None
    """Of its file, by the ledger."""
    evidence_sha256: Sha256 | None = None
    """Of its evidence, by the ledger."""
    subject_sha256: Sha256
    """Of the new file."""
    data_sha256: Sha256
    """Of the samples."""
    samples: Count = 0
    outputs: tuple[ChampionAnswers, ...] = ()
    champion_latency: Latency | None = None
    """Batches of the two in turns, on the CPU, optimized as they are served."""
    latency: Latency | None = None
    metrics: tuple[ChampionMetric, ...] = added_field(())
    """Metrics of the policy that are bounded against the champion."""
    champion_noise_ratio: Measured | None = None
    """By its own evidence, on its own data."""
    noise_ratio: Measured | None = None

    @property
    def is_same_file(self) -> bool:
        """Return whether the new file is the one that serves."""
        return self.sha256 == self.subject_sha256

    @property
    def latency_ratio(self) -> float | None:
        """Median time of a batch, new by old; None: not timed, NaN for what is no time."""
        if self.latency is None or self.champion_latency is None:
            return None
        new, old = self.latency.median_ms, self.champion_latency.median_ms
        return new / old if new > 0.0 and 0.0 < old < math.inf else math.nan

    def answers(self, output: str) -> ChampionAnswers | None:
        """Return the answers of an output, by its name."""
        return next((answers for answers in self.outputs if answers.name == output), None)


# A registry shows no number across versions. It is there to be looked at: nothing is decided by it.


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
    metrics: dict[str, MetricValue] = added_field({})
    """Metrics of the policy on all samples, by name."""
    latency_ms: Measured | None = None
    """Median of a batch. Another machine, or another batch, has another one."""

    @classmethod
    def from_evidence(cls, evidence: Evidence) -> TrendRow:
        """Return the row of optimized ONNX Runtime on the CPU, which serves, else the first."""
        runtime = _runtime(evidence)
        outputs = () if runtime is None else runtime.outputs
        classes = [output.classification for output in outputs if output.classification]
        return cls(
            sha256=evidence.subject.sha256,
            measured_at=evidence.measured_at,
            noise_ratio=largest(output.noise.ratio for output in outputs if output.noise),
            agreement=_least(each.top1_agreement for each in classes),
            accuracy=_least(each.accuracy.candidate for each in classes if each.accuracy),
            metrics=dict(_task_metrics(evidence, runtime)),
            latency_ms=runtime.latency.median_ms if runtime and runtime.latency else None,
        )


class Trend(Record):
    """Releases, the oldest first."""

    schema_version: Literal[1] = 1
    rows: Annotated[tuple[TrendRow, ...], Field(max_length=MOST_ROWS)] = ()

    def followed_by(self, evidence: Evidence) -> Trend:
        """Return the trend with this release added or replaced; the oldest rows are dropped."""
        others = [row for row in self.rows if row.sha256 != evidence.subject.sha256]
        return Trend(rows=tuple([*others, TrendRow.from_evidence(evidence)][-MOST_ROWS:]))


def _task_metrics(
    evidence: Evidence, runtime: RuntimeEvidence | None
) -> Iterator[tuple[str, MetricValue]]:
    for metric in evidence.metrics:
        for group in metric.groups[:1]:
            side = group.runtimes.get(runtime.runtime) if runtime else None
            if side is not None:
                yield metric.name, MetricValue(value=side.value, low=side.low, high=side.high)


def _runtime(evidence: Evidence) -> RuntimeEvidence | None:
    measured = {runtime.runtime: runtime for runtime in evidence.runtimes if runtime.measured}
    preferred = next((measured[name] for name in _SERVED_AS if name in measured), None)
    return preferred or next(iter(measured.values()), None)


def _least(values: Iterable[float]) -> float | None:
    """The smallest, where NaN is smaller than all."""
    worst = largest(-value for value in values)
    return None if worst is None else -worst
