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

# Both files are run on the same samples in one process, or their evidence is compared. Fields
# `champion_…` are about the serving version, the others about the new file.


IncumbentState = Literal["compared", "first", "unvouched", "unrecorded", "incomparable"]
"""`first`: no version serves; `unvouched`: the ledger has no entry that the champion passed;
`unrecorded`: the champion has no evidence; `incomparable`: it can't run on these samples."""


class ChampionAnswers(Record):
    """The comparison of one classification output of both files."""

    name: str
    samples: Count
    """Number of samples, without those with NaN in the same places on both sides."""
    disagreements: Count | None
    """Number of samples that the files classify differently. None: the files were not run."""
    champion_accuracy: Measured | None = None
    """Top-1 accuracy. None without labels."""
    accuracy: Measured | None = None

    @property
    def agreement(self) -> float | None:
        """Return the share of equal answers; NaN without samples, None if not compared."""
        if self.disagreements is None:
            return None
        return 1.0 - self.disagreements / self.samples if self.samples else math.nan

    @property
    def accuracy_drop(self) -> float | None:
        """Return `champion_accuracy` - `accuracy`; None without labels, NaN for invalid shares."""
        if self.champion_accuracy is None or self.accuracy is None:
            return None
        accuracies = (self.champion_accuracy, self.accuracy)
        if not all(0.0 <= share <= 1.0 for share in accuracies):
            return math.nan
        return self.champion_accuracy - self.accuracy


class ChampionComparison(Record):
    """A comparison of the new file with the serving version, on the same samples."""

    state: IncumbentState
    absent: str | None = None
    """Why nothing was compared; None if the files were compared."""
    version: str | None = None
    """Number of the champion in the registry."""
    sha256: Sha256 | None = None
    """Digest of the champion's file in the ledger."""
    evidence_sha256: Sha256 | None = None
    """Digest of the champion's evidence in the ledger."""
    subject_sha256: Sha256
    """Digest of the new file."""
    data_sha256: Sha256
    """Digest of the samples."""
    samples: Count = 0
    outputs: tuple[ChampionAnswers, ...] = ()
    champion_latency: Latency | None = None
    """Latency of alternating batches of both files, on the CPU with optimizations."""
    latency: Latency | None = None
    metrics: tuple[ChampionMetric, ...] = added_field(())
    """Metrics of the policy that are bounded against the champion."""
    champion_noise_ratio: Measured | None = None
    """Noise ratio in the champion's own evidence, on its own data."""
    noise_ratio: Measured | None = None

    @property
    def is_same_file(self) -> bool:
        """Return whether the new file is the champion's file."""
        return self.sha256 == self.subject_sha256

    @property
    def latency_ratio(self) -> float | None:
        """Return the ratio of median batch times, new to old; None if not measured, NaN if
        invalid."""
        if self.latency is None or self.champion_latency is None:
            return None
        return self.latency.ratio_to(self.champion_latency)

    def answers(self, output: str) -> ChampionAnswers | None:
        """Return the answers of an output by its name, or None."""
        return next((answers for answers in self.outputs if answers.name == output), None)


# The trend is for display, because registries do not plot numbers across versions. No decision uses
# it.


MAX_ROWS = 20

_SERVED_AS = ("ort-cpu-optimized", "ort-cpu")


class TrendRow(Record):
    """Numbers from the evidence of one release. None: not measured."""

    sha256: Sha256
    measured_at: str
    noise_ratio: Measured | None = None
    """Largest noise ratio of the outputs."""
    agreement: Measured | None = None
    """Top-1 agreement of the file with its model."""
    accuracy: Measured | None = None
    metrics: dict[str, MetricValue] = added_field({})
    """Metrics of the policy on all samples, by name."""
    latency_ms: Measured | None = None
    """Median latency of a batch, which depends on machine and batch size."""

    @classmethod
    def from_evidence(cls, evidence: Evidence) -> TrendRow:
        """Create the row from optimized ONNX Runtime on the CPU, or else the first runtime."""
        measured = {each.runtime: each for each in evidence.runtimes if each.measured}
        preferred = next((measured[name] for name in _SERVED_AS if name in measured), None)
        runtime = preferred or next(iter(measured.values()), None)
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
    """Rows of releases, the oldest first."""

    schema_version: Literal[1] = 1
    rows: Annotated[tuple[TrendRow, ...], Field(max_length=MAX_ROWS)] = ()

    def followed_by(self, evidence: Evidence) -> Trend:
        """Return the trend with this release added or replaced; the oldest rows are dropped."""
        earlier = [row for row in self.rows if row.sha256 != evidence.subject.sha256]
        return Trend(rows=tuple([*earlier, TrendRow.from_evidence(evidence)][-MAX_ROWS:]))


def _task_metrics(
    evidence: Evidence, runtime: RuntimeEvidence | None
) -> Iterator[tuple[str, MetricValue]]:
    for metric in evidence.metrics:
        for group in metric.groups[:1]:
            side = group.runtimes.get(runtime.runtime) if runtime else None
            if side is not None:
                yield metric.name, MetricValue(value=side.value, low=side.low, high=side.high)


def _least(values: Iterable[float]) -> float | None:
    """Return the smallest value; NaN counts as smallest."""
    worst = largest(-value for value in values)
    return None if worst is None else -worst
