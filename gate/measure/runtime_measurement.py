"""One runtime: session, statistics, noise floor, cost, failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.data.input_binding import InputBinding
from gate.decision.bound_rules import is_refused
from gate.errors import (
    EvidenceError,
    PackageMissing,
    PlainSessionFailed,
    PolicyError,
    RuntimeAbsent,
    RuntimeUnusable,
    describe_failure,
)
from gate.measure.cost_meter import CostMeter
from gate.measure.job import MeasurementJob
from gate.measure.noise_floor import NoiseFloor, OutlierTracker, to_floor_units
from gate.measure.session_runner import (
    OutputCheck,
    RoundingVariants,
    SessionRunner,
    classify_failure,
    conditions,
    find_batch_sizes,
    refuse_missing_kernel,
)
from gate.measure.work_units import RunProof, RuntimeUnitResult
from gate.policy.policy import Policy
from gate.records.evidence import FailureCode, RuntimeEvidence
from gate.records.instruments import ConcurrentLoad, NoiseParity, ProbeResult, StabilityParity
from gate.records.outputs import OutputParity
from gate.reference.choices import ReplayedReference
from gate.reference.environment import cublas_reason
from gate.reference.reference import ReferenceModel
from gate.reference.validity import UNRESTRICTED, Validity
from gate.runtimes.recorded import RecordedRuntime
from gate.runtimes.runtime import Proof, RunnableFile, Session
from gate.runtimes.selection import SelectedRuntime
from gate.statistics.accumulators import distances, finite_distances, interleave
from gate.statistics.classification import LOGITS, ClassReading
from gate.statistics.output import Floats, OutputStatistics, Span
from gate.statistics.sample_table import ROW, OutputRows, RowSpool
from gate.statistics.serialization import PairwiseMerge, from_plain, to_plain
from gate.storage.arrays import Batch, OutputArray


class OutputComparison:
    """Checks number, dtype and shape of the outputs of each batch, then accumulates statistics.

    merge is associative up to the rounding of float64 sums; the left operand has earlier samples.
    """

    def __init__(
        self, check: OutputCheck, *, readings: Mapping[str, ClassReading] | None = None
    ) -> None:
        """`readings`: how to read outputs of classes, by name. Default: logits."""
        self._check = check
        self._names = check.names
        self._readings = dict(readings or {})
        self._example: tuple[tuple[int, ...], ...] | None = None
        self._outputs: list[OutputStatistics] = []
        self._late: dict[str, OutlierTracker] = {}
        self._axes: dict[str, int] = {}
        """Axis of the samples by output, if another batch size reveals it; shared by all units."""
        self.floor = NoiseFloor(check.names)
        """The floor of the first samples; shared by all units."""
        self.has_other_lengths = False
        """True if arrays of another length than the reference's were cut or filled."""

    def successor(self) -> OutputComparison:
        """Return an empty comparison for later samples, with the same floor."""
        empty = self.emptied()
        empty._axes, empty.floor = self._axes, self.floor
        return empty

    def emptied(self) -> OutputComparison:
        """Return an empty comparison for the same samples, without a floor."""
        empty = OutputComparison(self._check, readings=self._readings)
        empty._example = self._example
        return empty

    def state(self) -> Any:
        """Return the accumulated values as JSON values, without the floor."""
        return to_plain(
            {
                "outputs": self._outputs,
                "late": self._late,
                "has_other_lengths": self.has_other_lengths,
            }
        )

    def take(self, state: Any) -> None:
        """Restore the result of `state`. Raises EvidenceError for invalid values."""
        restored = from_plain(state)
        self._outputs, self._late = restored["outputs"], restored["late"]
        self.has_other_lengths = restored["has_other_lengths"]
        for name, late in self._late.items():
            late.set_floors(self.floor.outlier_floors(name))

    def merge(self, other: OutputComparison) -> OutputComparison:
        """Return the comparison of both streams, which must have the same floor."""
        merged = self.successor()
        pairs = zip(self._outputs, other._outputs, strict=True)
        have_outputs = bool(self._outputs and other._outputs)
        merged._outputs = (
            [a.merge(b) for a, b in pairs] if have_outputs else self._outputs or other._outputs
        )
        merged_late = {
            name: late.merge(other._late[name])
            for name, late in self._late.items()
            if name in other._late
        }
        merged._late = {**self._late, **other._late, **merged_late}
        merged.has_other_lengths = self.has_other_lengths or other.has_other_lengths
        return merged

    def note_example(self, reference: Sequence[OutputArray]) -> None:
        """Store the output shapes of a batch of another size.

        An axis 1 that grows with the batch, as in CLIP's similarity matrices, is not a class axis.
        """
        self._example = tuple(output.shape for output in reference)

    def update(
        self, reference: Sequence[OutputArray], candidate: Sequence[OutputArray], span: Span
    ) -> list[OutputArray]:
        """Add one batch and return the candidate's outputs in the reference's shapes.

        Raises OutputMismatch before any part of the batch is added.
        """
        resized = self._check.check(reference, candidate)
        self.has_other_lengths |= any(
            new is not old for new, old in zip(resized, candidate, strict=True)
        )
        candidate = resized
        if not self._outputs:
            self._outputs = [
                OutputStatistics(name, r.dtype.name, self._readings.get(name, LOGITS))
                for name, r in zip(self._names, reference, strict=True)
            ]
            self._drop_matrices(reference)
        for statistics, r, c in zip(self._outputs, reference, candidate, strict=True):
            statistics.update(r, c, span)
        return candidate

    def _drop_matrices(self, reference: Sequence[OutputArray]) -> None:
        for statistics, r, shape in zip(
            self._outputs, reference, self._example or (), strict=False
        ):
            if r.ndim == len(shape) == 2 and r.shape[1] != shape[1]:
                statistics.disable_class_metrics()

    def update_noise(
        self,
        truth: Sequence[OutputArray],
        reference: Sequence[OutputArray],
        candidate: Sequence[OutputArray],
        *,
        samples: int,
        start: int = 0,
        validity: Validity = UNRESTRICTED,
    ) -> None:
        """Add one checked batch with float64 outputs (`truth`), where these are valid. `start`:
        index of the first sample."""
        self.floor.update(
            truth, reference, candidate, samples=samples, start=start, validity=validity
        )
        truth = validity.baseline(truth, reference)
        for output, r64, r in zip(self._outputs, truth, reference, strict=False):
            if output.logits is not None and r64.shape == r.shape:
                output.logits.update_truth(r64.argmax(axis=1), r.argmax(axis=1))

    def update_outliers(
        self, reference: Sequence[OutputArray], candidate: Sequence[OutputArray], span: Span
    ) -> None:
        """Add one checked batch without float64 outputs, in units of the floor."""
        for name, r, c in zip(self._names, reference, candidate, strict=False):
            floors = self.floor.outlier_floors(name)
            if not floors:
                continue
            if name not in self._late:
                self._late[name] = OutlierTracker(
                    floors, axis=self._axis(name, r.shape, span.count)
                )
            self._late[name].update(r, c, span)

    def _axis(self, name: str, shape: tuple[int, ...], count: int) -> int | None:
        """Return the axis of the samples, or None; it is the same in all batches.

        It is the only axis whose length depends on the batch size, as in the states of an LSTM;
        otherwise the first one.
        """
        example = dict(zip(self._names, self._example or (), strict=False)).get(name, ())
        lengths = zip(shape, example, strict=True) if len(example) == len(shape) else ()
        grown = [axis for axis, (size, other_size) in enumerate(lengths) if size != other_size]
        if len(grown) == 1 and shape[grown[0]] == count:
            return self._axes.setdefault(name, grown[0])
        return self._axes.get(name, 0 if shape[:1] == (count,) else None)

    @property
    def outliers(self) -> list[int]:
        """Samples that must be computed again, the worst ones of each output first."""
        lists = [late.doubtful for late in self._late.values()]
        lists += [output.logits.doubtful for output in self._outputs if output.logits]
        return interleave(lists)

    @property
    def mismatched_integers(self) -> list[int]:
        """Samples with differing integers or bools."""
        return sorted({s for output in self._outputs for s in output.mismatches.doubtful})

    def accept_tie(self, sample: int, run: Sequence[OutputArray | None]) -> None:
        """Accept the integers of a correct run, by output, as possible values of a sample."""
        for output, array in zip(self._outputs, run, strict=False):
            if array is not None:
                output.mismatches.accept_ties(sample, array)

    def unexplained(self, sample: int) -> int:
        """Return how many integers of a sample differ from all correct runs so far."""
        return sum(output.mismatches.unexplained(sample) for output in self._outputs)

    def accept_variants(self, look: RoundingVariants, runner: SessionRunner) -> None:
        """Accept the results of random rounding for a doubtful sample as possible values."""
        measured: Sequence[OutputArray] | None = None
        for index, output in enumerate(self._outputs):
            late, floor = self._late.get(output.name), look.floor(index)
            if floor is None:
                continue
            truth = np.asarray(look.truth[index], np.float64)
            logits = output.logits
            # A similarity matrix has other columns in another batch.
            same = logits is not None and truth.shape == (1, logits.classes)
            if logits is not None and same and look.sample in logits.doubtful:
                logits.accept_tie(look.sample, truth, floor)
            if late is not None and late.axis is not None and look.sample in late.doubtful:
                measured = measured or runner.run(look.batch)
                c = look.part(measured[index], late.axis)
                if c.shape == truth.shape:
                    late.record(look.sample, **self._settled(output.name, c, truth, floor))

    def _settled(
        self, name: str, candidate: OutputArray, truth: OutputArray, floor: Floats
    ) -> dict[str, float]:
        """Return the largest error of a sample in units of its floor (`by_rounding`), and in
        units of the larger of this and the first samples' floor (`by_first`)."""
        error = finite_distances(truth, candidate)
        with np.errstate(all="ignore"):
            by_first = to_floor_units(error, truth, self.floor.now(name))
            by_rounding = error / floor
        return {
            "by_rounding": float(by_rounding.max(initial=0.0)),
            "by_first": float(np.minimum(by_first, by_rounding).max(initial=0.0)),
        }

    def result(self) -> tuple[OutputParity, ...]:
        """Return one record per output, in the file's order."""
        return tuple(self._record(statistics) for statistics in self._outputs)

    def drain_rows(self) -> dict[str, NDArray[np.void]]:
        """Return the rows of the samples since the last call, by output; empty for an output whose
        axis 0 is not the batch."""
        return {statistics.name: statistics.drain_rows() for statistics in self._outputs}

    @property
    def has_classes(self) -> dict[str, bool]:
        """Return whether an output has classes, by name."""
        return {statistics.name: statistics.has_classes for statistics in self._outputs}

    @property
    def settled(self) -> dict[str, float]:
        """`NoiseParity.settled` by output, if a sample was computed again."""
        scores = ((name, late.settled) for name, late in self._late.items())
        return {name: score for name, score in scores if score is not None}

    def _record(self, statistics: OutputStatistics) -> OutputParity:
        late = self._late.get(statistics.name)
        noise = self.floor.result(statistics.name, diff=late.worst if late else None)
        parity = statistics.result()
        if noise is None:
            return parity
        if late is not None and late.settled is not None:
            noise = noise.model_copy(update={"settled": late.settled})
        return parity.model_copy(update={"noise": noise})


Replayed = Callable[[Batch], ReplayedReference | None]
"""`MeasurementContext.replayed` of one runtime."""

MAX_EXAMINED = 256
"""Maximum number of samples that are computed again, the worst ones."""

_MAX_EXAMINED_IF_REJECTED = 4
"""The same for a runtime that exceeds a bound and is rejected anyway."""

_FAR = 10.0
"""Multiple of a bound above which no sample is computed again."""

_RUNNING = "while running"
"""Part of ONNX Runtime's message if the first batch fails, rather than the file."""

_CHOSEN = 1e-5
"""Minimum difference, relative to the largest value, that may come from another choice: a third of
one level of 16-bit audio."""

_CHOSEN_BY_FAR = 1e-3
"""The same after a smaller difference turned out to be rounding."""


def _chooses(
    reference: Sequence[OutputArray], candidate: Sequence[OutputArray], least: float
) -> bool:
    """Return whether the outputs may differ by a choice: an integer, a shape, or a float by more
    than `least` times the largest value."""
    for r, c in zip(reference, candidate, strict=False):
        if r.shape != c.shape or (r.dtype.kind != "f" and not np.array_equal(r, c)):
            return True
        if r.dtype.kind == "f" and r.size:
            size = np.abs(r).max(initial=0.0, where=np.isfinite(r))
            if distances(r, c).max() > least * size:
                return True
    return False


class RuntimeMeasurement:
    """The session, output statistics, cost and failure of one runtime.

    A failure is recorded and does not affect other runtimes. A runtime that is absent or has failed
    has no session and no statistics.
    """

    def __init__(
        self,
        selected: SelectedRuntime,
        outputs: Sequence[str],
        *,
        readings: Mapping[str, ClassReading] | None = None,
    ) -> None:
        """`readings`: as in `OutputComparison`."""
        self.selected = selected
        self.name = selected.name
        self.absent_reason: str | None = None
        self.failure: str | None = None
        self.failure_code: FailureCode | None = None
        self.failure_params: dict[str, Any] = {}
        self.plain_failure: str | None = None
        self.unusable = False
        """True if the failure is not caused by the file."""
        self.runner: SessionRunner | None = None
        self.stability: tuple[StabilityParity, ...] = ()
        """One record per output, in the file's order; empty if not measured."""
        self.concurrency: tuple[ConcurrentLoad, ...] = ()
        self.probes: list[ProbeResult] = []
        self._unprobed: list[str] = []
        self._noise: dict[str, NoiseParity | None] = {}
        """Noise of the first samples by output, set by `examined_limit`."""
        self._examined_limit: int | None = None
        self._unexamined = self._second_looks = self._look_draws = 0
        self.outputs: list[OutputArray] | None = None
        """Outputs of the last batch; None if it failed or does not match the model's."""
        self._least_choice: float | None = _CHOSEN
        """Argument of `_chooses`. None once a batch of the unit shows that no choices are open. It
        is reset for each unit, so that the numbers do not depend on the process."""
        # Without a bound the metrics judge the outputs, such as another number of detections.
        lengths_vary = selected.settings.bounds.empty
        self._check = OutputCheck(self.name, outputs, lengths_vary=lengths_vary)
        self.comparison = OutputComparison(self._check, readings=readings)
        self._units = PairwiseMerge(OutputComparison.merge)
        self._rows = RowSpool(ROW)
        """Rows of the closed units."""
        self.meter = CostMeter()

    def open(
        self, job: MeasurementJob, model: ReferenceModel, binding: InputBinding, example: Batch
    ) -> None:
        """Open the file of a job, or record why this runtime can't.

        `model`: for runtimes that run the model. Raises PolicyError, PackageMissing and
        EvidenceError, which are not evidence about the file.
        """
        opened = partial(self._opened, job, model, binding)
        try:
            self.absent_reason = self.selected.absent_reason()
            if self.absent_reason is not None:
                return
            try:
                session = self.meter.open(partial(opened, example), cuda=self.selected.takes_cuda)
            except Exception as error:
                if _RUNNING in str(error):
                    self.fail_on(example, error, compute=lambda batch: opened(batch).close())
                    return
                raise
            inputs = binding if self.selected.runtime.runs == "file" else None
            self.runner = SessionRunner(session, job.candidate.subject, inputs)
        except (PolicyError, PackageMissing):  # not evidence about the file
            raise
        except Exception as error:
            refuse_missing_kernel(error, job.candidate)
            self.fail(error)

    def _opened(
        self, job: MeasurementJob, model: ReferenceModel, binding: InputBinding, example: Batch
    ) -> Session:
        """Return a session of the file, or of the model for a runtime that runs it. Raises any
        exception."""
        selected, policy = self.selected, job.policy

        def in_torch(device: str) -> Session:
            unusable = cublas_reason(policy.determinism)
            if unusable is not None:
                raise RuntimeUnusable(unusable)
            return model.copy(device=device, double=binding.double).session(binding)

        if selected.runtime.runs == "file":
            if job.chained is not None:
                return job.chained.session(selected, policy, conditions=conditions(policy))
            recorded = isinstance(selected.runtime, RecordedRuntime)  # always samples on axis 0
            example = (binding.rows_by_input if recorded else binding.by_input)(example)
        return selected.open(
            RunnableFile(job.candidate, in_torch),
            conditions=conditions(policy, binding.layout),
            example=example,
        )

    def restart(self) -> None:
        """Discard the comparisons, because the first unit is measured again."""
        self.comparison, self._least_choice = self.comparison.emptied(), _CHOSEN

    def cut_off(self) -> OutputComparison:
        """Return the comparisons since the last unit and begin a new unit."""
        unit, self.comparison = self.comparison, self.comparison.successor()
        self._least_choice = _CHOSEN
        return unit

    def end_unit(self) -> None:
        """Close a unit with the comparisons since the last one."""
        unit = self.cut_off()
        for output, rows in unit.drain_rows().items():
            self._rows.add(output, rows)
        self._units.add(unit)

    def fold(self) -> None:
        """Combine all units, after the last one."""
        if self.runner is not None:
            self.comparison = self._units.result()

    def update(
        self,
        batch: Batch,
        reference: Sequence[OutputArray],
        span: Span,
        *,
        truth: Sequence[OutputArray] | None = None,
        validity: Validity = UNRESTRICTED,
        replayed: Replayed | None = None,
    ) -> None:
        """Run the batch and compare it, unless the runtime is absent or has failed.

        `truth`: the float64 outputs, if computed for this batch, with their `validity`. `replayed`:
        computes reference and float64 outputs with the choices of the file.
        """
        self.outputs = None
        if self.runner is None:
            return
        try:
            with self.meter.watched():
                outputs = self.runner.run(batch)
            self.outputs = outputs
            self.meter.batches.add(self.runner.seconds, batch_size=span.count)
            least, replay = self._least_choice, None
            if replayed is not None and least and _chooses(reference, outputs, least):
                replay = replayed(batch)
                if replay is not None:
                    reference, truth = replay.outputs, truth and replay.truth
                else:
                    by_far = _chooses(reference, outputs, _CHOSEN_BY_FAR)
                    self._least_choice = None if by_far else _CHOSEN_BY_FAR
            outputs = self.comparison.update(reference, outputs, span)
            if truth is not None:
                self.comparison.update_noise(
                    truth,
                    reference,
                    outputs,
                    samples=span.count,
                    start=span.start,
                    validity=validity,
                )
                if replay is not None:
                    self.comparison.floor.update_replayed(
                        truth,
                        reference,
                        replay.draws,
                        samples=span.count,
                        start=span.start,
                        validity=validity,
                    )
            else:
                self.comparison.update_outliers(reference, outputs, span)
        except Exception as error:
            self.fail_on(batch, error, compute=self.runner.run)

    def probe(
        self, batch: Batch, reference: Sequence[OutputArray], keys: Sequence[str | None] = ()
    ) -> None:
        """Run a batch of another size, to check the output shapes and the names in `keys`, under
        which the model returns the outputs.

        A hard-coded batch size is not detected if all batches have that size.
        """
        if self.runner is None:
            return
        try:
            self.comparison.note_example(reference)
            self._check.check_keys(keys)
            with self.meter.watched():
                self.compute(batch, reference)
            self.meter.first(self.runner.seconds, batch_size=len(next(iter(batch.values()))))
        except Exception as error:
            self.fail_on(batch, error, compute=self.runner.run)

    def compute(
        self,
        batch: Batch,
        reference: Sequence[OutputArray],
        *,
        by: Callable[[SessionRunner, Batch], list[OutputArray]] = SessionRunner.run,
    ) -> list[OutputArray]:
        """Return the outputs for an additional batch in the reference's shapes (`OutputCheck`).

        `by`: the method of the runner to use. Raises EvidenceError, OutputMismatch, and any
        exception of the runtime.
        """
        if self.runner is None:
            raise EvidenceError(
                f"{self.name} has no runner: {self.failure or self.absent_reason}. "
                "Measure it where it can run."
            )
        return self._check.check(reference, by(self.runner, batch))

    def takes_probe(self, name: str, batch: Batch) -> bool:
        """Return whether the runtime can run these inputs; record the name if it can't."""
        if self.runner is None:
            return False
        can_run = self.runner.has_probe(batch)
        if not can_run:
            self._unprobed.append(name)
        return can_run

    def examined_limit(self, policy: Policy) -> int:
        """Return how many samples, and how many probes, are computed again.

        They are few if a bound is exceeded, and none if it is exceeded 10 times: more would not
        change the verdict.
        """
        if self._examined_limit is None and self.runner is not None:
            self._noise = self.comparison.floor.results()
            far = is_refused(policy, self.name, self._noise, times=_FAR)
            refused = far or is_refused(policy, self.name, self._noise)
            self._examined_limit = (
                0 if far else _MAX_EXAMINED_IF_REJECTED if refused else MAX_EXAMINED
            )
        return self._examined_limit or 0

    def has_settled(self, policy: Policy) -> bool:
        """Return whether a sample exceeds a bound after it was computed again. Then only few more
        samples and probes are computed again."""
        if self.runner is None or not self.examined_limit(policy):
            return False
        noise = {
            name: record.model_copy(update={"settled": self.comparison.settled.get(name)})
            for name, record in self._noise.items()
            if record is not None
        }
        if is_refused(policy, self.name, noise):
            self._examined_limit = _MAX_EXAMINED_IF_REJECTED
        return self._examined_limit == _MAX_EXAMINED_IF_REJECTED

    def is_clearly_refused(self, policy: Policy) -> bool:
        """Return whether more runs under random rounding can't make the runtime pass."""
        if self.runner is None:
            return True
        noise = self.comparison.floor.results()
        return is_refused(policy, self.name, noise, few_draws=True)

    def leave_out(self, samples: int) -> None:
        """Count doubtful samples that are not computed again."""
        self._unexamined += samples

    def excuse(self, sample: int, run: Sequence[OutputArray | None], *, drawn: bool) -> None:
        """Accept the integers of a correct run, by output, as possible values of a sample.

        `drawn`: whether it was a run under random rounding.
        """
        self._look_draws += drawn
        self.comparison.accept_tie(sample, run)

    def accept_variants(self, look: RoundingVariants) -> None:
        """Accept the variants of a doubtful sample that was computed again."""
        if self.runner is None:
            return
        self._second_looks += 1
        self._look_draws += len(look.draws)
        try:
            self.comparison.accept_variants(look, self.runner)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Record the failure, or that the runtime does not support the model; close the runner."""
        if isinstance(error, RuntimeAbsent) and self.selected.runtime.runs == "model":
            self.absent_reason = str(error)
        else:
            self.failure = describe_failure(error)
            self.failure_code, self.failure_params = classify_failure(error)
            self.unusable = isinstance(error, RuntimeUnusable | ImportError)
            if isinstance(error, PlainSessionFailed):
                self.plain_failure = self.failure
        self.close()

    def fail_on(
        self, batch: Batch, error: Exception, *, compute: Callable[[Batch], object]
    ) -> None:
        """Record a failure on a batch, with the batch sizes that `compute` accepts, if any."""
        if isinstance(error, RuntimeUnusable):
            self.fail(error)
            return
        sizes = find_batch_sizes(error, batch, compute)
        self.failure = describe_failure(error)
        self.failure_code, self.failure_params = classify_failure(error)
        if sizes:
            detail = self.failure_params.get("detail", f"fails: {self.failure}")
            self.failure_params = {"batch_sizes": list(sizes), "detail": detail}
            self.failure_code = "only_batches"
        self.close()

    def close(self) -> None:
        """Release the resources of the runtime; record a failure to do so."""
        runner, self.runner, self.outputs = self.runner, None, None
        self.comparison = self.comparison.emptied()
        try:
            if runner is not None:
                runner.session.close()
            self.selected.close()
        except Exception as error:
            self.failure = self.failure or describe_failure(error)

    def evidence(self) -> RuntimeEvidence:
        """Return the record of an absent, failed or measured runtime."""
        if self.runner is not None:
            try:
                session = self.runner.session
                return self._measured(session.proof(), live=session.live)
            except Exception as error:  # no proof, or one that is invalid in a record
                self.fail(error)
        return RuntimeEvidence(
            runtime=self.name,
            provider_requested=self.selected.promises.provider,
            absent_reason=self.absent_reason,
            failure=self.failure,
            failure_code=self.failure_code,
            failure_params=self.failure_params,
            plain_failure=self.plain_failure,
            unusable=self.unusable,
            identity=self.selected.identity(),
        )

    def _measured(self, proof: Proof, *, live: bool) -> RuntimeEvidence:
        return RuntimeEvidence(
            runtime=self.name,
            provider_requested=self.selected.promises.provider,
            providers_active=proof.providers_active,
            nodes_per_provider=proof.nodes_per_provider,
            fallback_nodes=proof.fallback_nodes,
            cpu_nodes=proof.cpu_nodes,
            cpu_time_share=proof.cpu_time_share,
            session_options=proof.session_options,
            plain_failure=proof.plain_failure,
            outputs=self._outputs(),
            has_other_lengths=self.comparison.has_other_lengths,
            latency=self.meter.batches.result() if live else None,
            memory_bytes=self.meter.memory_bytes(proof) if live else None,
            cost=self.meter.cost(proof) if live else None,
            probes=tuple(self.probes),
            unexamined=self._unexamined,
            second_looks=self._second_looks,
            look_draws=self._look_draws,
            unprobed=tuple(self._unprobed),
            concurrency=self.concurrency,
            identity=self.selected.identity(proof),
        )

    def sample_rows(self) -> dict[str, OutputRows]:
        """Return one row per sample by output; requires `fold`. Empty without a runner."""
        if self.runner is None:
            return {}
        return {
            output: OutputRows(self._rows, output, classes)
            for output, classes in self.comparison.has_classes.items()
            if output in self._rows
        }

    def _outputs(self) -> tuple[OutputParity, ...]:
        outputs = self.comparison.result()
        if not self.stability:
            return outputs
        return tuple(
            output.model_copy(update={"stability": stability})
            for output, stability in zip(outputs, self.stability, strict=True)
        )

    def floor_state(self) -> Any:
        """Return the noise floor as JSON values, for processes that measure later samples."""
        return to_plain(self.comparison.floor)

    def use_floor(self, floor: Any) -> None:
        """Use the noise floor of another process. Raises EvidenceError."""
        measured = from_plain(floor)
        if not isinstance(measured, NoiseFloor):
            raise EvidenceError(f"there is no noise floor for {self.name}. Measure unit 0 again.")
        self.comparison.floor.copy_state(measured)

    def unit_result(self) -> RuntimeUnitResult:
        """Return the result since the last unit and begin the next one."""
        compared, seconds, proof = self.cut_off(), self.meter.batches.drain(), self.run_proof()
        if proof is not None:
            return RuntimeUnitResult(proof=proof, seconds=seconds, compared=compared.state())
        return RuntimeUnitResult(
            absent_reason=self.absent_reason,
            failure=self.failure,
            failure_code=self.failure_code,
            failure_params=self.failure_params,
            unusable=self.unusable,
        )

    def run_proof(self) -> RunProof | None:
        """Return the proof of how the runtime ran so far; None without a runner or a proof."""
        if self.runner is None:
            return None
        try:
            return RunProof.from_proof(self.runner.session.proof())
        except Exception as error:
            self.fail(error)
            return None

    def merge(self, result: RuntimeUnitResult, *, proof: RunProof | None, anywhere: bool) -> None:
        """Add the result of another process for the next unit; a mismatch is recorded as a failure.

        `proof`: of this process. `anywhere`: allow other libraries and devices.
        """
        if self.runner is None:
            return
        try:
            _verify(self.name, result, expected=proof, anywhere=anywhere)
            self.comparison.take(result.compared)
        except Exception as error:
            self.fail(error)
            if result.failure is not None:
                self.failure_code = result.failure_code
                self.failure_params = result.failure_params
            return
        self.meter.batches.extend(result.seconds)
        self.end_unit()


def _verify(
    name: str, part: RuntimeUnitResult, *, expected: RunProof | None, anywhere: bool
) -> None:
    reason = part.failure or part.absent_reason
    if reason is not None:
        raise RuntimeUnusable(reason) if part.unusable else EvidenceError(reason)
    proof = part.proof
    if anywhere and expected is not None and proof is not None:
        expected, proof = expected.anywhere(), proof.anywhere()
    if expected is None or proof != expected:
        there = proof.to_plain() if proof else {}
        here = expected.to_plain() if expected else {}
        unlike = {key: value for key, value in here.items() if there.get(key) != value}
        raise EvidenceError(
            f"{name} ran differently in another process: there {there}, here {unlike}. Use the "
            "same devices and libraries in all processes."
        )
