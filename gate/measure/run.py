"""Measure one file against its reference: all samples, all runtimes, one evidence record."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.data.array_files import check_labels
from gate.data.reader import length
from gate.errors import DataError, DigestMismatch, EvidenceError
from gate.measure.context import Instrument, MeasurementContext, ReferencePass
from gate.measure.cost_meter import Stopwatch
from gate.measure.job import MeasurementJob, Progress, Reference
from gate.measure.outliers import RoundingFloor, analyze_outliers, float64_differences
from gate.measure.reference_assessment import ReferenceAssessment
from gate.measure.runtime_measurement import RuntimeMeasurement
from gate.measure.session_runner import SessionRunner
from gate.measure.undefined_values import casts_on_samples
from gate.measure.work_units import (
    FirstUnitState,
    RunProof,
    RuntimeUnitResult,
    UnitResult,
    UnitWorkers,
    WorkUnit,
    split_into_units,
)
from gate.metrics.process import REFERENCE, MetricRun
from gate.policy.policy import Policy
from gate.records.evidence import (
    Dataset,
    Determinism,
    Environment,
    Evidence,
    differences,
)
from gate.reference.environment import describe_environment, deterministic
from gate.reference.float64 import Truth
from gate.reference.validity import Validity
from gate.runtimes.selection import selected_runtimes
from gate.statistics.classification import ClassReading
from gate.statistics.output import Span
from gate.statistics.sample_table import SampleTable
from gate.statistics.serialization import InOrder, from_plain, to_plain
from gate.storage.arrays import Batch, OutputArray
from gate.storage.digest import Digest

_steps = logging.getLogger("gate.steps")

_HARMLESS = ("cores", "operating system", "kernel")


class MeasurementRun:
    """One measurement of a file: the reference and every runtime run on the same samples.

    Created by `open`. `run` performs a whole check. A worker process uses `measure_for` to measure
    units, which the main process adds with `merge`.
    """

    def __init__(
        self, job: MeasurementJob, switches: Determinism, metrics: MetricRun, *, noise: bool
    ) -> None:
        policy, self.binding = job.policy, job.bind()
        self.job, self.samples = job, job.inputs
        self._labels = (
            None if job.labels is None else check_labels(job.labels, samples=len(self.samples))
        )
        self._names = [spec.name for spec in job.candidate.subject.outputs]
        self.metrics = metrics
        self.metric_values = b""
        """Per-sample values of the metrics as safetensors, set by `run`; the evidence has their
        digests."""
        readings = {
            name: ClassReading(
                normalised=policy.role_for(name) == "probabilities", points=policy.points
            )
            for name in self._names
        }
        self._read: tuple[WorkUnit, NDArray[np.int64] | None] | None = None
        self._proofs: dict[str, RunProof | None] = {}
        self.runtimes = [
            RuntimeMeasurement(selected, self._names, readings=readings)
            for selected in selected_runtimes(policy, job.recordings)
        ]
        self.model = job.reference.copy(double=self.binding.double)
        self.reference = ReferencePass(self.model.session(self.binding))
        noise_samples = policy.instruments.noise_samples
        self.truth = Truth(self.model, self.binding, samples=noise_samples if noise else 0)
        self.context = MeasurementContext(
            self.model,
            self.reference,
            self.truth,
            self.binding,
            self.samples,
            policy,
            job.candidate,
        )
        self.truth.decisions = self.context.decisions
        self.truth.part_size = self.context.part_size
        self.rounding = RoundingFloor(self.context, self.runtimes)
        self.environments: tuple[Environment, ...] = (describe_environment(switches),)
        """The environment of this process, then those of other processes that measured units."""
        self.expected = self.context.run_example()
        self.samples = self.context.samples
        self.example = self.context.example
        self.context.answers.note_reference(self.example, self.expected)
        if noise:
            self.truth.extend(self.context.noise_samples - noise_samples)
        self.units = split_into_units(
            len(self.samples),
            batch_size=self.binding.batch_size,
            lead=self.context.noise_samples,
            most=job.units,
            least=self.context.smallest,
        )

    @classmethod
    @contextlib.contextmanager
    def open(cls, job: MeasurementJob, *, noise: bool = True) -> Iterator[MeasurementRun]:
        """Open a run with a copy of the model, under the policy's PyTorch settings.

        Runtimes are opened later and closed at the end of the context. `noise`: use the float64
        reference.

        Raises PolicyError for metrics that can't be used, InputMismatch and DataError for samples
        and labels that don't fit, ModelError and EvidenceError if the reference can't be run.
        """
        outputs = [spec.name for spec in job.candidate.subject.outputs]
        metrics = MetricRun(job.policy.metrics, outputs=outputs, annotations=job.annotations)
        with deterministic(job.policy.determinism) as switches, contextlib.closing(metrics):
            metrics.open()
            run = cls(job, switches, metrics, noise=noise)
            try:
                yield run
            finally:
                for runtime in run.runtimes:
                    runtime.close()

    def run(
        self,
        instruments: Sequence[type[Instrument]],
        *,
        progress: Progress | None = None,
        workers: UnitWorkers | None = None,
    ) -> Evidence:
        """Compare the file with the reference on all samples, in every runtime of the policy.

        The reference is a copy of the model on the CPU, in eval mode, in float32 except for parts
        that are float64 in the file too (`gate.measure.job`). A fixed batch axis of the file sets
        the batch size. `instruments`: additional measurements, in order. `progress` is called with
        (finished samples, total), including those of instruments. `workers`: measure all units
        but the first in other processes, with the same results.

        A failing runtime is recorded as failed; the others continue. Raises DataError for labels
        that don't fit, EvidenceError if the reference can't be run, DigestMismatch if the file is
        no longer the one that `job.candidate.subject` describes.
        """
        fields: dict[str, Any] = {
            "reference_spread": self.reference.spread(self.example, self.expected),
            "state_spread": self.reference.state_spread(self.example, self.expected),
        }
        enabled = [kind for kind in instruments if kind.is_enabled(self.job)]
        before = [kind(self.context) for kind in enabled if not kind.needs_runtimes]
        _run_all(before, (), _ignore)
        self.open_runtimes()
        if len(before) < len(enabled):
            self.context.measure_sample_bytes()
        after = [kind(self.context) for kind in enabled if kind.needs_runtimes]
        cost = sum(instrument.cost for instrument in after)
        advance = _sum_of_progress(progress, len(self.samples) + cost)

        start = time.perf_counter()
        _steps.debug("samples")
        self.measure_first(advance)
        later_units = self.units[1:]
        if not later_units:
            workers = None
        if workers is not None:
            first_state = self.first_unit_state()
            state = workers.begin(first_state, later_units)
            if state != first_state:
                self.use_first_unit(state)
            _run_all(after, self.runtimes, advance)  # concurrently with the workers
            self._merge_all(workers, advance)
        elif later_units:
            self.rounding.widen()
            _steps.debug("samples")
            for unit in later_units:
                self.measure(unit, advance)
                self.end_unit()
        for runtime in self.runtimes:
            runtime.fold()
        take_turns(self.context, self.runtimes, seconds=time.perf_counter() - start)
        self.rounding.widen()
        analyze_outliers(self.context, self.runtimes)
        if workers is None:
            _run_all(after, self.runtimes, advance)

        for instrument in (*before, *after):
            fields |= instrument.evidence()
        evidence = self._evidence(workers, fields)
        self.job.candidate.verify()
        return evidence

    def _evidence(self, workers: UnitWorkers | None, fields: Mapping[str, Any]) -> Evidence:
        """Return the record of the whole measurement, with the fields of the instruments."""
        job, meter = self.job, self.reference.meter
        metrics, self.metric_values = self.metrics.evidence(samples=len(self.samples))
        measured = tuple(runtime.evidence() for runtime in self.runtimes)
        record = None
        if workers is not None:
            record = workers.record.model_copy(update={"environments": self.environments[1:]})
        return Evidence(
            subject=job.candidate.subject,
            source=job.source or Reference.from_model(job.model).source,
            export=job.export,
            dataset=Dataset(
                sha256=self.samples.digest(),
                samples=len(self.samples),
                labelled=job.labels is not None,
                model_only=self.binding.model_only,
                batch_axes=self.binding.layout,
            ),
            environment=self.environments[0],
            runtimes=measured,
            reference_latency=meter.batches.result(),
            reference_cost=meter.cost(),
            noise_unmeasured=self.truth.unmeasured,
            validity=self.truth.validity.evidence(),
            float64_differences=float64_differences(self.context, measured),
            undefined=casts_on_samples(self.context),
            worker_pool=record,
            metrics=metrics,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            **fields,
        )

    def sample_table(self) -> SampleTable:
        """Return one row per sample, for the report; requires `run`."""
        return SampleTable.from_runtimes({each.name: each.sample_rows() for each in self.runtimes})

    def open_runtimes(self) -> None:
        """Open the file in each runtime and run a batch of another size; record failures."""
        for runtime in self.runtimes:
            runtime.open(self.job, self.model, self.binding, self.example)
            runtime.probe(self.example, self.expected, self.reference.session.keys)

    def measure_first(self, advance: Callable[[int], None]) -> None:
        """Measure the first unit, and repeat it if float64 computes another function than the
        model for part of it. Raises the exceptions of `measure`."""
        unit = self.units[0]
        self._assess(unit, advance)
        if self.truth.validity.record.own_choices:
            self.context.answers.forget_truth()
            self._restart()
            self._assess(unit, _ignore)
        if self.truth.validity.is_restricted:
            self._restart()
            self.measure(unit, _ignore)
        self.end_unit()

    def measure(
        self,
        unit: WorkUnit,
        advance: Callable[[int], None],
        *,
        observe: Callable[[list[OutputArray], list[OutputArray] | None, int], None] | None = None,
    ) -> None:
        """Run one unit in the reference and every runtime, and compare.

        `advance` is called with the number of samples after each batch; `observe` with the outputs
        of the reference, the float64 outputs or None, and the number of samples.

        Raises DataError for samples and labels that don't fit, EvidenceError if the reference
        fails.
        """
        at, labels = unit.start, self._labels_of(unit)
        for batch in self.samples.slice(unit.start, unit.stop).batches(self.binding.batch_size):
            count, start = length(batch), at - unit.start
            self.binding.check_range(batch, start=at)
            span = Span(at, count, None if labels is None else labels[start : start + count])
            expected = self.reference.timed_run(batch, self.reference.meter.batches)
            _check_classes(expected, self._names, span, policy=self.job.policy)
            if not self.truth.is_complete:
                self.context.answers.note_reference(batch, expected)
            true = self.truth.first_outputs(batch)
            if true is None:  # later samples are compared with the floor of the earlier ones
                self.rounding.widen()
            else:
                self.context.answers.note(batch, expected, true)
            if observe is not None:
                observe(expected, true, count)
            for runtime in self.runtimes:
                runtime.update(
                    batch,
                    expected,
                    span,
                    truth=true,
                    validity=self.truth.validity,
                    replayed=partial(self.context.replayed, runtime.name),
                )
            if self.job.policy.metrics:
                sides = {runtime.name: runtime.outputs for runtime in self.runtimes}
                self.metrics.update({REFERENCE: expected, **sides}, start=at, count=count)
            at += count
            advance(count)

    def _assess(self, unit: WorkUnit, advance: Callable[[int], None]) -> None:
        assessment = ReferenceAssessment()
        self.measure(unit, advance, observe=assessment.update)
        self.truth.validity = assessment.result(self.context)

    def _restart(self) -> None:
        self.truth.rewind()
        self.metrics.restart()
        for runtime in self.runtimes:
            runtime.restart()

    def end_unit(self) -> None:
        """Close the current unit in every runtime."""
        for runtime in self.runtimes:
            runtime.end_unit()

    def first_unit_state(self) -> FirstUnitState:
        """Return the state that other processes need for later units; requires the first unit."""
        self.rounding.widen()
        self._proofs = {runtime.name: runtime.run_proof() for runtime in self.runtimes}
        samples, labels = self.digests(self.units[0])
        floors = {runtime.name: runtime.floor_state() for runtime in self.runtimes}
        return FirstUnitState(
            floors=floors,
            samples_sha256=samples,
            labels_sha256=labels,
            validity=self.truth.validity.record,
        )

    def use_first_unit(self, state: FirstUnitState) -> None:
        """Use the state that another process measured for the first unit. Raises EvidenceError."""
        self.rounding.keep_floors()
        self.truth.validity = Validity(state.validity)
        for runtime in self.runtimes:
            runtime.use_floor(state.floors.get(runtime.name))

    def measure_for(self, unit: WorkUnit) -> UnitResult:
        """Measure one unit for another process. Raises the exceptions of `measure`."""
        answers = hashlib.sha256()
        self.measure(unit, _ignore, observe=lambda outputs, *_: _add(answers, outputs))
        samples, labels = self.digests(unit)
        return UnitResult(
            index=unit.index,
            start=unit.start,
            stop=unit.stop,
            samples_sha256=samples,
            labels_sha256=labels,
            answers_sha256=Digest(answers.hexdigest()),
            environment=self.environments[0],
            reference_seconds=self.reference.meter.batches.drain(),
            metrics=to_plain(self.metrics.drain()) if self.job.policy.metrics else None,
            runtimes={runtime.name: runtime.unit_result() for runtime in self.runtimes},
        )

    def digests(self, unit: WorkUnit) -> tuple[Digest, Digest | None]:
        """Return the digests of a unit's samples, in order, and of its labels, if any."""
        samples = self.samples.slice(unit.start, unit.stop).digest()
        labels = self._labels_of(unit)
        if labels is None:
            return samples, None
        return samples, Digest.from_bytes(labels.astype("<i8").tobytes())

    def merge(self, result: UnitResult, unit: WorkUnit) -> None:
        """Add the result of another process for the next unit.

        Raises DigestMismatch if it used other samples or labels, EvidenceError if it used another
        environment and the policy does not allow this.
        """
        self._verify(result, unit)
        self.reference.meter.batches.extend(result.reference_seconds)
        if self.job.policy.metrics:
            values = None if result.metrics is None else from_plain(result.metrics)
            self.metrics.take(values, samples=len(unit))
        anywhere = self.job.policy.environments == "any"
        for runtime in self.runtimes:
            measured = result.runtimes.get(runtime.name) or RuntimeUnitResult(
                failure="no result from the worker"
            )
            runtime.merge(measured, proof=self._proofs.get(runtime.name), anywhere=anywhere)

    def _merge_all(self, workers: UnitWorkers, advance: Callable[[int], None]) -> None:
        """Merge the results in the order of units, so that sums do not depend on the number of
        workers."""

        def merge(result: UnitResult) -> None:
            self.merge(result, self.units[first + ordered.next])
            advance(len(result.unit))

        ordered, first = InOrder(merge), self.units[1].index
        for result in workers.parts():
            ordered.add(result.index - first, result)
        if ordered.next != len(self.units) - first:
            missing = self.units[first + ordered.next]
            raise EvidenceError(f"unit {missing.index} was not measured. Measure it again.")

    def _labels_of(self, unit: WorkUnit) -> NDArray[np.int64] | None:
        if not self.job.source_labels:
            return None if self._labels is None else self._labels[unit.start : unit.stop]
        if self._read is None or self._read[0] != unit:  # reading labels may be slow
            self._read = unit, self.samples.slice(unit.start, unit.stop).labels()
        return self._read[1]

    def _verify(self, part: UnitResult, unit: WorkUnit) -> None:
        if part.unit != unit or self.digests(unit) != (part.samples_sha256, part.labels_sha256):
            raise DigestMismatch(
                f"unit {unit.index} (samples {unit.start} to {unit.stop - 1}) was measured on "
                "different samples or labels. Use the same data set in the same order in all "
                "processes, or use one job."
            )
        if part.environment not in self.environments:
            self.environments += (part.environment,)
        policy, unlike = self.job.policy, _unlike(self.environments[0], part.environment)
        if unlike and policy.precision == "exact" and policy.environments == "same":
            raise EvidenceError(
                f"unit {part.index} was measured in another environment: {unlike}. Measure it "
                "again in this one, or set environments: any in the policy."
            )


def _unlike(here: Environment, there: Environment) -> str:
    """Describe the differences of two environments that may change numbers; empty if none."""
    relevant = [each for each in differences(here, there) if each.name not in _HARMLESS]
    texts = [f"{each.name} {each.now}, here {each.before}" for each in relevant]
    if here.determinism != there.determinism and "threads" not in {each.name for each in relevant}:
        texts.append("different PyTorch settings")
    return "; ".join(texts)


def _add(answers: hashlib._Hash, outputs: list[OutputArray]) -> None:
    for output in outputs:
        answers.update(f"{output.dtype} {output.shape}\n".encode())
        answers.update(np.ascontiguousarray(output).tobytes())


def _ignore(_samples: int) -> None:
    """Ignore progress."""


def _check_classes(
    outputs: list[OutputArray], names: list[str], span: Span, *, policy: Policy
) -> None:
    """Raise DataError for labels that no output of logits can predict."""
    if span.labels is None:
        return
    widths = [
        output.shape[1]
        for name, output in zip(names, outputs, strict=False)
        if output.ndim == 2 and output.dtype.kind == "f" and policy.counts_classes(name)
    ]
    largest = int(span.labels.max())
    if widths and largest >= max(widths):
        sample = span.start + int(span.labels.argmax())
        raise DataError(
            f"the label of sample {sample} is {largest}, the model has {max(widths)} classes. "
            "Use the labels of these samples and this model."
        )


_MIN_TURNS, _MIN_FULL_TURNS, _MAX_TURNS = 3, 2, 20
"""Minimum turns with one sample and with a whole batch, and maximum; the first turn warms up."""

_SHARE = 0.02
"""Time limit of additional turns, relative to the time of the samples."""

_FREE_S = 0.05
"""Lower bound of this time limit, in seconds."""


def take_turns(
    context: MeasurementContext, runtimes: Sequence[RuntimeMeasurement], *, seconds: float
) -> None:
    """Time batches of one sample, and the first full batch if there was no second one.

    The first run of a batch is not representative. `seconds`: time of all samples. A file with a
    fixed batch can't run one sample, which is recorded. A failing runtime is recorded as failed.
    Raises EvidenceError if the reference fails.
    """
    size, meter = context.binding.batch_size, context.reference.meter
    allowed = max(_SHARE * seconds, _FREE_S)
    if meter.batches.is_cold:
        batch = next(context.samples.batches(size))
        for _ in _turns(allowed, least=_MIN_FULL_TURNS, first=1):
            expected = context.reference.timed_run(batch, meter.batches)
            for runtime in runtimes:
                _take_turn(runtime, batch, expected, runtime.meter.batches)
    if size == 1:  # the measurement already has batches of one sample
        return
    if context.smallest > 1:
        reason = "fixed_batch" if context.binding.fixed else "no_single_sample"
        for each in (meter, *(runtime.meter for runtime in runtimes)):
            each.single_unmeasured = reason
        return
    samples = cycle(islice(context.samples.batches(1), _MIN_TURNS))
    for sample, _ in zip(samples, _turns(allowed, least=_MIN_TURNS), strict=False):
        expected = context.reference.timed_run(sample, meter.singles)
        context.answers.note_reference(sample, expected)
        for runtime in runtimes:
            _take_turn(runtime, sample, expected, runtime.meter.singles)


def _take_turn(
    runtime: RuntimeMeasurement,
    batch: Batch,
    expected: Sequence[OutputArray],
    stopwatch: Stopwatch,
) -> None:
    """Run and time a batch, and cache the result; a recording can't be run."""
    if runtime.runner is None or not runtime.runner.session.live:
        return
    try:
        runtime.compute(batch, expected, by=SessionRunner.run_kept)
        stopwatch.add(runtime.runner.seconds, batch_size=length(batch))
    except Exception as error:
        runtime.fail(error)


def _turns(allowed: float, *, least: int, first: int = 0) -> Iterator[int]:
    """Yield turns from `first` on for `allowed` seconds, but until there are `least` in total."""
    start = time.perf_counter()
    for turn in range(first, _MAX_TURNS):
        if turn >= least and time.perf_counter() - start > allowed:
            return
        yield turn


def _run_all(
    instruments: Sequence[Instrument],
    runtimes: Sequence[RuntimeMeasurement],
    advance: Callable[[int], None],
) -> None:
    for instrument in instruments:
        _steps.debug(instrument.title)
        instrument.run(runtimes, advance)


def _sum_of_progress(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Return a function that passes the sum of finished samples to a progress callback."""
    if progress is None:
        return _ignore
    finished = 0

    def advance(samples: int) -> None:
        nonlocal finished
        finished += samples
        progress(finished, total)

    return advance
