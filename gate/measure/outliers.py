"""Does rounding explain each outlier sample?"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest

from gate.data.reader import length
from gate.decision.bound_rules import floor_share
from gate.errors import GateError
from gate.measure.context import MeasurementContext
from gate.measure.noise_floor import BASELINE_DRAWS, DRAWS, MORE_DRAWS, rounding_floor
from gate.measure.runtime_measurement import MOST_LOOKS, RuntimeMeasurement
from gate.measure.session_runner import RoundingVariants, row_of, sample_outputs
from gate.records.evidence import RuntimeEvidence
from gate.reference.float64 import Float64Reference
from gate.reference.onnx_reference import OnnxReference
from gate.reference.validity import OutputErrors
from gate.storage.arrays import Batch, OutputArray

# A sample is doubtful where its error is large in units of the first samples' floor, where an
# integer differs, or where the answer does. There the float64 truth and several runs under random
# rounding show how far a correct float32 implementation may be off on that very sample.


_steps = logging.getLogger("gate.steps")

_DRAWS = 8

_EXACT = 2
"""Results of `OutlierAnalysis.honest` before the first run under random rounding."""

_MORE_DRAWS = 64
"""Of a sample few integers of which no draw has: of a hundred ties a few lie where rounding seldom
goes."""

_FEW = 8
"""Integers of a sample for which that is worth it; of very many, an eighth of those before."""

_SCALE = 2.0
"""As for probes (`gate.probes.branches`)."""

_HOPELESS = 32.0
"""Times what is suspicious: no number of runs makes such a floor."""

_PATIENCE = 4
"""Samples with integers that nothing explains, after which it is the file."""


class OutlierAnalysis:
    """Looks at samples, each once for all runtimes."""

    def __init__(self, context: MeasurementContext) -> None:
        self._context = context

    def at(self, sample: int) -> RoundingVariants | None:
        """Return the values that rounding permits for a sample.

        None where there is no float64 truth, or the model can't be computed under random rounding.
        """
        start, company = self._company(sample)
        alone, row = self._alone(sample)
        truth = self._context.truth.aside(alone)
        if truth is None:
            return None
        try:
            reference = self._context.reference.run(alone)
            draws = [self._context.rounded_run(alone, draw=draw) for draw in range(_DRAWS)]
        except GateError:
            return None
        truth = self._context.truth.validity.checked(truth, reference, draws)
        count = length(alone)
        return RoundingVariants(
            sample=sample,
            truth=tuple(sample_outputs(truth, row, count)),
            reference=tuple(sample_outputs(reference, row, count)),
            draws=tuple(tuple(sample_outputs(run, row, count)) for run in draws),
            batch=company,
            row=sample - start,
            count=length(company),
        )

    def honest(self, sample: int) -> Iterator[list[OutputArray | None]]:
        """Yield results that a correct runtime may return for a sample.

        They are the float64 truth, PyTorch, and runs under random rounding, the later ones twice as
        far off.
        """
        batch, row = self._alone(sample)
        count = length(batch)
        truth = self._context.truth.aside(batch)
        if truth is None:
            return
        try:
            reference = self._context.reference.run(batch)
            yield row_of(self._context.truth.validity.baseline(truth, reference), row, count)
            yield row_of(reference, row, count)
            for draw in range(_MORE_DRAWS):
                scale = 1.0 if draw < _DRAWS else _SCALE
                run = self._context.rounded_run(batch, draw=draw, scale=scale, ties=True)
                yield row_of(run, row, count)
        except GateError:
            return

    def _company(self, sample: int) -> tuple[int, Batch]:
        """The batch that the sample was measured in, and its first sample."""
        size = self._context.binding.batch_size
        places = self._context.samples.batch_around(sample, size)
        return places.start, self._pick(places)

    def _alone(self, sample: int) -> tuple[Batch, int]:
        """The smallest batch that the file and the model take with the sample in it, and its place
        there."""
        if self._context.smallest == 1:
            return self._pick([sample]), 0
        start, company = self._company(sample)
        return company, sample - start

    def _pick(self, places: Sequence[int]) -> Batch:
        return next(self._context.samples.take(places).batches(len(places)))


class RoundingFloor:
    """Measures the floor of rounding, if a runtime is farther off than PyTorch itself; and more
    exactly where it is a little farther off than that, too."""

    def __init__(self, context: MeasurementContext, runtimes: Sequence[RuntimeMeasurement]) -> None:
        self._context = context
        self._runtimes = runtimes
        self._done = False

    def mark_done(self) -> None:
        """Leave the runtimes the floors that they have: another process measured them."""
        self._done = True

    def widen(self) -> None:
        """Give it to every runtime; later calls do nothing."""
        if self._done:
            return
        self._done = True
        alone = self._context.truth.validity.needs_rounding
        if not alone and self._suspicion(self._runtimes) <= 1.0:
            return
        self._measure(BASELINE_DRAWS if alone else DRAWS)
        policy = self._context.applied_policy
        clear = [runtime for runtime in self._runtimes if runtime.is_clearly_refused(policy)]
        if 1.0 < self._suspicion([t for t in self._runtimes if t not in clear]) <= _HOPELESS:
            self._measure(MORE_DRAWS)
            return
        for runtime in clear:
            runtime.comparison.floor.few_draws = True

    @staticmethod
    def _suspicion(runtimes: Sequence[RuntimeMeasurement]) -> float:
        return max((runtime.comparison.floor.suspicion() for runtime in runtimes), default=0.0)

    def _measure(self, draws: int) -> None:
        floors = rounding_floor(self._context, draws=draws)
        for runtime in self._runtimes:
            runtime.comparison.floor.widen(floors)


_WIDE = 1e-3
"""Share of an output's spread from which on a floor may hide a fault. Fixed, not the policy's: the
evidence must not depend on bounds."""


def float64_differences(
    context: MeasurementContext, measured: Sequence[RuntimeEvidence]
) -> dict[str, float]:
    """Return how far the file is from the model where both compute in float64, by output whose
    floor is wide in a runtime, as `OutputErrors.share`.

    Empty where one of them can't be computed so, or float64 is another function than the model; and
    of a file that computes in 16 bits, whose rounding is a part of what it computes.
    """
    record, names = context.truth.validity.record, context.tested_file.subject.outputs
    outputs = [output for runtime in measured for output in runtime.outputs]
    wide = {output.name for output in outputs if floor_share(output) > _WIDE}
    places = {
        place: spec.name
        for place, spec in enumerate(names)
        if spec.name in wide and record.uses_float64(place)
    }
    if not places:
        return {}
    errors: dict[str, OutputErrors] = {}
    try:
        module = OnnxReference.from_file(context.tested_file)
        if module.is_widened:
            return {}
        file = Float64Reference(module, replace(context.binding, given=()))
        for batch in context.batches_with_truth():
            truth, own = context.answers.truth(batch), file.run(batch)
            for place, name in places.items():
                if truth is None or own[place].shape != truth[place].shape:
                    return {}
                found = OutputErrors.between(truth[place], own[place], samples=length(batch))
                errors[name] = errors[name].joined(found) if name in errors else found
    except GateError:
        return {}
    return {name: each.share for name, each in errors.items()}


def analyze_outliers(context: MeasurementContext, runtimes: Sequence[RuntimeMeasurement]) -> None:
    """Separate the effects of rounding from those of the file, where there is reason to doubt."""
    second, policy = OutlierAnalysis(context), context.applied_policy
    doubtful = [runtime.comparison.outliers for runtime in runtimes]
    pairs = zip(doubtful, runtimes, strict=True)
    wanted = [places[: runtime.looks(policy)] for places, runtime in pairs]
    turns = chain.from_iterable(zip_longest(*wanted))
    samples = list(dict.fromkeys(sample for sample in turns if sample is not None))[:MOST_LOOKS]
    looked: set[int] = set()
    for done, sample in enumerate(samples):
        if not any(sample in places for places in wanted):
            continue
        _steps.debug("second looks: %d of %d samples left", len(samples) - done, len(samples))
        look = second.at(sample)
        if look is None:
            break
        looked.add(sample)
        for place, runtime in enumerate(runtimes):
            runtime.accept_variants(look)
            if runtime.has_settled(policy):
                wanted[place] = wanted[place][: runtime.looks(policy)]
    for places, runtime in zip(doubtful, runtimes, strict=True):
        most = runtime.looks(policy)
        if most < MOST_LOOKS:
            torn = [] if most else runtime.comparison.mismatched_integers
            runtime.leave_out(len({*places, *torn} - looked))
    _excuse_ties(second, [runtime for runtime in runtimes if runtime.looks(policy)])


def _excuse_ties(second: OutlierAnalysis, runtimes: Sequence[RuntimeMeasurement]) -> None:
    """Excuse the samples in which integers differ, until too many of them can't be explained."""
    patience = _PATIENCE
    for sample in sorted(
        {sample for runtime in runtimes for sample in runtime.comparison.mismatched_integers}
    ):
        before = _unexplained(runtimes, sample)
        for number, run in enumerate(second.honest(sample)):
            for runtime in runtimes:
                runtime.excuse(sample, run, drawn=number >= _EXACT)
            left = _unexplained(runtimes, sample)
            if not left or (number > _DRAWS and left > max(_FEW, before // 8)):
                break
        patience -= bool(_unexplained(runtimes, sample))
        if not patience:
            return


def _unexplained(runtimes: Sequence[RuntimeMeasurement], sample: int) -> int:
    return max((runtime.comparison.unexplained(sample) for runtime in runtimes), default=0)
