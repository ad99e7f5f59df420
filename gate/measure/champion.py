"""Measure the new file and the champion on the same samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gate.data.batch_axes import bind_samples
from gate.data.input_binding import InputBinding
from gate.data.samples import SampleSet
from gate.decision.champion import Champion
from gate.errors import GateError, InputMismatch, LimitExceeded, OutputMismatch, first_line
from gate.measure.cost_meter import Stopwatch
from gate.measure.job import Opener
from gate.metrics.intervals import holm_levels, unpaired_bounds
from gate.metrics.process import MetricRun
from gate.metrics.slices import Annotations
from gate.onnx_file.sessions import open_session, quiet_options, refuse_out_of_memory
from gate.onnx_file.tested_file import TestedFile
from gate.policy.metrics import MetricPolicy
from gate.policy.policy import Policy
from gate.policy.runtime_options import plain_setup
from gate.records.champion_comparison import ChampionAnswers, ChampionComparison
from gate.records.evidence import Evidence, Latency
from gate.records.metrics import (
    ChampionMetric,
    ChampionMetricGroup,
    MetricDrop,
    MetricEvidence,
    MetricGroup,
    MetricSide,
    MetricValue,
)
from gate.statistics.classification import ClassAnswers, ClassStatistics
from gate.storage.arrays import Batch

# Both files run in ONNX Runtime on the CPU, optimized, as consumers do. Batches alternate between
# the two, so that other load on the machine affects both.


_TIMED = 16
"""Minimum number of timed batches; with few samples the first batch is repeated."""


@dataclass(frozen=True)
class ComparisonJob:
    """The new file and the data of the comparison."""

    candidate: TestedFile
    samples: SampleSet
    labels: NDArray[np.int64] | None
    """Class indices, shape (samples,)."""
    batch_size: int
    policy: Policy
    chained: Opener | None = None
    """For a release: opens the new and the serving version."""
    annotations: Annotations = field(default_factory=Annotations)
    """Labels and columns for the metrics of the policy."""

    @property
    def metrics(self) -> tuple[MetricPolicy, ...]:
        """The metrics with a bound against the champion."""
        return tuple(m for m in self.policy.metrics if m.max_drop_from_champion is not None)


def measure_incumbent(
    champion: Champion, *, comparison: ComparisonJob, evidence: Evidence
) -> ChampionComparison:
    """Compare the new file with the serving version, or return why that is not possible.

    `evidence`: of the new file. Raises LimitExceeded if memory runs out, StorageError and
    DigestMismatch if a file has changed, DataError for samples that can't be read.
    """
    fields = champion.record_fields(evidence)
    if champion.onnx_path is None or champion.evidence is None:
        return ChampionComparison(state=champion.incomparable, absent=champion.absent, **fields)
    if champion.sha256 == evidence.subject.sha256:
        return ChampionComparison(state="compared", samples=len(comparison.samples), **fields)
    old = TestedFile(champion.onnx_path, champion.evidence.subject)
    try:
        _check_preprocessing(champion.evidence, evidence)
        _check_outputs(old, comparison.candidate)
        pair = _Pair(old, comparison)
        metrics = pair.run()
    except (InputMismatch, OutputMismatch) as error:
        unpaired = tuple(_unpaired(comparison.metrics, champion.evidence, evidence))
        if unpaired:
            count = len(comparison.samples)
            return ChampionComparison(state="compared", samples=count, metrics=unpaired, **fields)
        return ChampionComparison(state="incomparable", absent=str(error).rstrip("."), **fields)
    return ChampionComparison(
        state="compared",
        samples=len(comparison.samples),
        outputs=pair.answers(),
        metrics=metrics,
        champion_latency=pair.latency(0),
        latency=pair.latency(1),
        **fields,
    )


def _check_preprocessing(old: Evidence, new: Evidence) -> None:
    """Raise InputMismatch if the champion expects other preprocessing than these samples have."""
    champion_spec, new_spec = old.source.preprocess_sha256, new.source.preprocess_sha256
    if champion_spec is not None and new_spec is not None and champion_spec != new_spec:
        raise InputMismatch(
            f"its inputs need other preprocessing ({champion_spec.short}) than these samples have "
            f"({new_spec.short})"
        )


def _check_outputs(old: TestedFile, new: TestedFile) -> None:
    shapes = {spec.name: spec.shape[1:] for spec in old.subject.outputs}
    for spec in new.subject.outputs:
        if spec.name not in shapes or not _fits(shapes[spec.name], spec.shape[1:]):
            listed = ", ".join(f"'{name}' {list(shape)}" for name, shape in shapes.items())
            raise OutputMismatch(
                f"its outputs per sample are {listed}; the new file returns '{spec.name}' "
                f"{list(spec.shape[1:])}"
            )


def _fits(old: tuple[int | str, ...], new: tuple[int | str, ...]) -> bool:
    return len(old) == len(new) and all(
        isinstance(a, str) or isinstance(b, str) or a == b for a, b in zip(old, new, strict=True)
    )


class _Side(NamedTuple):
    """One of the two files, opened."""

    session: Any
    binding: InputBinding
    stopwatch: Stopwatch

    def run(self, batch: Batch, outputs: list[str]) -> list[Any]:
        """Run and time a batch. Raises OutputMismatch if ONNX Runtime fails, LimitExceeded."""
        feed = self.binding.by_input(batch)
        start = time.perf_counter()
        try:
            results: list[Any] = self.session.run(outputs, feed)
        except Exception as error:
            raise _unusable(error) from error
        self.stopwatch.add(time.perf_counter() - start, batch_size=len(next(iter(batch.values()))))
        return self.binding.from_call(results)


class _Pair:
    """Both files, the serving one first."""

    def __init__(self, old: TestedFile, comparison: ComparisonJob) -> None:
        self._comparison = comparison
        self._sides = [self._open(old), self._open(comparison.candidate)]
        sizes = {side.binding.batch_size for side in self._sides if side.binding.fixed}
        if len(sizes) > 1:
            raise InputMismatch(f"the two files have different fixed batch sizes: {sorted(sizes)}")
        self._batch_size = min(sizes, default=self._sides[0].binding.batch_size)
        self._names = [spec.name for spec in comparison.candidate.subject.outputs]
        self._classes: dict[str, ClassStatistics] = {}

    def run(self) -> tuple[ChampionMetric, ...]:
        """Run all samples in both, then enough batches for timing. Return the metrics."""
        comparison = self._comparison
        with closing(
            MetricRun(comparison.metrics, outputs=self._names, annotations=comparison.annotations)
        ) as metrics:
            self._run(metrics)
            return tuple(_paired(metrics, comparison.metrics, samples=len(comparison.samples)))

    def _run(self, metrics: MetricRun) -> None:
        labels, start, turns = self._comparison.labels, 0, 0
        first: Batch | None = None
        # NaN is allowed, because both files get the same samples.
        for batch in self._comparison.samples.allow_nan().batches(self._batch_size):
            first = batch if first is None else first
            outputs = self._turn(batch, turns)
            rows = len(next(iter(batch.values())))
            sides = {_CHAMPION: outputs[0], _NEW: outputs[1]}
            metrics.update(sides, start=start, count=rows)
            self._update(outputs, start, None if labels is None else labels[start : start + rows])
            start, turns = start + rows, turns + 1
        while first is not None and turns < _TIMED:
            self._turn(first, turns)
            turns += 1

    def answers(self) -> tuple[ChampionAnswers, ...]:
        """Return the comparison of the answers for each output of classes."""
        return tuple(_answers(name, each) for name, each in self._classes.items())

    def latency(self, side: int) -> Latency | None:
        """Return the latency of the serving file (side 0) or of the new file (side 1)."""
        return self._sides[side].stopwatch.result()

    def _open(self, file: TestedFile) -> _Side:
        comparison = self._comparison
        inputs = file.subject.inputs
        binding = bind_samples(inputs, comparison.samples, batch_size=comparison.batch_size)
        try:
            session = self._session(file)
        except GateError:
            raise
        except Exception as error:
            raise _unusable(error) from error
        return _Side(session, binding, Stopwatch())

    def _session(self, file: TestedFile) -> Any:
        chained = self._comparison.chained
        if (chained is None) == bool(file.subject.parts):
            raise OutputMismatch("one is a release of several files, the other a single file")
        if chained is not None:
            return chained.open_release(file)
        return open_session(file.loadable(), quiet_options(), plain_setup("ort-cpu-optimized"))

    def _turn(self, batch: Batch, turn: int) -> list[list[Any]]:
        """Return the outputs of both; the order of the runs alternates."""
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        outputs = {side: self._sides[side].run(batch, self._names) for side in order}
        return [outputs[0], outputs[1]]

    def _update(
        self, outputs: list[list[Any]], start: int, labels: NDArray[np.int64] | None
    ) -> None:
        for name, old, new in zip(self._names, *outputs, strict=True):
            if not (self._comparison.policy.counts_classes(name) and _is_classes(old, new)):
                continue
            if name not in self._classes:
                self._classes[name] = ClassStatistics(new.shape[1])
            r, c = (ClassAnswers.from_values(side.astype(np.float64)) for side in (old, new))
            self._classes[name].update(r, c, start=start, labels=labels)


_CHAMPION, _NEW = "champion", "new"


def _paired(
    metrics: MetricRun, policies: Sequence[MetricPolicy], *, samples: int
) -> Iterator[ChampionMetric]:
    for metric in policies:
        groups, _ = metrics.groups(metric, samples=samples, reference=_CHAMPION)
        yield ChampionMetric(
            name=metric.name,
            definition_sha256=metric.definition(),
            source=metrics.source_of(metric),
            paired=True,
            failure=metrics.failures.get(metric.name),
            groups=tuple(
                _champion_metric_group(
                    group, group.reference, group.runtimes[_NEW], group.runtimes[_NEW].change
                )
                for group in groups
            ),
        )


def _champion_metric_group(
    group: MetricGroup, champion: MetricValue, new: MetricValue, change: MetricDrop
) -> ChampionMetricGroup:
    return ChampionMetricGroup(
        column=group.column,
        label=group.label,
        samples=group.samples,
        champion=champion,
        value=MetricValue(value=new.value, low=new.low, high=new.high),
        change=change,
    )


def _unpaired(
    policies: Sequence[MetricPolicy], old: Evidence, new: Evidence
) -> Iterator[ChampionMetric]:
    """Compare metrics from the evidence of both versions, measured on different samples.

    Only metrics with the same definition and source are compared.
    """
    champion_metrics, new_metrics = (
        {metric.name: metric for metric in evidence.metrics if metric.failure is None}
        for evidence in (old, new)
    )
    for metric in policies:
        champion = champion_metrics.get(metric.name)
        measured = new_metrics.get(metric.name)
        if champion is None or measured is None:
            continue
        same = ("definition_sha256", "source")
        if all(getattr(champion, name) == getattr(measured, name) for name in same):
            groups, failure = tuple(_unpaired_groups(metric, champion, measured)), None
            if metric.aggregation == "sum":
                groups, failure = (), "sums over different samples can't be compared; use a mean"
            elif not groups:
                failure = "the champion was not measured on these slices"
            yield ChampionMetric(
                name=metric.name,
                definition_sha256=measured.definition_sha256,
                source=measured.source,
                paired=False,
                failure=failure,
                groups=groups,
            )


def _unpaired_groups(
    metric: MetricPolicy, champion: MetricEvidence, measured: MetricEvidence
) -> Iterator[ChampionMetricGroup]:
    """Yield unpaired comparisons of the groups; nothing if the champion lacks one of them."""
    champion_groups = {group.title: group for group in champion.groups}
    if not {group.title for group in measured.groups} <= set(champion_groups):
        return
    levels = holm_levels(metric.confidence, len(measured.groups) - 1)
    for group in measured.groups:
        new, old = _find_served(group), _find_served(champion_groups[group.title])
        if new is None or old is None:
            return
        if metric.is_higher_better:
            old_limits, new_limits = (old.value, old.high), (new.value, new.low)
        else:
            old_limits, new_limits = (-old.value, -old.low), (-new.value, -new.high)
        group_levels = levels if group.column is not None else (metric.confidence,)
        bounds = unpaired_bounds(old_limits, new_limits, group_levels)
        change = MetricDrop(
            drop=old_limits[0] - new_limits[0],
            changed=None,
            method=bounds.method,
            bounds=bounds.upper,
            scale=max(abs(old.value), abs(new.value)) or 1.0,
        )
        yield _champion_metric_group(
            group, MetricValue(value=old.value, low=old.low, high=old.high), new, change
        )


def _find_served(group: MetricGroup) -> MetricSide | None:
    """Return the values of the runtime that consumers most likely use."""
    for name in ("ort-cpu-optimized", "ort-cpu", *group.runtimes):
        if name in group.runtimes:
            return group.runtimes[name]
    return None


def _is_classes(old: Any, new: Any) -> bool:
    """Return whether both are float arrays of the same shape (batch, classes >= 2)."""
    outputs = (old, new)
    if not all(isinstance(each, np.ndarray) and each.dtype.kind == "f" for each in outputs):
        return False
    return bool(new.ndim == 2 and new.shape[1] >= 2 and old.shape == new.shape)


def _answers(name: str, classes: ClassStatistics) -> ChampionAnswers:
    result = classes.result()
    accuracy = result.accuracy
    return ChampionAnswers(
        name=name,
        samples=classes.samples,
        disagreements=result.top1_disagreements,
        champion_accuracy=None if accuracy is None else accuracy.reference,
        accuracy=None if accuracy is None else accuracy.candidate,
    )


def _unusable(error: Exception) -> OutputMismatch:
    """Return the error for a failed run.

    Raises LimitExceeded if memory ran out, which is no evidence about the files.
    """
    if isinstance(error, LimitExceeded):
        raise error
    refuse_out_of_memory(error, what="running the new and the serving file")
    return OutputMismatch(f"ONNX Runtime can't run both files: {first_line(error)[:300]}")
