"""Measured metrics of the task: values with intervals, by slice and runtime."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gate.records.runtime import RuntimeName
from gate.storage.record import Count, Measured, Prose, Record, Sha256, added_field


class MetricValue(Record):
    """The metric of one side on the samples of a group."""

    value: Measured
    low: Measured
    """One-sided lower limit at the policy's confidence; NaN where there is none."""
    high: Measured
    """One-sided upper limit."""


class MetricDrop(Record):
    """The drop of a metric from one side to another, on the samples of a group."""

    drop: Measured
    """Positive: worse. In units of the metric."""
    changed: Count | None
    """Samples whose value or state differs; None: the two were measured on different samples."""
    method: Literal["exact", "bca", "rule_of_three", "unpaired"]
    bounds: tuple[Measured, ...]
    """One-sided upper bounds of the drop at 1 - alpha / r, r = 1, 2, ... up to the number of groups
    of this kind, for Holm's correction; of all samples one."""
    scale: Measured
    """The largest drop that a sample can have: the rule of three is in units of it."""


class MetricSide(MetricValue):
    """The metric of one runtime, and its drop from the reference."""

    change: MetricDrop


class SampleGroup(Record):
    """All samples, or those with one value in one column."""

    column: str | None = None
    label: Prose | None = None
    """The value in the column. None: all samples."""
    samples: Count

    @property
    def title(self) -> str | None:
        """`camera=front`; None: all samples."""
        return None if self.column is None else f"{self.column}={self.label}"


class MetricGroup(SampleGroup):
    """The values of a metric on one group of samples."""

    reference: MetricValue
    runtimes: dict[RuntimeName, MetricSide] = Field(default_factory=dict)


class MetricEvidence(Record):
    """One metric of the policy, as it was measured. `groups` is empty where `failure` says why."""

    name: str
    definition_sha256: Sha256
    """As `gate.policy.metrics.MetricPolicy.definition`."""
    source: dict[str, Sha256] = added_field({})
    """Source files of the function by module, its imports included; empty of a built-in metric."""
    higher_is_better: bool
    failure: Prose | None = None
    """Why it was not measured: an exception with sample and line, NaN, a limit."""
    groups: tuple[MetricGroup, ...] = ()
    """All samples first."""
    values_sha256: Sha256 | None = None
    """Digest of its values per sample in the file `metrics.safetensors` of the report."""


class ChampionMetricGroup(SampleGroup):
    """The champion's value on one group of samples, and the drop of the new file from it."""

    champion: MetricValue
    value: MetricValue
    change: MetricDrop


class ChampionMetric(Record):
    """One metric of the champion and of the new file, both as they are served."""

    name: str
    definition_sha256: Sha256
    source: dict[str, Sha256] = added_field({})
    paired: bool
    """On the same samples. False: by the champion's own evidence, on its own samples."""
    failure: Prose | None = None
    groups: tuple[ChampionMetricGroup, ...] = ()
