"""Measured metrics of the task: values with intervals, by slice and runtime."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gate.records.runtime import RuntimeName
from gate.storage.record import Count, Measured, Prose, Record, Sha256, added_field


class MetricValue(Record):
    """The value of a metric for one side on the samples of a group."""

    value: Measured
    low: Measured
    """One-sided lower confidence limit at the policy's confidence; NaN if undefined."""
    high: Measured
    """One-sided upper confidence limit."""


class MetricDrop(Record):
    """The drop of a metric from one side to another, on the samples of a group."""

    drop: Measured
    """Drop in units of the metric; positive means worse."""
    changed: Count | None
    """Number of samples whose state differs beyond rounding; None for different samples."""
    method: Literal["exact", "bca", "rule_of_three", "unpaired"]
    bounds: tuple[Measured, ...]
    """One-sided upper bounds of the drop at 1 - alpha / r for Holm's correction, r = 1, 2, ... up
    to the number of groups of this kind; a single bound for all samples."""
    scale: Measured
    """Largest possible drop of one sample, the unit of the rule of three."""


class MetricSide(MetricValue):
    """The metric of one runtime, and its drop from the reference."""

    change: MetricDrop


class SampleGroup(Record):
    """All samples, or the samples with one value in a column."""

    column: str | None = None
    label: Prose | None = None
    """Value in the column. None: all samples."""
    samples: Count

    @property
    def title(self) -> str | None:
        """Return the group as `camera=front`; None for all samples."""
        return None if self.column is None else f"{self.column}={self.label}"


class MetricGroup(SampleGroup):
    """The values of a metric on one group of samples."""

    reference: MetricValue
    runtimes: dict[RuntimeName, MetricSide] = Field(default_factory=dict)


class MetricEvidence(Record):
    """The measurement of one metric of the policy; `groups` is empty if there is a `failure`."""

    name: str
    definition_sha256: Sha256
    """Digest of the metric's definition (`gate.policy.metrics.MetricPolicy.definition`)."""
    source: dict[str, Sha256] = added_field({})
    """Source files of the function and its imports by module; empty for built-in metrics."""
    higher_is_better: bool
    failure: Prose | None = None
    """Why it was not measured: an exception with sample and line, NaN, a limit."""
    groups: tuple[MetricGroup, ...] = ()
    """Groups of samples; the first one contains all samples."""
    values_sha256: Sha256 | None = None
    """Digest of the metric's values for each sample in the report's `metrics.safetensors`."""


class ChampionMetricGroup(SampleGroup):
    """The champion's value on one group of samples, and the drop of the new file from it."""

    champion: MetricValue
    value: MetricValue
    change: MetricDrop


class ChampionMetric(Record):
    """One metric of the champion and of the new file, on the runtime that serves."""

    name: str
    definition_sha256: Sha256
    source: dict[str, Sha256] = added_field({})
    paired: bool
    """True for the same samples; False for the champion's own evidence on its own samples."""
    failure: Prose | None = None
    groups: tuple[ChampionMetricGroup, ...] = ()
