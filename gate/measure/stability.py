"""Instrument: repeat samples, individually and in other batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from gate.data.reader import length
from gate.data.samples import SampleSet
from gate.errors import (
    EvidenceError,
    GateError,
    OutputMismatch,
    RuntimeUnusable,
    describe_failure,
)
from gate.measure.context import MeasurementContext
from gate.measure.job import MeasurementJob
from gate.measure.noise_floor import DRAWS, MORE_DRAWS
from gate.measure.runtime_measurement import Replayed, RuntimeMeasurement
from gate.measure.session_runner import SessionRunner
from gate.records.instruments import EPSILON, StabilityParity
from gate.statistics.accumulators import by_column, columns, distances, worse_columns, worst_ratio
from gate.statistics.error_groups import Floats, representable
from gate.storage.arrays import Batch, OutputArray

# With dropout, BatchNorm in training mode or a hard-coded batch size in its graph, a runtime
# returns different outputs for a sample on each run or in another batch.


_SUSPICIOUS = 4.0
"""Above this ratio the reference is also run under random rounding."""

_UNCLEAR = (16.0, 64.0)
"""Between these ratios more runs under random rounding are made. Fixed rather than taken from the
policy, because the evidence must not depend on bounds."""

_STEP = 0.9 * EPSILON
"""About the smallest change of 1 - p, and of log(p), for p just below 1."""

_LAST_ROUNDING = 2.5
"""Largest change due to the last rounding of a result, in units of its rounding."""


Compute = Callable[[Batch, Sequence[OutputArray]], list[OutputArray]]
"""Runs a batch and checks number, dtype and shapes of the outputs against the reference's."""


@dataclass(frozen=True)
class _Part:
    """A batch of some samples with the outputs of the reference."""

    start: int
    batch: Batch
    expected: list[OutputArray]

    @property
    def size(self) -> int:
        return length(self.batch)


class StabilityInstrument:
    """Measures `stability` of every open runtime."""

    needs_runtimes = True
    title = "stability"

    def __init__(self, context: MeasurementContext) -> None:
        self._context = context
        self.cost = StabilityReference.cost(context)

    @staticmethod
    def is_enabled(job: MeasurementJob) -> bool:
        """Return whether the policy repeats samples."""
        return bool(job.policy.instruments.stability_samples)

    def run(self, runtimes: Sequence[RuntimeMeasurement], advance: Callable[[int], None]) -> None:
        """Repeat the samples in every runtime. A runtime that can't run other batch sizes has
        failed."""
        live = [each for each in runtimes if each.runner and each.runner.session.live]
        if live:
            reference = StabilityReference(self._context)
        for runtime in live:
            cached = partial(runtime.compute, by=SessionRunner.answer)
            replayed = partial(self._context.replayed, runtime.name)
            try:
                runtime.stability = reference.compare(
                    runtime.compute, run_smaller=cached, replayed=replayed
                )
            except Exception as error:
                runtime.fail(error)
        advance(self.cost)

    def evidence(self) -> Mapping[str, Any]:
        """Return nothing: each runtime has its own record."""
        return {}


class StabilityReference:
    """The outputs of the reference, computed once; `compare` measures one runtime.

    The baseline is one batch of all samples. They are run again in batches of size one, of
    `instruments.probe_batch_sizes` and of the measurement's size, if there are enough samples. A
    file with a fixed batch axis is run only with that size, which measures repeatability alone.

    A sample is found in an output along every axis that grows with the batch. An output that does
    not grow is compared as a whole. An output whose shape depends on the data is only repeated; its
    batches are left to the probes. A single sample has no other batch: batch invariance is None.
    """

    def __init__(self, context: MeasurementContext) -> None:
        """Raises EvidenceError if the reference can't compute the samples."""
        self._context = context
        self._bases = _bases(context)
        self._parts: list[_Part] = []
        self._truth = [context.baseline(base.batch) for base in self._bases]
        if not context.binding.fixed:
            self._parts = list(_smaller_batches(context, self._bases[0]))
        self._samples = sum(base.size for base in self._bases)
        self._alone = not context.binding.fixed and self._samples < 2
        self._units = [self._unit(index) for index in range(len(self._bases[0].expected))]
        self._rounded: list[list[list[OutputArray]]] = []
        """Outputs of the runs under random rounding so far, by run, batch and output."""
        self._rounding = cache(self._measure_rounding)

    @property
    def batches(self) -> Sequence[_Part]:
        """All batches: the baseline, then the smaller ones."""
        return [*self._bases, *self._parts]

    def crossed(self, part: _Part, outputs: Sequence[OutputArray]) -> int:
        """Return how many samples of a batch got the output of another sample.

        Such an output is closer to the reference for another sample than for this one, and differs
        from the latter by more than rounding explains.
        """
        crossed = np.zeros(part.size, bool)
        for index, output in enumerate(outputs):
            slices = self._part_slices(index, part)
            bases = [base.expected[index] for base in self._bases]
            by_sample = all(
                array.ndim and len(array) == base.size
                for array, base in zip(bases, self._bases, strict=True)
            )
            if slices is None or not by_sample or output.shape[:1] != (part.size,):
                continue
            rows = np.asarray(output, np.float64).reshape(part.size, 1, -1)
            expected = np.concatenate([array[:, *slices[1:]] for array in bases]).astype(np.float64)
            expected = expected.reshape(1, len(expected), -1)
            if not rows.shape[-1]:
                continue
            differences = np.nan_to_num(np.abs(rows - expected), nan=np.inf).max(axis=-1)
            distance = differences[np.arange(part.size), part.start + np.arange(part.size)]
            beyond = distance > _UNCLEAR[0] * self._units[index].max()
            crossed |= beyond & (differences.min(axis=1) < distance / 2)
        return int(crossed.sum())

    @staticmethod
    def cost(context: MeasurementContext) -> int:
        """Return how many samples `compare` runs in one runtime, including the baseline twice."""
        count, sizes = _count(context), _sizes(context)
        return 2 * count + sum(count // size * size for size in sizes)

    def compare(
        self,
        compute: Compute,
        *,
        run_smaller: Compute | None = None,
        run_again: Compute | None = None,
        replayed: Replayed = lambda _: None,
    ) -> tuple[StabilityParity, ...]:
        """Measure a runtime and return one record per output.

        `run_smaller`: runs the smaller batches, possibly from a cache; `run_again`: runs the
        repeated baseline; both default to `compute`. `replayed`: runs the reference with the
        choices that the runtime makes on a batch. An output whose number of rows differs because of
        a choice is not compared with other batches; one with a large change is compared with the
        reference that makes the same choices.

        Raises EvidenceError if the runtime can't run a batch size, or returns other shapes."""
        first = [_outputs(compute, base, replayed) for base in self._bases]
        smaller = [_outputs(run_smaller or compute, part, replayed) for part in self._parts]
        changes, sizes = self._changes(first[0], smaller)
        if any(map(self._is_far, changes, range(len(changes)))):
            errors = [
                _errors(outputs, part, replayed)
                for outputs, part in zip(
                    (first[0], *smaller), (self._bases[0], *self._parts), strict=True
                )
            ]
            beyond, _ = self._changes(errors[0], errors[1:])
            changes = [np.minimum(*pair) for pair in zip(changes, beyond, strict=True)]
        repeats = [_outputs(run_again or compute, base, replayed) for base in self._bases]
        records = []
        for index, base_unit in enumerate(self._units):
            repeated = np.zeros(1)
            for before, after in zip(first, repeats, strict=True):
                repeated = worse_columns(repeated, by_column(before[index], after[index]))
            unit, draws = base_unit, 0
            if self._is_far(changes[index], index):
                unit, draws = worse_columns(base_unit, self._rounding(DRAWS)[index]), DRAWS
                # A column that changes in steps may not have changed in three runs.
                at_most = worst_ratio(changes[index], np.maximum(unit, EPSILON))
                if worst_ratio(changes[index], unit) > _UNCLEAR[0] and at_most <= _UNCLEAR[1]:
                    draws = MORE_DRAWS
                    unit = worse_columns(base_unit, self._rounding(draws)[index])
            records.append(
                StabilityParity(
                    samples=self._samples,
                    batch_sizes=tuple(sorted(sizes[index] | {base.size for base in self._bases})),
                    repeatability=float(repeated.max()),
                    batch_invariance=None if self._alone else float(changes[index].max()),
                    unit=float(unit.max()),
                    repeatability_ratio=_ratio(repeated, unit),
                    batch_invariance_ratio=None if self._alone else _ratio(changes[index], unit),
                    rounding_draws=min(draws, len(self._rounded)) or None,
                )
            )
        return tuple(records)

    def _is_far(self, change: Floats, index: int) -> bool:
        return worst_ratio(change, self._units[index]) > _SUSPICIOUS

    def _changes(
        self, baseline: Sequence[OutputArray], smaller: Sequence[Sequence[OutputArray]]
    ) -> tuple[list[Floats], list[set[int]]]:
        """Return the largest change of each output between baseline and smaller batches, by column,
        and the sizes of the compared batches."""
        base = self._bases[0]
        changes = [np.zeros(1)] * len(self._units)
        sizes: list[set[int]] = [set() for _ in self._units]
        for part, outputs in zip(self._parts, smaller, strict=True):
            for index, output in enumerate(outputs):
                slices = self._part_slices(index, part)
                pairs = ((output, part), (baseline[index], base))
                if slices is None or any(a.shape != b.expected[index].shape for a, b in pairs):
                    continue
                sizes[index].add(part.size)
                change = by_column(output, baseline[index][slices])
                changes[index] = worse_columns(changes[index], change)
        return changes, sizes

    def _part_slices(self, index: int, part: _Part) -> tuple[slice, ...] | None:
        """Return the position of the part in the baseline's output, derived from the shapes."""
        base = self._bases[0]
        baseline_shape, part_shape = base.expected[index].shape, part.expected[index].shape
        if len(baseline_shape) != len(part_shape):
            return None
        slices = []
        for long, short in zip(baseline_shape, part_shape, strict=True):
            if long == short:
                slices.append(slice(None))
            elif long * part.size == short * base.size:
                rows = long // base.size
                slices.append(slice(part.start * rows, part.start * rows + short))
            else:
                return None
        return tuple(slices)

    def _unit(self, index: int) -> Floats:
        """Return `StabilityParity.unit` by column; infinite if the reference itself is unstable.

        Integers have no rounding error, so their unit is the change of the reference.
        """
        unit = np.zeros(1)
        for part in self._parts:
            slices = self._part_slices(index, part)
            if slices is not None:
                inside = self._bases[0].expected[index][slices]
                unit = worse_columns(unit, by_column(part.expected[index], inside))
        for base, truth in zip(self._bases, self._truth, strict=True):
            reference = base.expected[index]
            if reference.dtype.kind == "f":
                unit = worse_columns(unit, _rounding(reference, truth[index] if truth else None))
        return unit

    def _measure_rounding(self, draws: int) -> list[Floats]:
        """Return the effect of random rounding on each output, by column: the median of several
        runs, or zeros if the model can't run under random rounding."""
        batches = [base.batch for base in self._bases]
        try:
            for draw in range(len(self._rounded), draws):
                self._rounded.append([self._context.rounded_run(b, draw=draw) for b in batches])
        except GateError:
            return [np.zeros(1)] * len(self._units)
        runs = self._rounded[:draws]
        return [self._change_by_rounding(runs, index) for index in range(len(self._units))]

    def _change_by_rounding(self, runs: list[list[list[OutputArray]]], index: int) -> Floats:
        draws, inverse = [], np.zeros(1)
        for run in runs:
            change = np.zeros(1)
            for outputs, base in zip(run, self._bases, strict=True):
                reference = base.expected[index]
                if reference.dtype.kind != "f" or outputs[index].shape != reference.shape:
                    return np.zeros(1)
                change = worse_columns(change, by_column(outputs[index], reference))
                inverse = worse_columns(inverse, _inverse(outputs[index], reference))
            draws.append(change)
        for part in self._parts:
            slices = self._part_slices(index, part)
            if slices is not None:
                inside = self._bases[0].expected[index][slices]
                inverse = worse_columns(inverse, _inverse(part.expected[index], inside))
        middle = np.asarray(np.nan_to_num(np.median(draws, axis=0), posinf=0.0))
        # A column that changes in steps may be unchanged in most runs.
        steps = (inverse > 0.0) & (inverse <= 1.0 / _STEP)
        return worse_columns(middle, np.where(steps, EPSILON, 0.0))


def _inverse(left: OutputArray, right: OutputArray) -> Floats:
    """Return 1 / the smallest change of each column above the last rounding; 0 without any."""
    change = distances(left, right)
    counted = change > _LAST_ROUNDING * EPSILON * np.abs(np.asarray(right, np.float64))
    return columns(np.divide(1.0, change, out=np.zeros_like(change), where=counted))


def _ratio(change: Floats, unit: Floats) -> float | None:
    """Return `worst_ratio`; None if something changed and the reference itself is unstable."""
    unstable = bool(np.isinf(unit).any() and change.any())
    return None if unstable else worst_ratio(change, unit)


def _bases(context: MeasurementContext) -> list[_Part]:
    """Return the baseline: one batch of all samples, or of the measurement's size if the reference
    does not accept more; for a fixed batch axis, all full batches."""
    count, measured = _count(context), context.binding.batch_size
    if context.binding.fixed:
        return list(_parts(context, measured, count))
    try:
        return list(_parts(context, count, count))
    except EvidenceError:
        return list(_parts(context, measured, measured))


def _parts(context: MeasurementContext, size: int, count: int) -> Iterator[_Part]:
    for start, batch in zip(
        range(0, count, size), _from_first(context).batches(size), strict=False
    ):
        yield _Part(start, batch, context.answers.reference(batch))


def _smaller_batches(context: MeasurementContext, base: _Part) -> Iterator[_Part]:
    """Yield the samples of the baseline in smaller batches, without sizes that the reference can't
    run."""
    for size in _sizes(context):
        for start in range(0, base.size // size * size, size):
            batch = {name: array[start : start + size] for name, array in base.batch.items()}
            try:
                expected = context.answers.reference(batch)
            except EvidenceError:
                break
            yield _Part(start, batch, expected)


def _from_first(context: MeasurementContext) -> SampleSet:
    """Return the samples from `context.first` on, or earlier if too few would be left."""
    total, unit = len(context.samples), context.binding.batch_size if context.binding.fixed else 1
    latest = max(total - context.policy.instruments.stability_samples, 0) // unit * unit
    return context.samples.slice(min(context.first, latest), total)


def _count(context: MeasurementContext) -> int:
    count, total = context.policy.instruments.stability_samples, len(context.samples)
    if context.binding.fixed:
        size = context.binding.batch_size
        return min(math.ceil(count / size) * size, total)
    return min(count, total)


def _sizes(context: MeasurementContext) -> list[int]:
    """Return the batch sizes to compare with the baseline's."""
    if context.binding.fixed:
        return []
    sizes = {1, context.binding.batch_size, *context.policy.instruments.probe_batch_sizes}
    return sorted(size for size in sizes if size < _count(context))


def _outputs(compute: Compute, part: _Part, replayed: Replayed) -> list[OutputArray]:
    try:
        try:
            return compute(part.batch, part.expected)
        except OutputMismatch:
            replay = replayed(part.batch)
            if replay is None:
                raise
            return compute(part.batch, replay.outputs)
    except RuntimeUnusable:  # for example a server that ended, which is no evidence about the file
        raise
    except Exception as error:
        reason = describe_failure(error).rstrip(".")
        raise EvidenceError(
            f"a batch of {part.size} samples can't be run: {reason}. A batch size is probably "
            "hard-coded: use x.shape[0] unconverted, and export with dynamic_batch: true."
        ) from error


def _errors(outputs: Sequence[OutputArray], part: _Part, replayed: Replayed) -> list[OutputArray]:
    """Return the differences from the reference with the same choices.

    An output of another shape, and elements whose difference is not finite, are left unchanged.
    """
    replay = replayed(part.batch)
    expected = part.expected if replay is None else replay.outputs
    return [
        _error(output, reference) if output.shape == reference.shape else output
        for output, reference in zip(outputs, expected, strict=True)
    ]


def _error(output: OutputArray, expected: OutputArray) -> OutputArray:
    if output.dtype.kind in "iu":  # float64 can't represent all differences above 2^53
        return np.asarray(np.subtract(output, expected))
    with np.errstate(all="ignore"):
        difference = np.subtract(output, expected, dtype=np.float64)
    return np.where(np.isfinite(difference), difference, output)


def _rounding(reference: OutputArray, truth: OutputArray | None) -> Floats:
    """Return the larger of max|r32 - r64| and 2^-24 max|r32| by column, over finite elements."""
    r32 = reference.astype(np.float64)
    finite = np.isfinite(r32)
    errors = EPSILON * np.abs(np.where(finite, r32, 0.0))
    if truth is not None and truth.shape == reference.shape:
        r64 = representable(truth, reference)
        valid = finite & np.isfinite(r64)
        errors = np.maximum(errors, np.abs(np.where(valid, r32, 0.0) - np.where(valid, r64, 0.0)))
    return columns(errors)
