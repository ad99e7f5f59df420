"""Expected outputs of one probe, and the comparison of a runtime with them."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gate.errors import GateError, OutputMismatch, RuntimeUnusable, describe_failure
from gate.measure.context import MeasurementContext
from gate.measure.noise_floor import DRAWS, NoiseStatistics
from gate.measure.undefined_values import attends_nothing, explained, nan_is_lost, undefined_casts
from gate.probes.branches import PROBE_SCALE, perturb_rounding
from gate.probes.probe import Probe, SampleProfile
from gate.records.instruments import UNDERFLOW, BeyondRange, ProbeResult, UndefinedCast
from gate.records.runtime import RuntimeName
from gate.reference.cache import agree
from gate.reference.validity import is_near
from gate.runtimes.recording_format import row_digests
from gate.statistics.error_groups import representable
from gate.storage.arrays import Batch, OutputArray

_SUSPICIOUS_RATIO = 4.0
"""Noise ratio above which the conditioning of the probe is examined."""

_SUSPICIOUS_DIFF = 1e-4
"""Relative difference above which it is examined if there is no float64 reference."""

_NEAR_TIE_SHARE = 0.01
"""Share of an output's integers that may be near-ties although three runs did not change them."""

_MORE_RUNS_FROM, _MORE_RUNS_UP_TO = 8.0, 1024.0
"""Ratios between which more runs are made: with a thousand columns, some have a small error in all
three runs by chance."""

_MAX_ELEMENTS = 2**22
"""Largest number of output elements for which more runs are made. Larger outputs have enough."""

_MAX_DRAWS = 32
"""Largest number of runs with random rounding."""

_MAX_SHARED = 2**20
"""Largest number of output elements whose runs are shared by several probes: 32 take 128 MiB."""

_ALLOWED_ROUNDING_MOVES = 16.0
"""Allowed difference in units of what random rounding changes, if there is no float64 reference."""

_OVERFLOW_FACTOR = 10.0 * (1.0 - 1e-6)
"""Multiple of the samples' range from which `instruments.probe_beyond_range` decides about an
overflow. A factor of ten is not exact in float32."""

_MAX_OVERFLOW_ERROR = 1e-3
"""Largest relative distance from the float64 value where PyTorch overflows in float32. There is no
rounding error of PyTorch to compare with."""

_MIN_SCALE = 2.0**-96
"""Samples with smaller outputs use the scale of the whole output, because a value that may be
flushed to zero can't serve as a scale."""


Mask = NDArray[np.bool_]

Compute = Callable[[Batch, Sequence[OutputArray]], list[OutputArray]]
"""Computes a batch and checks the outputs' number, dtypes and shapes against the reference's."""


class _Numbers(NamedTuple):
    """The worst numbers over all outputs. `ratio` is None without a float64 reference."""

    ratio: float | None
    relative: float
    class_differs: bool = False
    """True if an integer or bool differs, or NaN or infinity occurs on one side only."""

    @property
    def is_suspicious(self) -> bool:
        if self.ratio is None:
            return not self.relative <= _SUSPICIOUS_DIFF
        return not self.ratio <= _SUSPICIOUS_RATIO


class SampleRuns:
    """Runs of a few samples with random rounding, shared by all probes that consist of these
    samples.

    A batch of 48 may contain each of 8 samples six times. If the float32 outputs show that a sample
    does not depend on the rest of the batch, rounding affects every copy in the same way.
    """

    def __init__(self, context: MeasurementContext, rows: Batch) -> None:
        """Store the samples; nothing is run yet."""
        self._context = context
        self._rows = rows
        self._runs: dict[int, list[OutputArray]] = {}

    def outputs_for(
        self, batch: Batch, reference: list[OutputArray], draws: range
    ) -> list[list[OutputArray]]:
        """Return the outputs of the runs, assembled for `batch`; `reference` holds its outputs.

        Empty if the batch contains other inputs, if a sample's outputs depend on the batch, or if
        the runs would take too much memory.
        """
        indices = self._find_rows(batch)
        alone = self._reference
        if not indices or not alone or len(alone) != len(reference):
            return []
        if not all(agree(r[indices], output) for r, output in zip(alone, reference, strict=True)):
            return []
        missing = [draw for draw in draws if draw not in self._runs]
        new_runs = perturb_rounding(self._context, self._rows, draws=missing) if missing else []
        if len(new_runs) < len(missing) or any(
            run.shape != r.shape for runs in new_runs for run, r in zip(runs, alone, strict=True)
        ):
            return []
        self._runs.update(zip(missing, new_runs, strict=True))
        return [[output[indices] for output in self._runs[draw]] for draw in draws]

    def _find_rows(self, batch: Batch) -> list[int]:
        """Return the index of each sample of a batch; empty if any is not in `rows`."""
        indices = [self._by_digest.get(digest.tobytes()) for digest in row_digests(batch)]
        matched = [index for index in indices if index is not None]
        return matched if len(matched) == len(indices) else []

    @cached_property
    def _by_digest(self) -> dict[bytes, int]:
        return {digest.tobytes(): index for index, digest in enumerate(row_digests(self._rows))}

    @cached_property
    def _reference(self) -> list[OutputArray]:
        """Return the reference's outputs of the samples; empty if large or not by sample."""
        try:
            outputs = self._context.answers.reference(self._rows)
        except GateError:
            return []
        count = len(self._by_digest)
        by_sample = all(r.ndim > 0 and len(r) == count for r in outputs)
        return outputs if by_sample and sum(r.size for r in outputs) <= _MAX_SHARED else []


class ExpectedOutputs:
    """The model's outputs for a probe.

    A probe can be *ill-conditioned*: a constant image before InstanceNorm, equal scores before
    argmax, a value at the edge of a branch. PyTorch may then be exact by chance, while a correct
    runtime deviates by amplified rounding. A runtime with a suspicious difference is therefore
    compared again, with a noise floor from random rounding: the floor of an element is the largest
    error of PyTorch and of all these runs. Integers, bools, NaN and infinities that change under
    random rounding are not compared.

    This hides no branch that the trace baked in, unless the probe lies within rounding of the
    condition, where the model itself has no defined result (zeros stay exactly zero). An output far
    larger than the samples' is judged by the same rule: random rounding shows how such a network
    amplifies rounding errors.

    If the samples of a probe have different scales (`Probe.scaled_by_sample`), each is judged in
    its own. Only a suspicious difference costs further runs. The thresholds are constants, not
    policy fields, because the evidence must not depend on bounds. Only runs beyond the third are
    left out for a difference that is far below the bound.
    """

    def __init__(
        self,
        context: MeasurementContext,
        probe: Probe,
        profile: SampleProfile | None = None,
        *,
        shared: SampleRuns | None = None,
    ) -> None:
        """Compute the reference outputs, or set `inapplicable` to the reason why there are none.

        profile: range of the samples; None: no sample counts as far beyond it. shared: runs with
        random rounding that several probes share.
        """
        self.probe = probe
        self._shared = shared
        self._profile = profile
        self.inapplicable: str | None = None
        self._context = context
        self._more = True
        """False if no further runs are made: they are not needed, or the runs replay the choices of
        a file, which further runs would not."""
        self._is_refused = False
        """True if the runtime has already failed on the samples, so further runs change nothing."""
        self._reference: list[OutputArray] = []
        self._truth: list[OutputArray] | None = None
        self._excluded: list[Mask] = []
        """Per output, a mask of the elements that are not compared; empty: all are compared."""
        try:
            self._reference = context.answers.reference(probe.batch)
        except GateError as error:
            cause = error.__cause__
            self.inapplicable = describe_failure(cause if isinstance(cause, Exception) else error)
        else:
            self._truth = self._valid_truth(
                _usable_truth(self._reference, context.baseline(probe.batch))
            )
            if probe.emptied and attends_nothing(context, probe.batch):
                self.inapplicable = "nothing_attended"
            elif probe.finite and not _finite(self._reference):
                self.inapplicable = "not_finite"

    def _valid_truth(self, truth: list[OutputArray] | None) -> list[OutputArray] | None:
        """Return `truth`, with float32 outputs wherever float64 computes another function here.

        That may be the case on this probe alone. Runs are made only where float64 is far off.
        """
        if truth is None or all(map(is_near, truth, self._reference)):
            return truth
        return self._context.truth.validity.checked(truth, self._reference, self._runs)

    def parity(
        self,
        compute: Compute,
        *,
        runtime: RuntimeName | None = None,
        examine: bool = True,
        refused: bool = False,
    ) -> ProbeResult:
        """Return the record of one runtime. Any exception of `compute` is recorded as its failure,
        except RuntimeUnusable, which is raised.

        runtime: name of the runtime whose choices are replayed; None: none are. examine: whether
        runs with random rounding may be made. refused: True if the runtime has failed on the
        samples; then few runs are made.
        """
        if self.inapplicable is not None:
            return self._record(inapplicable=self.inapplicable)
        try:
            outputs = compute(self.probe.batch, self._reference)
        except RuntimeUnusable:
            raise
        except Exception as error:
            if self._is_rejected_by_model:
                return self._record(inapplicable="not_finite")
            return self._failure_record(error, compute, runtime)
        with np.errstate(all="ignore"):
            if self._is_rejected_by_model and not self._replaces_nan(outputs):
                return self._record(inapplicable="not_finite")
            numbers = self._numbers(outputs)
            if numbers.is_suspicious and not examine:
                return self._unexamined_record(outputs, numbers)
            record = None
            if numbers.is_suspicious:
                record = self._compare_with_replay(compute, runtime)
                record = record or self._compare_with_first_run(outputs, numbers)
            few = numbers.is_suspicious and refused
            if record is None:
                expected = self._without_further_runs() if few else self
                record = expected._evaluate(outputs, numbers)
            return record

    @property
    def _is_rejected_by_model(self) -> bool:
        """Return True if the model itself does not accept the input."""
        return self.probe.beyond and not all(np.isfinite(r).all() for r in self._reference)

    def _replaces_nan(self, outputs: list[OutputArray]) -> bool:
        """Return True if the file returns numbers where the model returns NaN."""
        lost = any(
            (_is_nan_lost(r, c) & ~self._overflows_alone(index, c)).any()
            for index, (r, c) in enumerate(zip(self._reference, outputs, strict=True))
        )
        return lost and not self._loses_nan

    def _overflows_alone(self, index: int, c: OutputArray) -> Mask:
        """Return where PyTorch overflows in float32 while a runtime matches the float64 value."""
        r = self._reference[index]
        if self._truth is None or r.dtype.kind != "f":
            return np.zeros(r.shape, np.bool_)
        truth = self._truth[index].astype(np.float64)
        near = np.abs(c.astype(np.float64) - truth) <= _MAX_OVERFLOW_ERROR * np.abs(truth)
        return np.asarray(~np.isfinite(r) & np.isfinite(truth) & near)

    @cached_property
    def _loses_nan(self) -> bool:
        """Return whether the file computes NaN and ONNX Runtime loses it."""
        with contextlib.suppress(Exception):  # ONNX Runtime may refuse the edited graph
            return nan_is_lost(self._context, self.probe.batch)
        return False

    def _failure_record(
        self, error: Exception, compute: Compute, runtime: RuntimeName | None
    ) -> ProbeResult:
        """Return the record of a runtime that raised `error`."""
        if isinstance(error, OutputMismatch):
            if not all(map(self._has_shapes, self._runs)):
                return self._record(inapplicable="rounding_changes_shapes")
            return self._compare_with_replay(compute, runtime) or self._record(failure=str(error))
        failure = describe_failure(error)
        return self._record(failure=failure, beyond_range=self._failure_on_empty_outputs(compute))

    def _compare_with_replay(
        self, compute: Compute, runtime: RuntimeName | None
    ) -> ProbeResult | None:
        """Compare with the model that makes the file's choices (`gate.reference.choices`).

        None if the file makes the model's choices or rounding does not explain the difference.
        """
        batch = self.probe.batch
        replay = runtime and self._context.replayed(runtime, batch, scale=PROBE_SCALE)
        if not replay:
            return None
        copied = copy.copy(self)
        copied._reference, copied._runs, copied._more = replay.outputs, replay.draws, False
        copied._truth = _usable_truth(replay.outputs, replay.truth)
        try:
            outputs = compute(batch, replay.outputs)
        except Exception:
            return None
        with np.errstate(all="ignore"):
            record = copied._evaluate(outputs, copied._numbers(outputs))
        if not replay.undefined or record.undefined:
            return record
        return record.model_copy(update={"undefined": replay.undefined})

    def _compare_with_first_run(
        self, outputs: list[OutputArray], numbers: _Numbers
    ) -> ProbeResult | None:
        """Compare with the floor of a single run, which further runs could only widen.

        None if this floor does not explain the difference.
        """
        record = self._limited_to(self._first_run)._evaluate(outputs, numbers)
        ratio = record.noise_ratio
        return record if ratio is not None and ratio <= _SUSPICIOUS_RATIO else None

    def _without_further_runs(self) -> ExpectedOutputs:
        """Return a copy for a runtime that has already failed, with the runs so far."""
        copied = self._limited_to(self._runs)
        copied._is_refused = True
        return copied

    def _limited_to(self, runs: list[list[OutputArray]]) -> ExpectedOutputs:
        """Return a copy that has these runs with random rounding and makes no others."""
        copied = copy.copy(self)
        copied._runs, copied._more = runs, False
        return copied

    def _unexamined_record(self, outputs: list[OutputArray], numbers: _Numbers) -> ProbeResult:
        """Return the record without further runs with random rounding."""
        copied = self._limited_to(self._runs if self.examined else [])
        return copied._evaluate(outputs, numbers).model_copy(update={"unexamined": True})

    def _evaluate(self, outputs: list[OutputArray], numbers: _Numbers) -> ProbeResult:
        """Return the record of these outputs.

        If they overflow far beyond the samples' range, the numbers are of the other elements.
        """
        record = self._compare(outputs, numbers)
        if record.relative_diff is None or record.relative_diff <= _SUSPICIOUS_DIFF:
            return record
        copied = copy.copy(self)
        copied._excluded, casts = self._find_uncompared(outputs)
        if any(mask.any() for mask in copied._excluded):
            record = copied._compare(outputs, copied._numbers(outputs))
            record = record.model_copy(update={"undefined": casts})
        overflow = [self._overflow(r, c) for r, c in zip(self._reference, outputs, strict=True)]
        elements = sum(int(mask.sum()) for mask in overflow)
        if record.relative_diff != math.inf or not elements:
            return record
        pairs = zip(copied._excluded, overflow, strict=True)
        copied._excluded = [np.asarray(mask | overflowed) for mask, overflowed in pairs]
        rest = copied._compare(outputs, copied._numbers(outputs))
        beyond_range = BeyondRange(
            kind="overflow",
            factor=float(self._range_factors[self._marked_samples(overflow)].min()),
            elements=elements,
            noise_ratio=rest.noise_ratio,
            relative_diff=0.0 if rest.inapplicable else rest.relative_diff,
        )
        return record.model_copy(update={"beyond_range": beyond_range})

    def _overflow(self, r: OutputArray, c: OutputArray) -> Mask:
        """Return where only the runtime is not finite, in samples far beyond the others.

        In an output that is not by sample, only if all samples are far beyond.
        """
        if r.dtype.kind != "f":
            return np.zeros(r.shape, np.bool_)
        overflow = np.isfinite(r) & ~np.isfinite(c)
        if self._by_sample(r):
            return overflow & self._far_samples.reshape(-1, *[1] * (r.ndim - 1))
        return np.asarray(overflow & self._far_samples.all())

    def _find_uncompared(
        self, outputs: list[OutputArray]
    ) -> tuple[list[Mask], tuple[UndefinedCast, ...]]:
        """Return a mask per output of elements not to compare, and the undefined conversions.

        The masks mark NaN that the runtime loses, and values that depend on conversions that are
        undefined in the file and in the model.
        """
        batch = self.probe.batch
        try:
            masks = [_is_nan_lost(r, c) for r, c in zip(self._reference, outputs, strict=True)]
            if any(mask.any() for mask in masks) and not self._loses_nan:
                masks = [np.zeros_like(mask) for mask in masks]
            casts, depends = undefined_casts(self._context, batch)
        except Exception:  # the file can't be examined: compare everything
            return [np.zeros(r.shape, np.bool_) for r in self._reference], ()
        if depends:
            quadruples = zip(self._reference, outputs, depends, masks, strict=True)
            masks = [mask | explained(r, c, runs) for r, c, runs, mask in quadruples]
        return masks, casts

    def _marked_samples(self, masks: list[Mask]) -> Mask:
        """Return the samples with a marked element."""
        rows = np.zeros(self.probe.size, np.bool_)
        for r, mask in zip(self._reference, masks, strict=True):
            rows |= mask.reshape(len(r), -1).any(axis=1) if self._by_sample(r) else mask.any()
        return rows

    def _failure_on_empty_outputs(self, compute: Compute) -> BeyondRange | None:
        """Return the cause if the runtime fails on samples for which the model returns empty
        outputs.

        None unless only samples far beyond the others make the runtime fail.
        """
        if self._profile is None or not self._far_samples.any():
            return None
        far = self._for_samples(self._far_samples)
        if far.inapplicable is not None or all(r.size for r in far._reference):
            return None
        factor = float(self._range_factors[self._far_samples].min())
        if self._far_samples.all():
            return BeyondRange(kind="no_rows", factor=factor)
        if self._profile.fixed:
            return None
        near = self._for_samples(~self._far_samples).parity(compute)
        return BeyondRange(
            kind="no_rows",
            factor=factor,
            noise_ratio=near.noise_ratio,
            relative_diff=0.0 if near.inapplicable else near.relative_diff,
            failure=near.failure,
        )

    def _for_samples(self, rows: Mask) -> ExpectedOutputs:
        """Return the expected outputs for a subset of the probe's samples."""
        if rows.all():
            return self
        batch = {name: np.ascontiguousarray(a[rows]) for name, a in self.probe.batch.items()}
        probe = replace(self.probe, size=int(rows.sum()), build=lambda: batch, factors=())
        return ExpectedOutputs(self._context, probe)

    @cached_property
    def _range_factors(self) -> NDArray[np.float64]:
        """Return by what factor each sample of the probe exceeds the range of the samples."""
        if self._profile is None:
            return np.zeros(self.probe.size)
        return self._profile.reach(self.probe)

    @property
    def _far_samples(self) -> Mask:
        """Return the mask of samples on which an overflow is weak evidence against the file."""
        return np.asarray(self._range_factors >= _OVERFLOW_FACTOR)

    def _compared_elements(
        self, index: int, truth: OutputArray | None, draws: Sequence[OutputArray]
    ) -> Mask:
        """Return the elements of an output that are compared: rounding does not change them."""
        decided = _is_decided(self._reference[index], truth, draws)
        return decided & ~self._excluded[index] if self._excluded else decided

    def _compare(self, outputs: list[OutputArray], numbers: _Numbers) -> ProbeResult:
        runs: dict[str, Any] = {}
        if numbers.is_suspicious and self._draws:
            numbers = self._numbers(outputs, self._draws)
            while self._more and self._may_be_rounding(outputs, numbers) and self._run_more():
                numbers = self._numbers(outputs, self._draws)
            no_truth = numbers.ratio is None and not numbers.class_differs
            if no_truth and all(self._rounding_moves_as_far(outputs)):
                return self._record(inapplicable="rounding_moves_output")
            is_cut = self._is_refused and self._may_be_rounding(outputs, numbers)
            runs = {"rounding_draws": len(self._runs), "unexamined": is_cut}
        if numbers.relative == 0.0 and not any(np.isfinite(r).any() for r in self._reference):
            return self._record(inapplicable="no_finite_number")
        return self._record(noise_ratio=numbers.ratio, relative_diff=numbers.relative, **runs)

    def _may_be_rounding(self, outputs: list[OutputArray], numbers: _Numbers) -> bool:
        """Return True if more runs may explain the difference by rounding.

        A few runs may underestimate the floor by chance. When boxes are equally likely, a run that
        was not made may select others, and with them other scores.
        """
        if not numbers.is_suspicious:
            return False
        ratio, is_small = numbers.ratio, sum(r.size for r in self._reference) <= _MAX_ELEMENTS
        # A file of reduced precision may be far beyond the rounding of float32.
        near_bound = self._context.policy.instruments.probe_noise_ratio / 4
        least = max(_MORE_RUNS_FROM, near_bound)
        if is_small and ratio is not None and least < ratio < _MORE_RUNS_UP_TO:
            return True
        if numbers.class_differs:
            return self._nearly_equal(outputs)
        return is_small and any(self._rounding_moves_as_far(outputs))

    def _record(self, **numbers: Any) -> ProbeResult:
        probe = self.probe
        return ProbeResult.model_validate(
            {"name": probe.name, "kind": probe.kind, "batch_size": probe.size, **numbers}
        )

    def _numbers(
        self, outputs: list[OutputArray], draws: Sequence[list[OutputArray]] | None = None
    ) -> _Numbers:
        """Compare outputs with the reference. `draws`: by output, the runs with random rounding."""
        draws = draws or [[]] * len(outputs)
        ratios, relatives = [0.0], [0.0]
        for index, (r, c) in enumerate(zip(self._reference, outputs, strict=True)):
            truth = self._truth[index] if self._truth is not None else None
            decided = self._compared_elements(index, truth, draws[index]) & ~self._overflows_alone(
                index, c
            )
            if (_differs(r, c) & decided).any():
                return _Numbers(
                    None if self._truth is None else math.inf, math.inf, class_differs=True
                )
            if r.dtype.kind != "f":
                continue
            compared = decided & np.isfinite(r)
            scale = self._scale(r, self._excluded[index] if self._excluded else None)
            near, far = _in_units(r, scale, compared), _in_units(c, scale, compared)
            relatives.append(_relative(near, far))
            if truth is not None:
                true = _in_units(truth, scale, compared)
                moved = [_in_units(draw, scale, compared) for draw in draws[index]]
                widest = _farthest_outputs(true, [near, *moved])
                ratios.append(_ratio(true, widest, far, columns=self._by_sample(r)))
        return _Numbers(None if self._truth is None else max(ratios), max(relatives))

    def _scale(self, r: OutputArray, left_out: Mask | None = None) -> NDArray[np.float64]:
        """Return the unit of each sample of an output: a power of two, so scaling is exact."""
        if not (self.probe.scaled_by_sample and self._by_sample(r) and r.size):
            return np.ones((), np.float64)
        counted = np.isfinite(r) if left_out is None else np.isfinite(r) & ~left_out
        rows = np.where(counted, np.abs(r), 0.0).astype(np.float64).reshape(len(r), -1)
        largest = rows.max(axis=1)
        scale = np.where(largest > _MIN_SCALE, np.exp2(np.frexp(largest)[1]), 1.0)
        return scale.reshape(-1, *[1] * (r.ndim - 1))

    def _by_sample(self, r: OutputArray) -> bool:
        return r.ndim > 0 and len(r) == self.probe.size

    @cached_property
    def _runs(self) -> list[list[OutputArray]]:
        """Return the outputs of each run with random rounding."""
        first = self._first_run
        return first and [*first, *self._run_perturbed(range(len(first), DRAWS))]

    @cached_property
    def _first_run(self) -> list[list[OutputArray]]:
        return self._run_perturbed(range(1))

    def _run_more(self) -> bool:
        """Double the number of runs, up to `_MAX_DRAWS`; return False if there are no more."""
        count = len(self._runs)
        draws = range(count, min(2 * count, _MAX_DRAWS))
        more = self._run_perturbed(draws) if draws else []
        self._runs += more
        return bool(more)

    def _run_perturbed(self, draws: range) -> list[list[OutputArray]]:
        batch = self.probe.batch
        runs = self._shared and self._shared.outputs_for(batch, self._reference, draws)
        return runs or perturb_rounding(self._context, batch, draws=draws)

    @property
    def examined(self) -> bool:
        """Return whether the model was run `DRAWS` times with random rounding."""
        return "_runs" in vars(self)

    @property
    def _draws(self) -> list[list[OutputArray]]:
        """Return by output the runs with the reference's shapes; empty if there are none."""
        runs = [run for run in self._runs if self._has_shapes(run)]
        return [list(arrays) for arrays in zip(*runs, strict=True)]

    def _nearly_equal(self, outputs: list[OutputArray]) -> bool:
        """Return True if more runs may show that all differing integers are near-ties.

        That is so if few of each output differ, or if the runs have changed most of them.
        """
        differing = undecided = False
        for index, (r, c) in enumerate(zip(self._reference, outputs, strict=True)):
            if r.dtype.kind == "f":
                continue
            truth = self._truth[index] if self._truth is not None else None
            differs = np.asarray(r != c)
            decided_count = int((differs & _is_decided(r, truth, self._draws[index])).sum())
            count = int(differs.sum())
            differing = differing or count > 0
            undecided = undecided or (
                count > max(1.0, _NEAR_TIE_SHARE * r.size) and 2 * decided_count > count
            )
        return differing and not undecided

    def _has_shapes(self, run: list[OutputArray]) -> bool:
        return [array.shape for array in run] == [r.shape for r in self._reference]

    def _rounding_moves_as_far(self, outputs: list[OutputArray]) -> Iterator[bool]:
        """Yield for each output with a large difference whether random rounding moves it as far."""
        triples = zip(self._reference, outputs, self._draws, strict=True)
        for index, (r, c, draws) in enumerate(triples):
            if r.dtype.kind == "f":
                compared = self._compared_elements(index, None, draws) & np.isfinite(r)
                scale = self._scale(r)
                near, far = _in_units(r, scale, compared), _in_units(c, scale, compared)
                if _relative(near, far) > _SUSPICIOUS_DIFF:
                    runs = (_in_units(draw, scale, compared) for draw in draws)
                    change = max(_distance(near, run) for run in runs)
                    yield _distance(near, far) <= _ALLOWED_ROUNDING_MOVES * change


def _usable_truth(
    reference: list[OutputArray], truth: list[OutputArray] | None
) -> list[OutputArray] | None:
    """Return float64 outputs that can serve as truth: equal shapes, finite where float32 is."""
    if truth is None or len(truth) != len(reference):
        return None
    for r, r64 in zip(reference, truth, strict=True):
        if r64.shape != r.shape or r64.dtype.kind != r.dtype.kind:
            return None
        if r.dtype.kind == "f" and (np.isfinite(r) & ~np.isfinite(r64)).any():
            return None
    pairs = zip(reference, truth, strict=True)
    return [representable(r64, r) if r.dtype.kind == "f" else r64 for r, r64 in pairs]


def _in_units(array: OutputArray, scale: NDArray[np.float64], judged: Mask) -> NDArray[np.float64]:
    """Return floats in units of `scale`, with zeros where `judged` is False."""
    return np.where(judged, array.astype(np.float64) / scale, 0.0)


def _finite(outputs: list[OutputArray]) -> bool:
    """Return True if there are float outputs and all of them are finite."""
    floats = [output for output in outputs if output.dtype.kind == "f"]
    return bool(floats) and all(np.isfinite(output).all() for output in floats)


def _is_decided(r: OutputArray, truth: OutputArray | None, draws: Sequence[OutputArray]) -> Mask:
    """Return where rounding changes no integer, no bool and not the class of a float."""
    decided = np.ones(r.shape, np.bool_)
    for draw in draws:
        decided &= ~_differs(r, draw)
    if draws and truth is not None and r.dtype.kind != "f":
        decided &= r == truth
    return decided


def _differs(r: OutputArray, c: OutputArray) -> Mask:
    """Return where integers or bools differ, or where floats differ in class.

    The classes of floats are finite, NaN, infinity and minus infinity.
    """
    if r.dtype.kind != "f":
        return np.asarray(r != c)
    infinite = np.isinf(r) | np.isinf(c)
    return np.asarray((np.isnan(r) != np.isnan(c)) | (infinite & (r != c)))


def _is_nan_lost(r: OutputArray, c: OutputArray) -> Mask:
    """Return where the reference is NaN and the runtime is not."""
    if r.dtype.kind != "f":
        return np.zeros(r.shape, np.bool_)
    return np.asarray(np.isnan(r) & ~np.isnan(c))


def _distance(r: OutputArray, c: OutputArray) -> float:
    """max|c - r| of finite floats."""
    return float(np.abs(c.astype(np.float64) - r.astype(np.float64)).max(initial=0.0))


def _relative(r: OutputArray, c: OutputArray) -> float:
    """max|c - r| / max|r| of finite floats; 0 without any difference."""
    moved = _distance(r, c)
    if moved <= UNDERFLOW:
        return 0.0
    scale = float(np.abs(r.astype(np.float64)).max(initial=0.0))
    return moved / scale if scale > 0.0 else math.inf


def _farthest_outputs(truth: OutputArray, answers: Sequence[OutputArray]) -> OutputArray:
    """Return for each element the output farthest from the truth, at least UNDERFLOW away."""
    r64 = truth.astype(np.float64)
    errors = np.stack([array.astype(np.float64) - r64 for array in answers])
    farthest = np.take_along_axis(errors, np.abs(errors).argmax(axis=0)[None], axis=0)[0]
    error = np.copysign(np.maximum(np.abs(farthest), UNDERFLOW), farthest)
    return np.asarray(r64 + error)


def _ratio(
    truth: OutputArray, reference: OutputArray, candidate: OutputArray, *, columns: bool
) -> float:
    """Return the largest noise ratio of the output, its columns and its channels.

    With few samples, a column or channel alone says little; the whole output is included.
    """
    if truth.size == 0:
        return 0.0
    statistics = NoiseStatistics(columns=columns)
    statistics.update(truth, reference, candidate, samples=len(truth) if columns else 1)
    noise = statistics.result()
    return max(noise.ratio, noise.candidate_rms / noise.floor_rms)
