"""Assess whether float64 and random rounding measure the rounding error of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np

from gate.data.reader import length
from gate.errors import GateError
from gate.measure.context import MeasurementContext
from gate.records.instruments import EPSILON, ReferenceValidity, RoundingState
from gate.reference.code_location import HalfPrecisionFinder
from gate.reference.random_rounding import RoundingRun
from gate.reference.validity import (
    NULL_UNITS,
    GroupedSquares,
    Mask,
    OutputErrors,
    Validity,
    are_few,
    difference,
    exceeding,
    grouped,
    is_valid,
)
from gate.storage.arrays import Batch, OutputArray

# The rule: docs/metrics.md, "Valid references". A null run and one draw on 8 samples are always
# measured. All first samples and more draws are, where something is suspicious there.


_SAMPLES = 8
"""Samples of the null run and of the draw that every check measures."""

_DRAWS = 5
"""Where q or the floor is suspicious."""

_MORE_DRAWS = 32
"""Runs of a single sample that may explain why float32 and float64 decide it otherwise."""

_FEW = 0.01
"""Share of the samples, or one, whose integers may differ unexplained."""


@dataclass
class _Draws:
    """run - null on some samples."""

    state: RoundingState
    moved: list[dict[int, GroupedSquares]] = field(default_factory=list)
    """By draw and output of floats."""
    unlike: float = 0.0
    """The largest |null - r32| of a sample, in roundings."""

    def of(self, output: int) -> list[GroupedSquares]:
        return [draw[output] for draw in self.moved if output in draw]


class ReferenceAssessment:
    """Collects the errors of the float64 reference on the first samples; then assesses them."""

    def __init__(self) -> None:
        self._floats: dict[int, OutputErrors] = {}
        self._ranks: dict[int, int] = {}
        self._unlike: set[int] = set()
        """Outputs of another shape in float64."""
        self._integers: set[int] = set()
        """Outputs of integers or bools that differ in float64."""
        self._samples = 0

    def update(
        self, reference: Sequence[OutputArray], truth: Sequence[OutputArray], *, samples: int
    ) -> None:
        """Add a batch of the first samples, as both computed it."""
        self._samples += samples
        for output, (r, r64) in enumerate(zip(reference, truth, strict=False)):
            if r.shape != r64.shape:
                self._unlike.add(output)
            elif r.dtype.kind == "f":
                errors = OutputErrors.between(r, r64, samples=samples)
                before = self._floats.get(output)
                self._floats[output] = before.joined(errors) if before else errors
                self._ranks[output] = r.ndim
            elif (r != r64).any():
                self._integers.add(output)

    def result(self, stand: MeasurementContext) -> Validity:
        """Return what float64 and random rounding may be used for."""
        if not self._samples:
            return Validity()
        batches = list(_first(stand, _SAMPLES))
        finder = HalfPrecisionFinder(stand.model)
        fast_path, draws = False, _drawn(stand, batches, fast_path=False, finder=finder)
        if draws.state == "differs":
            kept = _drawn(stand, batches, fast_path=True)
            if kept.state == "valid":
                fast_path, draws = True, kept
        record = ReferenceValidity(
            rounding=draws.state,
            fast_path=fast_path,
            half_precision=finder.location,
            half_dtype=finder.dtype,
        )
        validity = Validity(record)
        suspects = self._suspects(stand, batches, draws)
        if not suspects and not self._unlike:
            return validity
        return self._assessed(stand, validity, suspects)

    def _suspects(
        self, stand: MeasurementContext, batches: Sequence[Batch], draws: _Draws
    ) -> set[int]:
        """Outputs that need a closer look."""
        wide = {output for output, errors in self._floats.items() if errors.is_wide}
        if draws.state != "valid":
            return wide | self._integers
        far: set[int] = set()
        few = _errors(stand, batches)
        for output, errors in few.items():
            if exceeding(errors.ratios(draws.of(output)), 1) is not None:
                far.add(output)
        return wide | far | self._integers

    def _assessed(
        self, stand: MeasurementContext, validity: Validity, suspects: set[int]
    ) -> Validity:
        differs, largest, flipped = set(self._unlike), math.inf if self._unlike else 0.0, {}
        batches = list(_first(stand, stand.policy.instruments.noise_samples, whole=True))
        draws = _Draws(validity.record.rounding)
        if draws.state == "valid":
            draws = _drawn(stand, batches, draws=_DRAWS, fast_path=validity.record.fast_path)
        for output in sorted(suspects & self._floats.keys()):
            errors = self._floats[output]
            if draws.state != "valid":
                ratios = errors.ratios(())
                is_function, mask = not errors.is_wide, None
            else:
                ratios = errors.ratios(draws.of(output))
                mask = exceeding(ratios, self._ranks[output])
                is_function = mask is None or (
                    len(mask) == self._samples
                    and are_few(ratios)
                    and all(
                        _is_explained(stand, validity, int(sample), output)
                        for sample in np.flatnonzero(mask.reshape(len(mask), -1).any(axis=1))
                    )
                )
            if not is_function:
                differs.add(output)
                largest = max(largest, *(float(q.max(initial=0.0)) for q in ratios))
            elif mask is not None:
                flipped[output] = mask
        integers = suspects & self._integers
        if draws.state == "valid" and (
            differs or not _are_ties(stand, validity, batches, integers)
        ):
            differs |= integers
        if not differs:
            return Validity(validity.record, flipped)
        parted = stand.truth.where_it_parts(stand.model, stand.reference.run, batches[0])
        record = validity.record.model_copy(
            update={
                "float64_differs": tuple(sorted(differs)),
                "largest": largest,
                "differs_at": parted,
            }
        )
        return Validity(record, flipped)


def _first(stand: MeasurementContext, samples: int, *, whole: bool = False) -> Iterator[Batch]:
    """The first samples, in batches of the measurement; the last one is cut where the file takes
    other sizes, unless `whole`."""
    done = 0
    for batch in stand.samples.batches(stand.binding.batch_size):
        if done >= samples:
            return
        left = length(batch) if whole or stand.binding.fixed else samples - done
        yield {name: array[:left] for name, array in batch.items()}
        done += length(batch)


def _errors(stand: MeasurementContext, batches: Sequence[Batch]) -> dict[int, OutputErrors]:
    """By output of floats, what float64 is off on these batches."""
    assessment = ReferenceAssessment()
    for batch in batches:
        truth = stand.answers.truth(batch)
        if truth is not None:
            assessment.update(stand.answers.reference(batch), truth, samples=length(batch))
    return assessment._floats


def _drawn(
    stand: MeasurementContext,
    batches: Sequence[Batch],
    *,
    fast_path: bool,
    draws: int = 1,
    finder: HalfPrecisionFinder | None = None,
) -> _Draws:
    """run - null on these batches, and whether the null run is the reference."""
    moved: list[dict[int, GroupedSquares]] = [{} for _ in range(draws)]
    apart: dict[int, GroupedSquares] = {}
    sizes: dict[int, GroupedSquares] = {}
    try:
        for batch in batches:
            samples, reference = length(batch), stand.answers.reference(batch)
            with finder or nullcontext():
                null = stand.rounding_run(batch, RoundingRun(scale=0.0, fast_path=fast_path))
            if [r.shape for r in reference] != [r.shape for r in null]:
                return _Draws("differs", unlike=math.inf)
            floats = [i for i, r in enumerate(reference) if r.dtype.kind == "f"]
            for output in floats:
                r32 = reference[output]
                off = difference(r32, null[output])
                _add(apart, output, grouped(off, samples=samples))
                size = np.where((off != 0.0) & np.isfinite(r32), r32, 0.0).astype(np.float64)
                _add(sizes, output, grouped(size, samples=samples))
            for draw, own in enumerate(moved):
                run = stand.rounding_run(batch, RoundingRun(draw, fast_path=fast_path))
                if [r.shape for r in run] != [r.shape for r in null]:
                    continue
                for output in floats:
                    shift = difference(null[output], run[output])
                    _add(own, output, grouped(shift, samples=samples))
    except GateError:
        return _Draws("failed")
    differs = any(
        _is_apart(apart[output], sizes[output], [own[output] for own in moved if output in own])
        for output in apart
    )
    return _Draws("differs" if differs else "valid", moved)


def _add(sums: dict[int, GroupedSquares], output: int, later: GroupedSquares) -> None:
    sums[output] = sums[output].joined(later) if output in sums else later


def _is_apart(apart: GroupedSquares, size: GroupedSquares, moved: list[GroupedSquares]) -> bool:
    """True if a null run is farther from the reference than 8 roundings of the sample, or than 8
    times what random rounding moves it by: another order of sums may be amplified as much."""
    least = EPSILON**2 * size.sums[0]
    for draw in moved:
        least = np.maximum(least, draw.sums[0])
    return bool((apart.sums[0] > NULL_UNITS**2 * least).any())


def _is_explained(stand: MeasurementContext, validity: Validity, sample: int, output: int) -> bool:
    """True if an honest run decides a sample as float64 does."""
    size = stand.binding.batch_size
    start = sample // size * size
    rows = range(start, min(start + size, len(stand.samples))) if stand.binding.fixed else [sample]
    batch = next(stand.samples.take(rows).batches(len(rows)))
    truth = stand.truth.aside(batch)
    runs: list[OutputArray] = []
    if truth is None:
        return False
    reference = stand.reference.run(batch)
    for draw in range(_MORE_DRAWS):
        if is_valid(truth[output], reference[output], runs):
            return True
        run = stand.rounding_run(batch, RoundingRun(draw, fast_path=validity.record.fast_path))
        runs.append(run[output])
    return is_valid(truth[output], reference[output], runs)


def _are_ties(
    stand: MeasurementContext, validity: Validity, batches: Sequence[Batch], integers: set[int]
) -> bool:
    """True if random rounding moves the integers that float64 has otherwise, but for a few."""
    left: dict[int, int] = dict.fromkeys(integers, 0)
    samples = 0
    for batch in batches:
        truth, reference = stand.answers.truth(batch), stand.answers.reference(batch)
        if truth is None:
            return False
        samples += length(batch)
        decided: dict[int, Mask] = {i: np.asarray(truth[i] != reference[i]) for i in integers}
        for draw in range(_DRAWS):
            run = stand.rounding_run(batch, RoundingRun(draw, fast_path=validity.record.fast_path))
            for i, mask in decided.items():
                decided[i] = mask & (run[i] == reference[i])
        for i, mask in decided.items():
            rows = mask.reshape(len(mask), -1) if mask.ndim else mask.reshape(1, 1)
            left[i] += int(rows.any(axis=1).sum())
    return all(count <= max(1, math.floor(_FEW * samples)) for count in left.values())
