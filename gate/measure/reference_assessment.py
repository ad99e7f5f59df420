"""Assess whether float64 and random rounding compute the function of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np

from gate.data.reader import length
from gate.errors import GateError
from gate.measure.context import MeasurementContext
from gate.onnx_file.choices import ROUNDING
from gate.records.instruments import EPSILON, ReferenceValidity, RoundingState
from gate.reference.choices import ChoiceReplay
from gate.reference.code_location import HalfPrecisionFinder
from gate.reference.random_rounding import RoundingRun
from gate.reference.validity import (
    NULL_UNITS,
    GroupedSquares,
    Mask,
    OutputErrors,
    Validity,
    are_few,
    exceeding,
    is_valid,
    most_flips,
)
from gate.statistics.error_groups import Floats
from gate.storage.arrays import Batch, OutputArray

# The rule: docs/metrics.md, "Valid references". A null run and one draw on 8 samples are always
# measured. All first samples and more draws are measured only if q or the floor is suspicious.


_SAMPLES = 8

DRAWS = 5
"""Number of draws if q or the floor is suspicious."""

_MORE_DRAWS = 32
"""Number of draws for a single sample, to find one with the same decision as float64."""


_MAX_FLIPS = 8
"""Maximum number of samples per output for which these draws are made."""


@dataclass
class RoundingDraws:
    """The difference run - null on some samples, by draw and float output."""

    state: RoundingState
    shifts: list[dict[int, GroupedSquares]] = field(default_factory=list)
    null_error: float = 0.0
    """The largest rms(null - r32) of a sample, in units of the sample's rounding."""

    def for_output(self, output: int) -> list[GroupedSquares]:
        """Return the draws of one output; empty for integers."""
        return [draw[output] for draw in self.shifts if output in draw]


class ReferenceAssessment:
    """Collects the errors of the float64 reference on the first samples; then assesses them."""

    def __init__(self) -> None:
        self.errors: dict[int, OutputErrors] = {}
        """By output of floats."""
        self._ranks: dict[int, int] = {}
        self._unlike: set[int] = set()
        """Outputs of another shape in float64."""
        self._integers: set[int] = set()
        """Outputs of integers or bools that differ in float64."""
        self._samples = 0

    def update(
        self,
        reference: Sequence[OutputArray],
        truth: Sequence[OutputArray] | None,
        samples: int,
    ) -> None:
        """Add the outputs of a batch; a batch without float64 outputs (`truth`) is ignored."""
        if truth is None:
            return
        self._samples += samples
        for output, (r, r64) in enumerate(zip(reference, truth, strict=False)):
            if r.shape != r64.shape:
                self._unlike.add(output)
            elif r.dtype.kind == "f":
                errors = OutputErrors.between(r, r64, samples=samples)
                before = self.errors.get(output)
                self.errors[output] = before.joined(errors) if before else errors
                self._ranks[output] = r.ndim
            elif (r != r64).any():
                self._integers.add(output)

    def result(self, context: MeasurementContext) -> Validity:
        """Return the outputs for which float64 and random rounding are valid.

        If `own_choices` is true, rounding changes decisions of the model, and the caller must
        measure and assess again with the decisions of the reference.
        """
        if not self._samples or context.truth.unmeasured is not None:
            return Validity()
        batches = list(_first(context))
        finder = HalfPrecisionFinder(context.model)
        fast_path, draws = False, draw_rounding(context, batches, finder=finder)
        if draws.state == "differs":  # one draw may be small by chance
            draws = draw_rounding(context, batches, draws=DRAWS)
        if draws.state == "differs":
            fast_draws = draw_rounding(context, batches, draws=DRAWS, fast_path=True)
            if fast_draws.state == "valid":
                fast_path, draws = True, fast_draws
        record = ReferenceValidity(
            rounding=draws.state,
            fast_path=fast_path,
            half_precision=finder.location,
            half_dtype=finder.dtype,
            own_choices=context.truth.validity.record.own_choices,
        )
        suspects = self._suspects(context, batches, draws)
        doubtful = bool(suspects) or draws.state != "valid"
        if doubtful and not record.own_choices and _choices_change(context):
            return Validity(ReferenceValidity(own_choices=True))
        validity = self._assessed(context, record, suspects) if suspects else Validity(record)
        # Ties of integers, and few samples whose floats are rounded to other integers, are valid.
        differs = bool(validity.record.float64_differs) or draws.state != "valid"
        has_floats = bool(suspects & self.errors.keys()) and not validity.flipped
        looks = not record.own_choices and (differs or has_floats)
        if looks and _choices_change(context, steps=True):
            return Validity(ReferenceValidity(own_choices=True))
        return validity

    def _suspects(
        self, context: MeasurementContext, batches: Sequence[Batch], draws: RoundingDraws
    ) -> set[int]:
        """Return the outputs that need more draws on all first samples."""
        wide = {output for output, errors in self.errors.items() if errors.is_wide}
        far: set[int] = set()
        if draws.state == "valid":
            few = ReferenceAssessment()
            for batch in batches:
                truth = context.answers.truth(batch)
                few.update(context.answers.reference(batch), truth, length(batch))
            far = {
                output
                for output, errors in few.errors.items()
                if exceeding(errors.ratios(draws.for_output(output)), 1) is not None
            }
        return wide | far | self._integers | self._unlike

    def _assessed(
        self, context: MeasurementContext, record: ReferenceValidity, suspects: set[int]
    ) -> Validity:
        differs, flipped = set(self._unlike), {}
        largest = math.inf if differs else 0.0
        batches = list(context.batches_with_truth())
        draws = RoundingDraws(record.rounding)
        if record.rounding == "valid":
            draws = draw_rounding(context, batches, draws=DRAWS, fast_path=record.fast_path)
        for output in sorted(suspects & self.errors.keys() - differs):
            ratios = self.errors[output].ratios(draws.for_output(output))
            mask = exceeding(ratios, self._ranks[output])
            if mask is None:
                continue
            if self._are_flips(context, record, output, ratios, mask):
                flipped[output] = mask
            else:
                differs.add(output)
                largest = max(largest, *(float(q.max(initial=0.0)) for q in ratios))
        if differs or not _are_ties(context, record, batches, self._integers):
            differs |= self._integers
        if differs:
            parted = context.truth.find_difference(context.model, context.reference.run, batches[0])
            record = record.model_copy(
                update={
                    "float64_differs": tuple(sorted(differs)),
                    "largest": largest,
                    "differs_at": parted,
                }
            )
        return Validity(record, flipped)

    def _are_flips(
        self,
        context: MeasurementContext,
        record: ReferenceValidity,
        output: int,
        ratios: Sequence[Floats],
        mask: Mask,
    ) -> bool:
        """Return whether only a few samples exceed Q, and a correct run can explain each of them.

        Without random rounding, the error only has to be small relative to the output.
        """
        if record.rounding != "valid":
            return not self.errors[output].is_wide
        samples = np.flatnonzero(mask.reshape(len(mask), -1).any(axis=1)).tolist()
        return (
            len(mask) == self._samples
            and len(samples) <= _MAX_FLIPS
            and are_few(ratios)
            and all(_is_explained(context, record, sample, output) for sample in samples)
        )


def _choices_change(context: MeasurementContext, *, steps: bool = False) -> bool:
    """Return whether float64 or rounding changes decisions of the model that can be replayed.

    Replaying the reference's decisions must not change its outputs. `steps`: include operators that
    round floats to integers.
    """
    changed = False
    try:
        for batch in context.batches_with_truth():
            choices = context.reference_choices(batch)
            if not steps:
                choices = [choice for choice in choices if choice.operator not in ROUNDING]
            if not choices:
                return False
            with ChoiceReplay(choices):
                repeated = context.reference.run(batch)
            outputs = list(context.answers.reference(batch))
            plain = context.reference.session.run_operators(batch, outputs)
            if not all(map(_is_same, repeated, plain)):
                return False
            double, rounded = ChoiceReplay(choices), ChoiceReplay(choices)
            context.truth.extra_outputs(batch, mode=double)
            context.rounding_run(batch, RoundingRun(), mode=rounded)
            changed = changed or any(call.differs for call in (*double.calls, *rounded.calls))
    except GateError:
        return False
    return changed


def _is_same(left: OutputArray, right: OutputArray) -> bool:
    return np.array_equal(left, right, equal_nan=left.dtype.kind == "f")


def _first(context: MeasurementContext) -> Iterator[Batch]:
    """Yield the first samples in batches of the measurement; the last one is cut if the batch size
    is not fixed."""
    count = 0
    for batch in context.samples.batches(context.binding.batch_size):
        if count >= _SAMPLES:
            return
        left = length(batch) if context.binding.fixed else _SAMPLES - count
        yield {name: array[:left] for name, array in batch.items()}
        count += length(batch)


def draw_rounding(
    context: MeasurementContext,
    batches: Sequence[Batch],
    *,
    draws: int = 1,
    fast_path: bool = False,
    finder: HalfPrecisionFinder | None = None,
) -> RoundingDraws:
    """Return run - null on these batches, and whether the null run equals the reference.

    `fast_path`: as in `RandomRounding`. `finder`: a mode that observes the null run.
    """
    shifts: list[dict[int, GroupedSquares]] = [{} for _ in range(draws)]
    null_errors: dict[int, GroupedSquares] = {}
    sizes: dict[int, GroupedSquares] = {}
    unlike = set()
    try:
        for batch in batches:
            samples, reference = length(batch), context.answers.reference(batch)
            with finder or nullcontext():
                null = context.rounding_run(batch, RoundingRun(scale=0.0, fast_path=fast_path))
            shapes = [r.shape for r in null]
            if [r.shape for r in reference] != shapes:
                return RoundingDraws("differs", null_error=math.inf)
            floats = [output for output, r in enumerate(reference) if r.dtype.kind == "f"]
            for output in floats:
                r32, zero = reference[output], null[output]
                size = np.where((r32 != zero) & np.isfinite(r32), r32, 0.0)
                _add(null_errors, output, GroupedSquares.between(r32, zero, samples=samples))
                _add(sizes, output, GroupedSquares.between(size, 0.0 * size, samples=samples))
            for draw, sums in enumerate(shifts):
                run = context.rounding_run(batch, RoundingRun(draw, fast_path=fast_path))
                if [r.shape for r in run] != shapes:
                    unlike.add(draw)  # rounding can change the number of boxes
                    continue
                for output in floats:
                    shift = GroupedSquares.between(null[output], run[output], samples=samples)
                    _add(sums, output, shift)
    except GateError:
        return RoundingDraws("failed")
    shifts = [sums for draw, sums in enumerate(shifts) if draw not in unlike]
    if not shifts:
        return RoundingDraws("failed")
    return _with_state(shifts, null_errors, sizes)


def _with_state(
    draws: list[dict[int, GroupedSquares]],
    null_errors: dict[int, GroupedSquares],
    sizes: dict[int, GroupedSquares],
) -> RoundingDraws:
    """Return the draws with their state: whether null - r32 is of the size of rounding errors.

    The model amplifies a different order of sums as much as random rounding.
    """
    state: RoundingState = "valid"
    null_error = 0.0
    for output in null_errors:
        errors, least = null_errors[output].sums[0], EPSILON**2 * sizes[output].sums[0]
        with np.errstate(all="ignore"):
            null_error = max(null_error, math.sqrt(np.nan_to_num(errors / least).max(initial=0.0)))
        shifts = np.max([draw[output].sums[0] for draw in draws], axis=0)
        moves = np.maximum(np.maximum(least, shifts), np.median(shifts))
        if (errors > NULL_UNITS**2 * moves).any():
            state = "differs"
    return RoundingDraws(state, draws, null_error)


def _add(sums: dict[int, GroupedSquares], output: int, later: GroupedSquares) -> None:
    sums[output] = sums[output].joined(later) if output in sums else later


def _is_explained(
    context: MeasurementContext, record: ReferenceValidity, sample: int, output: int
) -> bool:
    """Return whether a correct run makes the same decision for a sample as float64."""
    batch, _ = context.smallest_batch(sample)
    truth = context.truth.extra_outputs(batch)
    if truth is None:
        return False
    reference = context.reference.run(batch)
    runs: list[OutputArray] = []
    for draw in range(_MORE_DRAWS):
        if is_valid(truth[output], reference[output], runs):
            return True
        runs.append(
            context.rounding_run(batch, RoundingRun(draw, fast_path=record.fast_path))[output]
        )
    return is_valid(truth[output], reference[output], runs)


def _are_ties(
    context: MeasurementContext,
    record: ReferenceValidity,
    batches: Sequence[Batch],
    integers: set[int],
) -> bool:
    """Return whether random rounding changes the integers that differ in float64, with few
    exceptions."""
    if not integers or record.rounding != "valid":
        return True
    left = dict.fromkeys(integers, 0)
    samples = 0
    for batch in batches:
        truth, reference = context.answers.truth(batch), context.answers.reference(batch)
        if truth is None:
            return False
        samples += length(batch)
        decided = {i: np.atleast_1d(np.asarray(truth[i] != reference[i])) for i in integers}
        for draw in range(DRAWS):
            run = context.rounding_run(batch, RoundingRun(draw, fast_path=record.fast_path))
            for i in integers:
                if run[i].shape == reference[i].shape:
                    decided[i] &= np.atleast_1d(run[i] == reference[i])
        for i, mask in decided.items():
            left[i] += int(mask.reshape(len(mask), -1).any(axis=1).sum())
    return all(count <= most_flips(samples) for count in left.values())
