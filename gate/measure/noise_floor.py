"""The noise floor of a runtime, per output; errors in units of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from gate.data.reader import length
from gate.errors import GateError
from gate.measure.context import MeasurementContext
from gate.records.instruments import NoiseParity
from gate.reference.validity import UNRESTRICTED, Validity
from gate.statistics.accumulators import finite_distances
from gate.statistics.error_groups import (
    CANDIDATE,
    REFERENCE,
    TRUTH,
    Floats,
    GroupedErrors,
    NoiseGroups,
    chunks,
    error_kinds,
    representable,
    worst_of,
)
from gate.statistics.output import Span
from gate.statistics.serialization import serializable
from gate.storage.arrays import OutputArray

# Formulas: docs/metrics.md, `noise_ratio`.
#
# The float64 reference is the ground truth. The runtime's error is given in units of PyTorch's
# float32 error, so that a correct float32 export scores about 1 whatever the model's scale. If
# PyTorch happens to be unusually exact, random rounding defines the unit
# (`gate.reference.random_rounding`). Every column has a separate unit: the scale of an amount of
# money says nothing about a probability in the next column.


_steps = logging.getLogger("gate.steps")

_LOWEST, _BINADES = -160, 320
"""Lowest exponent (`frexp`) and number of distinguished binades; index 0 is for zero."""

_ORDINARY = 10
"""An element is ordinary up to 2^10 times a low quantile of all nonzero magnitudes."""

_SHORT = 64
"""Maximum length of a grouped axis between axis 1 and the last one, such as anchors or corners."""

_QUANTILES = (1 / 256, 1 / 64, 1 / 16, 1 / 4)
"""Several quantiles, because a mask may fill most of an output."""


@serializable
class NoiseStatistics:
    """Accumulates errors against the float64 truth, by the binade of the truth and by column.

    merge is associative and commutative; update(a + b) == update(a).merge(update(b)), up to the
    rounding of float64 sums.

    Ratios are computed over all elements, over those below several magnitudes, so that large mask
    values hide nothing, and with `columns` over each index of the last axis and of axis 1. Elements
    that are equal on all sides are ignored. Ratios of few errors vary; each is divided by its
    variation due to chance (`gate.statistics.error_groups`).
    """

    def __init__(self, *, columns: bool = False) -> None:
        """`columns`: also group by index of the last axis and of axis 1."""
        self._samples = 0
        self._draws = 0
        """Number of runs of which this is the median; 0 for a single measurement."""
        self._elements = 0
        self._broken = False
        self._binades = GroupedErrors.empty(_BINADES + 1)
        self._columns: dict[int, GroupedErrors | None] | None = None if columns else {}
        """By axis; None: nothing was added yet, or the length of that axis varies."""

    def update(
        self, truth: OutputArray, reference: OutputArray, candidate: OutputArray, *, samples: int
    ) -> None:
        """Add a batch of float arrays of equal shape; `truth` is float64."""
        self._samples += samples
        batched = bool(truth.ndim) and len(truth) == samples
        truth, reference, candidate = np.atleast_1d(truth, reference, candidate)
        for rows in chunks(truth, single=not batched):
            self._add(truth[rows], reference[rows], candidate[rows], batched=batched)

    def _add(
        self, truth: OutputArray, reference: OutputArray, candidate: OutputArray, *, batched: bool
    ) -> None:
        r64 = representable(truth, reference)
        r32, c = np.asarray(reference, np.float64), np.asarray(candidate, np.float64)
        judged = np.isfinite(r64) & np.isfinite(r32)
        self._broken = self._broken or not bool(np.isfinite(c[judged]).all())
        judged &= np.isfinite(c)
        self._elements += int(judged.sum())
        counted = judged & ~((r64 == r32) & (r32 == c))
        values = error_kinds(r64, r32, c)
        values[:, ~counted] = 0.0
        flat = values[:, counted]
        self._binades = self._binades.merge(
            GroupedErrors.by_label(flat, _binades(flat[TRUTH]), _BINADES + 1)
        )
        self._update_columns(values, counted, batched=batched)

    def merge(self, other: NoiseStatistics) -> NoiseStatistics:
        """Return the statistics of both streams."""
        merged = NoiseStatistics()
        merged._draws = self._draws
        merged._samples = self._samples + other._samples
        merged._elements = self._elements + other._elements
        merged._broken = self._broken or other._broken
        merged._binades = self._binades.merge(other._binades)
        if self._columns is None or other._columns is None:
            merged._columns = self._columns if other._columns is None else other._columns
        else:
            merged._columns = {
                axis: _merge(self._columns.get(axis), other._columns.get(axis))
                for axis in {*self._columns, *other._columns}
            }
        return merged

    @classmethod
    def median(cls, draws: Sequence[NoiseStatistics]) -> NoiseStatistics:
        """Return the median of several measurements of the same samples, which ignores outliers."""
        median = cls()
        median._draws = len(draws)
        median._samples, median._elements = draws[0]._samples, draws[0]._elements
        median._binades = GroupedErrors.median(draw._binades for draw in draws)
        columns: dict[int, GroupedErrors | None] = {}
        for axis in draws[0]._columns or {}:
            tallies = [(draw._columns or {}).get(axis) for draw in draws]
            complete = [tally for tally in tallies if tally is not None]
            columns[axis] = (
                GroupedErrors.median(complete) if len(complete) == len(tallies) else None
            )
        median._columns = columns
        return median

    def result(
        self,
        *,
        diff: float | None = None,
        rounding: NoiseStatistics | None = None,
        baseline: Literal["float64", "float32"] = "float64",
    ) -> NoiseParity:
        """Return the record. If nothing was compared, `elements` and all other numbers are 0.

        `diff`: the largest error of late samples, in the same units. `rounding`: statistics of the
        same samples with a run under random rounding as the candidate.
        """
        if not self._elements:
            return _nothing(self._samples, math.inf if self._broken else 0.0)
        groups = list(self._groups(rounding))
        total = groups[0]
        count = sum(len(group.name) for group in groups[1:])
        ratio, group_name, side = worst_of(groups, count, peaks=False)
        peak, _, _ = worst_of(groups, count, peaks=True)
        largest_difference = total.difference() if diff is None else diff
        if self._broken:
            ratio = peak = math.inf
        return NoiseParity(
            samples=self._samples,
            elements=self._elements,
            truth_rms=float(total.tally.rms(TRUTH)[0]),
            reference_rms=float(total.tally.rms(REFERENCE)[0]),
            candidate_rms=float(total.tally.rms(CANDIDATE)[0]),
            rounding_rms=None if total.rounding is None else float(total.rounding_rms()[0]),
            rounding_draws=rounding._draws if rounding and rounding._draws else None,
            scatter=float(total.scatter(1)[0]),
            group=group_name,
            floor_peak=float(total.noise_floor(peaks=True)[0]),
            ratio=ratio,
            peak=peak,
            diff=math.inf if self._broken else largest_difference,
            closer=side,
            baseline=baseline,
        )

    def floors(self, rounding: NoiseStatistics | None = None) -> list[NoiseGroups]:
        """Return the floors of the whole output and each grouped axis; empty without elements."""
        return list(self._groups(rounding, ordinary=False)) if self._elements else []

    def _update_columns(self, values: Floats, counted: NDArray[np.bool_], *, batched: bool) -> None:
        if not values.size:
            return
        if self._columns == {} or (not batched and values.ndim < 3):
            self._columns = {}
            return
        axes = _axes(values.shape[1:])
        if self._columns is None:
            self._columns = {
                axis: GroupedErrors.empty(values.shape[axis + 1])
                for axis in axes
                if values.shape[axis + 1]
            }
        for axis, tally in self._columns.items():
            arranged = np.stack([_group_by_axis(kind, axis) for kind in values])
            part = GroupedErrors.from_values(
                arranged, np.asarray(_group_by_axis(counted, axis), np.bool_)
            )
            self._columns[axis] = _merge(tally, part)

    def _groups(
        self, rounding: NoiseStatistics | None, *, ordinary: bool = True
    ) -> Iterator[NoiseGroups]:
        """Yield the groups, the whole output first."""
        drawn = rounding._binades if rounding else None
        stops = np.array([_BINADES + 1])
        yield NoiseGroups(0, [""], self._binades.joined(stops), drawn and drawn.joined(stops))
        if ordinary:
            stops = self._ordinary()
            names = [f"values up to {2.0 ** (stop + _LOWEST - 1):.2g}" for stop in stops]
            yield NoiseGroups(0, names, self._binades.joined(stops), drawn and drawn.joined(stops))
        last = max(self._columns or {}, default=0)
        for axis, tally in (self._columns or {}).items():
            if tally is not None:
                rounding_tally = (rounding._columns or {}).get(axis) if rounding else None
                axis_name = {1: "channel", last: "column"}.get(axis, f"axis {axis}, index")
                names = [f"{axis_name} {index}" for index in range(len(tally.counts))]
                yield NoiseGroups(axis, names, tally, rounding_tally)

    def _ordinary(self) -> NDArray[np.int64]:
        """Return the end of the binades of ordinary elements, for each quantile."""
        counts = np.concatenate([[0.0], self._binades.counts[1:].cumsum()])
        if not counts[-1]:
            return np.array([], np.int64)
        quantiles = np.searchsorted(counts, np.ceil(counts[-1] * np.array(_QUANTILES)))
        return np.unique(np.minimum(quantiles + _ORDINARY + 1, _BINADES + 1))


def _nothing(samples: int, ratio: float) -> NoiseParity:
    return NoiseParity(
        samples=samples,
        elements=0,
        truth_rms=0.0,
        reference_rms=0.0,
        candidate_rms=0.0,
        scatter=1.0,
        ratio=ratio,
        peak=ratio,
        diff=ratio,
        closer="neither",
    )


def _merge(left: GroupedErrors | None, right: GroupedErrors | None) -> GroupedErrors | None:
    if left is None or right is None or len(left.counts) != len(right.counts):
        return None
    return left.merge(right)


def _axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes that are grouped by index: the last, axis 1, and short axes between."""
    rank = len(shape)
    short = [axis for axis in range(2, rank - 1) if shape[axis] <= _SHORT]
    return tuple(dict.fromkeys([rank - 1, 1, *short])) if rank > 1 else ()


def _group_by_axis(array: NDArray[np.generic], axis: int) -> NDArray[np.generic]:
    """Return the array in shape (samples, repeats, length of `axis`)."""
    arranged = np.moveaxis(array, axis, -1)
    return arranged.reshape(len(array), -1, arranged.shape[-1])


def _binades(magnitudes: Floats) -> NDArray[np.int64]:
    """Return the index of each magnitude's binade; 0 for zero."""
    exponents = np.clip(np.frexp(magnitudes)[1].astype(np.int64) - _LOWEST, 1, _BINADES)
    return np.where(magnitudes == 0.0, 0, exponents)


DRAWS = 3

BASELINE_DRAWS = 5
"""Number of runs if only random rounding defines the floor."""

MORE_DRAWS = 15
"""Number of runs if three give too small a floor: the errors of a column may come from one sample,
and the median of three errors is small by chance in every twentieth column."""


RoundingErrors = list[NoiseStatistics | None]
"""Errors of one run under random rounding, by output of the model; None if not measured."""


def rounding_floor(context: MeasurementContext, *, draws: int = DRAWS) -> RoundingErrors:
    """Return the errors of each output of the model under random rounding.

    The result is the median of `draws` runs, column by column, so that a rare flip of an argmax or
    condition does not widen the floor. It is empty if the model can't be run under random rounding
    or in float64. If float64 computes another function, the error is sqrt(2) (run - null), because
    runtime and reference both round. Runs of earlier calls are reused.
    """
    runs = context.rounding_errors
    for draw, errors in _rounding_errors(context, range(len(runs), draws)).items():
        runs[draw] = errors
    if len(runs) < draws:
        return []
    floors: RoundingErrors = []
    for several in zip(*list(runs.values())[:draws], strict=True):
        measured = [each for each in several if each is not None]
        floors.append(NoiseStatistics.median(measured) if len(measured) == draws else None)
    return floors


def _rounding_errors(
    context: MeasurementContext, draws: Iterable[int]
) -> dict[int, RoundingErrors]:
    """Return the errors on the first samples, by run."""
    floors: dict[int, RoundingErrors] = {}
    draws = list(draws)
    validity, start = context.truth.validity, 0
    size = context.binding.batch_size
    first = min(math.ceil(context.noise_samples / size) * size, len(context.samples))
    total = left = len(draws) * first
    for batch in context.batches_with_truth():
        reference = context.answers.reference(batch)  # cached by the pass over the samples
        truth = context.baseline(batch)
        if truth is None:
            return {}
        floors = floors or {draw: [None] * len(reference) for draw in draws}
        for draw, statistics in floors.items():  # only one run is in memory at a time
            _steps.debug("rounding floor: %d of %d forwards left", left, total)
            left -= length(batch)
            try:
                run = context.rounded_run(batch, draw=draw)
                if validity.record.float64_differs:
                    null = context.rounded_run(batch, draw=draw, scale=0.0)
                    run = validity.about_reference(run, null, reference)
            except GateError:
                return {}
            for output, (r64, r, rounded) in enumerate(zip(truth, reference, run, strict=False)):
                if r64.shape == r.shape == rounded.shape and r.dtype.kind == "f":
                    sides = validity.without_flips(output, r64, r, rounded, start=start)
                    floor = statistics[output] = statistics[output] or NoiseStatistics(columns=True)
                    floor.update(*sides, rounded, samples=length(batch))
        start += length(batch)
    return floors


# The floor of the first samples does not bound the errors of all samples: among enough samples,
# `exp` of a normal variable has values and errors that are a hundred times larger. So the floor
# grows with the magnitude, and the worst samples are computed again in float64
# (`gate.measure.outliers`). More correct samples never make a verdict worse.


_Number = TypeVar("_Number", bound=np.generic)


DOUBTFUL = 8.0
"""A sample with a larger error, in units of the floor, is computed again."""

KEPT = 256
"""Number of stored samples; for all others only the largest score is stored."""

_PLAIN = 1e-3
"""A sample with a larger difference, relative to its largest value, is always computed again: the
floor hides everything if one of the first samples has huge rounding errors."""

_MAX_PLAIN = 16


@serializable
class OutlierTracker:
    """The worst samples of one float output, by their largest error in units of the floor.

    merge is associative; update(a + b) == update(a).merge(update(b)), until `record` is called.
    """

    def __init__(self, floors: Sequence[NoiseGroups], *, axis: int | None = 0) -> None:
        """`floors`: floors of the first samples. `axis`: axis of the samples; None: a batch has one
        score."""
        self._floors = floors
        self.axis = axis
        self._scores: dict[int, float] = {}
        self._unstored = 0.0
        """The largest score of the samples that are not stored."""
        self._plain: dict[int, float] = {}
        """The largest differences above `_PLAIN`, by sample."""
        self.settled: float | None = None
        """The largest score of the samples that were computed again; None without any."""

    def update(self, reference: OutputArray, candidate: OutputArray, span: Span) -> None:
        """Add a batch of two float arrays of equal shape. The check `finite` handles elements that
        are not finite on one side."""
        reference, candidate = np.atleast_1d(reference, candidate)
        for rows in chunks(reference, single=self.axis != 0):
            errors = finite_distances(reference[rows], candidate[rows])
            with np.errstate(all="ignore"):
                scores = to_floor_units(errors, reference[rows], self._floors)
            start = span.start + (rows.start or 0)
            worst = _largest(self._by_sample(scores))
            self._scores.update(enumerate(worst.tolist(), start))
            if self.axis is not None:
                self._keep_plain(self._by_sample(errors), self._by_sample(reference[rows]), start)
        self._keep()

    def merge(self, other: OutlierTracker) -> OutlierTracker:
        """Return the tracker of both streams with the same floor; `other` has later samples."""
        merged = OutlierTracker(self._floors, axis=self.axis)
        merged._scores = {**self._scores, **other._scores}
        merged._plain = {**self._plain, **other._plain}
        merged._unstored = max(self._unstored, other._unstored)
        settled = [late.settled for late in (self, other) if late.settled is not None]
        merged.settled = max(settled, default=None)
        merged._keep()
        return merged

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the floors, which the receiving process already has."""
        return {name: value for name, value in vars(self).items() if name != "_floors"}

    def set_floors(self, floors: Sequence[NoiseGroups]) -> None:
        """Set the floors after deserialization."""
        self._floors = floors

    def _keep(self) -> None:
        """Discard all but the worst samples; for equal scores keep the first ones."""
        if len(self._scores) > KEPT:
            ranked = sorted(self._scores, key=lambda sample: (-self._scores[sample], sample))
            self._unstored = max(self._unstored, self._scores[ranked[KEPT]])
            self._scores = {sample: self._scores[sample] for sample in ranked[:KEPT]}
        if len(self._plain) > _MAX_PLAIN:
            ranked = sorted(self._plain, key=lambda sample: (-self._plain[sample], sample))
            self._plain = {sample: self._plain[sample] for sample in ranked[:_MAX_PLAIN]}

    def _keep_plain(self, errors: Floats, reference: OutputArray, start: int) -> None:
        with np.errstate(all="ignore"):
            size = np.where(np.isfinite(reference), np.abs(reference), 0.0)
            shares = _largest(errors) / _largest(size)
        for row in np.flatnonzero(np.isfinite(shares) & (shares > _PLAIN)).tolist():
            self._plain[start + row] = float(shares[row])

    def _by_sample(self, values: NDArray[_Number]) -> NDArray[_Number]:
        return values[None] if self.axis is None else np.moveaxis(values, self.axis, 0)

    @property
    def doubtful(self) -> list[int]:
        """The samples that should be computed again, worst first."""
        ranked = sorted(self._scores, key=lambda sample: (-self._scores[sample], sample))
        worst = [sample for sample in ranked if self._scores[sample] > DOUBTFUL]
        return list(dict.fromkeys([*worst, *sorted(self._plain)]))

    def record(self, sample: int, *, by_rounding: float, by_first: float) -> None:
        """Replace the score of a sample that was computed again, in units of its rounding error.

        `by_first`, in units of the larger of this error and the floor of the first samples, applies
        unless the difference exceeds `_PLAIN`.
        """
        if sample not in self._plain and sample not in self._scores:
            return
        score = by_rounding if sample in self._plain else min(by_rounding, by_first)
        self._scores[sample] = score
        self.settled = max(self.settled or 0.0, score)

    @property
    def worst(self) -> float:
        """The largest score of all samples; 0 without any."""
        return max(self._unstored, *self._scores.values(), 0.0)


def _largest(values: Floats) -> Floats:
    """Return the largest value of each row of axis 0; 0 for an empty one."""
    return np.asarray(values.reshape(len(values), -1).max(axis=1, initial=0.0), np.float64)


def to_floor_units(errors: Floats, values: OutputArray, floors: Sequence[NoiseGroups]) -> Floats:
    """Return each error in units of the smallest floor of its groups. All shapes are equal.

    A floor grows with the value, relative to the largest value of its group, and with the median
    growth of the sample's columns.
    """
    total, *columns = floors
    magnitudes = np.abs(values.astype(np.float64))
    smallest = _grow(total.noise_floor(peaks=True)[0], magnitudes / total.largest[0])
    for group in columns:
        if values.ndim <= group.axis or values.shape[group.axis] != len(group.name):
            continue
        # A column that was zero in all of the first samples uses the floor of the whole output.
        empty = group.largest == 0.0
        shape = [1] * values.ndim
        shape[group.axis] = -1
        floor = np.where(
            empty, total.noise_floor(peaks=True)[0], group.noise_floor(peaks=True)
        ).reshape(shape)
        growth = magnitudes / np.where(empty, total.largest[0], group.largest).reshape(shape)
        reduced = tuple(axis for axis in range(1, values.ndim) if axis != group.axis)
        typical = np.median(growth.max(axis=reduced, keepdims=True), axis=group.axis, keepdims=True)
        smallest = np.minimum(smallest, _grow(floor, np.maximum(growth, typical)))
    return np.asarray(errors / smallest)


def _grow(floor: Floats, growth: Floats) -> Floats:
    return np.asarray(floor * np.maximum(np.nan_to_num(growth, nan=1.0, posinf=1.0), 1.0))


_SUSPICIOUS_RATIO, _SUSPICIOUS_PEAK = 1.25, 3.0
"""Errors above these, in units of PyTorch's error, require random rounding as a second unit. Fixed
rather than taken from the policy, because the evidence must not depend on bounds."""


@serializable
class NoiseFloor:
    """The noise floor of a runtime, accumulated over the first samples and widened afterwards."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: the outputs of the file, in order."""
        self._names = tuple(names)
        self._noise: dict[str, NoiseStatistics] = {}
        self._rounding: dict[str, NoiseStatistics] = {}
        self._replayed: dict[str, list[NoiseStatistics]] = {}
        """Errors of each run under random rounding with the file's choices, by output."""
        self._baselines: dict[str, Literal["float64", "float32"]] = {}
        self._first: dict[str, list[NoiseGroups]] = {}
        self.few_draws = False
        """As `NoiseParity.few_draws`."""

    def __getstate__(self) -> dict[str, object]:
        """Return the measured state, without values derived from it."""
        return vars(self) | {"_first": {}, "_replayed": {}}

    def copy_state(self, source: NoiseFloor) -> None:
        """Replace the state in place by that of another process; other objects share this floor."""
        self._noise, self._rounding, self._first = source._noise, source._rounding, {}
        self._baselines, self.few_draws = source._baselines, source.few_draws

    def update(
        self,
        truth: Sequence[OutputArray],
        reference: Sequence[OutputArray],
        candidate: Sequence[OutputArray],
        *,
        samples: int,
        start: int = 0,
        validity: Validity = UNRESTRICTED,
    ) -> None:
        """Add one checked batch with its float64 outputs.

        Only float outputs get a noise floor, and only if float64 returns the same shape and float64
        or random rounding is valid for them. `start`: index of the first sample.
        """
        self._baselines = {
            name: "float64" if validity.record.uses_float64(output) else "float32"
            for output, name in enumerate(self._names)
        }
        truth = validity.baseline(truth, reference)
        outputs = zip(self._names, truth, reference, candidate, strict=False)
        for output, (name, r64, r, c) in enumerate(outputs):
            if (
                r.dtype.kind == "f"
                and r64.shape == r.shape
                and validity.record.is_measurable(output)
            ):
                sides = validity.without_flips(output, r64, r, c, start=start)
                statistics = self._noise.setdefault(name, NoiseStatistics(columns=True))
                statistics.update(*sides, c, samples=samples)

    def update_replayed(
        self,
        truth: Sequence[OutputArray],
        reference: Sequence[OutputArray],
        draws: Sequence[Sequence[OutputArray]],
        *,
        samples: int,
        start: int,
        validity: Validity,
    ) -> None:
        """Add a batch in which the model makes the file's choices, after `update`.

        `draws`: the outputs of each run under random rounding. The other arguments: as there.
        """
        if validity.record.float64_differs:
            return
        for output, (name, r64, r) in enumerate(zip(self._names, truth, reference, strict=False)):
            if name in self._noise and all(draw[output].shape == r.shape for draw in draws):
                empty = [NoiseStatistics(columns=True) for _ in draws]
                runs = zip(self._replayed.setdefault(name, empty), draws, strict=True)
                for statistics, draw in runs:
                    sides = validity.without_flips(output, r64, r, draw[output], start=start)
                    statistics.update(*sides, draw[output], samples=samples)

    def widen(self, rounding: RoundingErrors) -> None:
        """Use the error of random rounding where it is larger. `rounding`: by output, in order.

        The file's choices may select values that have larger errors than those of the model.
        """
        self._rounding = {}
        for name, floor in zip(self._names, rounding, strict=False):
            if floor is not None:
                draws = self._replayed.get(name)
                both = floor.merge(NoiseStatistics.median(draws)) if draws else floor
                self._rounding[name] = both

    def suspicion(self) -> float:
        """Return how far the worst output is off, relative to the limit for a second look.

        The limit is in units of PyTorch's own error, or that of random rounding where it was
        measured.
        """
        noises = [
            statistics.result(rounding=self._rounding.get(name))
            for name, statistics in self._noise.items()
        ]
        parts = [
            max(
                noise.ratio / _SUSPICIOUS_RATIO,
                noise.peak / _SUSPICIOUS_PEAK,
                noise.diff * (noise.scatter or 1.0) / _SUSPICIOUS_PEAK,
            )
            for noise in noises
            if math.isfinite(noise.ratio)
        ]
        return max(parts, default=0.0)

    def outlier_floors(self, name: str) -> list[NoiseGroups]:
        """Return the floors for late samples of an output, fixed at the first late sample.

        Empty if the output has no floor.
        """
        if name not in self._first:
            self._first[name] = self.now(name)
        return self._first[name]

    def now(self, name: str) -> list[NoiseGroups]:
        """Return the current floors of an output; empty if it has none."""
        noise = self._noise.get(name)
        return noise.floors(self._rounding.get(name)) if noise else []

    def results(self) -> dict[str, NoiseParity | None]:
        """Return the records by output, without late samples."""
        return {name: self.result(name, diff=None) for name in self._noise}

    def result(self, name: str, *, diff: float | None) -> NoiseParity | None:
        """Return the record of an output; None without a floor. `diff`: error of late samples."""
        noise = self._noise.get(name)
        if noise is None:
            return None
        record = noise.result(
            diff=diff,
            rounding=self._rounding.get(name),
            baseline=self._baselines.get(name, "float64"),
        )
        return record.model_copy(update={"few_draws": True}) if self.few_draws else record
