"""Check whether rounding explains each outlier sample."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gate.data.reader import length
from gate.decision.bound_rules import floor_share
from gate.errors import GateError
from gate.measure.context import MeasurementContext
from gate.measure.noise_floor import BASELINE_DRAWS, DRAWS, MORE_DRAWS, rounding_floor
from gate.measure.runtime_measurement import MAX_EXAMINED, RuntimeMeasurement
from gate.measure.session_runner import RoundingVariants, row_of, select_sample
from gate.records.evidence import RuntimeEvidence
from gate.reference.float64 import Float64Reference
from gate.reference.onnx_reference import OnnxReference
from gate.reference.validity import OutputErrors
from gate.statistics.accumulators import interleave
from gate.storage.arrays import OutputArray

# A sample is doubtful if its error is large in units of the first samples' floor, or if an integer
# or the top-1 answer differs. For such a sample, float64 and several runs under random rounding
# show how large the error of a correct float32 implementation can be.


_steps = logging.getLogger("gate.steps")

_DRAWS = 8

_EXACT = 2
"""Number of `correct_runs` before the first one under random rounding."""

_MORE_DRAWS = 64
"""Number of draws if few integers of a sample are unexplained: some ties are rarely reached by
rounding."""

_MAX_LEFT = 8
"""Maximum number of unexplained integers for more draws; alternatively an eighth of the initial
number."""

_SCALE = 2.0
"""Scale of rounding in later draws, as for probes (`gate.probes.branches`)."""

_HOPELESS = 32.0
"""Above this suspicion, more draws can't make the floor wide enough."""

_PATIENCE = 4
"""Number of samples with unexplained integers after which the file is considered wrong."""


def rounding_variants(context: MeasurementContext, sample: int) -> RoundingVariants | None:
    """Return the values that rounding permits for a sample.

    None without float64 outputs, or if the model can't run under random rounding.
    """
    start, measured = context.measured_batch(sample)
    alone, row = context.smallest_batch(sample)
    truth = context.truth.extra_outputs(alone)
    if truth is None:
        return None
    try:
        reference = context.reference.run(alone)
        draws = [context.rounded_run(alone, draw=draw) for draw in range(_DRAWS)]
    except GateError:
        return None
    truth = context.truth.validity.checked(truth, reference, draws)
    count = length(alone)
    return RoundingVariants(
        sample=sample,
        truth=tuple(select_sample(truth, row, count)),
        reference=tuple(select_sample(reference, row, count)),
        draws=tuple(tuple(select_sample(run, row, count)) for run in draws),
        batch=measured,
        row=sample - start,
        count=length(measured),
    )


def correct_runs(context: MeasurementContext, sample: int) -> Iterator[list[OutputArray | None]]:
    """Yield results that a correct runtime may return for a sample.

    They are the float64 outputs, those of PyTorch, and runs under random rounding, the later ones
    with doubled rounding errors.
    """
    batch, row = context.smallest_batch(sample)
    count = length(batch)
    truth = context.truth.extra_outputs(batch)
    if truth is None:
        return
    try:
        reference = context.reference.run(batch)
        yield row_of(context.truth.validity.baseline(truth, reference), row, count)
        yield row_of(reference, row, count)
        for draw in range(_MORE_DRAWS):
            scale = 1.0 if draw < _DRAWS else _SCALE
            run = context.rounded_run(batch, draw=draw, scale=scale, ties=True)
            yield row_of(run, row, count)
    except GateError:
        return


class RoundingFloor:
    """Measures the rounding floor if the error of a runtime exceeds PyTorch's; with more draws if
    the error also exceeds this floor by a little."""

    def __init__(self, context: MeasurementContext, runtimes: Sequence[RuntimeMeasurement]) -> None:
        self._context = context
        self._runtimes = runtimes
        self._is_widened = False

    def keep_floors(self) -> None:
        """Keep the current floors, which another process measured."""
        self._is_widened = True

    def widen(self) -> None:
        """Widen the floor of every runtime if necessary; later calls do nothing."""
        if self._is_widened:
            return
        self._is_widened = True
        is_only_floor = self._context.truth.validity.needs_rounding
        if not is_only_floor and self._suspicion(self._runtimes) <= 1.0:
            return
        self._measure(BASELINE_DRAWS if is_only_floor else DRAWS)
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
"""A floor above this share of an output's spread may hide a fault. Fixed rather than taken from the
policy, because the evidence must not depend on bounds."""


def float64_differences(
    context: MeasurementContext, measured: Sequence[RuntimeEvidence]
) -> dict[str, float]:
    """Return the difference of file and model in float64, for outputs with a wide floor.

    The values are `OutputErrors.share`, by output. Empty if one of them can't run in float64, if
    float64 computes another function than the model, or if the file computes in 16 bits, where
    rounding is intended.
    """
    record, specs = context.truth.validity.record, context.tested_file.subject.outputs
    outputs = [output for runtime in measured for output in runtime.outputs]
    wide = {output.name for output in outputs if floor_share(output) > _WIDE}
    names = {
        output: spec.name
        for output, spec in enumerate(specs)
        if spec.name in wide and record.uses_float64(output)
    }
    if not names:
        return {}
    errors: dict[str, OutputErrors] = {}
    try:
        module = OnnxReference.from_file(context.tested_file)
        if module.is_widened:
            return {}
        file = Float64Reference(module, replace(context.binding, sample_names=()))
        for batch in context.batches_with_truth():
            truth, actual = context.answers.truth(batch), file.run(batch)
            for output, name in names.items():
                if truth is None or actual[output].shape != truth[output].shape:
                    return {}
                part = OutputErrors.between(truth[output], actual[output], samples=length(batch))
                errors[name] = errors[name].joined(part) if name in errors else part
    except GateError:
        return {}
    return {name: each.share for name, each in errors.items()}


def analyze_outliers(context: MeasurementContext, runtimes: Sequence[RuntimeMeasurement]) -> None:
    """Compute doubtful samples again to separate rounding from errors of the file."""
    policy = context.applied_policy
    doubtful = [runtime.comparison.outliers for runtime in runtimes]
    pairs = zip(doubtful, runtimes, strict=True)
    selected = [indices[: runtime.examined_limit(policy)] for indices, runtime in pairs]
    samples = interleave(selected)[:MAX_EXAMINED]
    looked: set[int] = set()
    for index, sample in enumerate(samples):
        if not any(sample in indices for indices in selected):
            continue
        _steps.debug("second looks: %d of %d samples left", len(samples) - index, len(samples))
        look = rounding_variants(context, sample)
        if look is None:
            break
        looked.add(sample)
        for number, runtime in enumerate(runtimes):
            runtime.accept_variants(look)
            if runtime.has_settled(policy):
                selected[number] = selected[number][: runtime.examined_limit(policy)]
    for indices, runtime in zip(doubtful, runtimes, strict=True):
        limit = runtime.examined_limit(policy)
        if limit < MAX_EXAMINED:
            mismatched = [] if limit else runtime.comparison.mismatched_integers
            runtime.leave_out(len({*indices, *mismatched} - looked))
    _excuse_ties(context, [runtime for runtime in runtimes if runtime.examined_limit(policy)])


def _excuse_ties(context: MeasurementContext, runtimes: Sequence[RuntimeMeasurement]) -> None:
    """Accept differing integers that rounding explains; stop after too many unexplained samples."""
    patience = _PATIENCE
    for sample in sorted(
        {sample for runtime in runtimes for sample in runtime.comparison.mismatched_integers}
    ):
        before = _unexplained(runtimes, sample)
        for number, run in enumerate(correct_runs(context, sample)):
            for runtime in runtimes:
                runtime.excuse(sample, run, drawn=number >= _EXACT)
            left = _unexplained(runtimes, sample)
            if not left or (number > _DRAWS and left > max(_MAX_LEFT, before // 8)):
                break
        patience -= bool(_unexplained(runtimes, sample))
        if not patience:
            return


def _unexplained(runtimes: Sequence[RuntimeMeasurement], sample: int) -> int:
    return max((runtime.comparison.unexplained(sample) for runtime in runtimes), default=0)
