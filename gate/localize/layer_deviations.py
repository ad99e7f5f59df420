"""Measure and classify the deviation of every layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from gate.data.reader import length
from gate.errors import GateError, ModelError, describe_failure
from gate.localize.file_graph import SubgraphSession
from gate.localize.model_runner import (
    Float64Values,
    ForwardPathChanged,
    LocalizationContext,
    ValueSurvey,
    sketch,
)
from gate.localize.value_matching import ValueLayout, returned_values
from gate.measure.noise_floor import DRAWS, NoiseStatistics
from gate.policy.defaults import BFLOAT16, REDUCED_UNIT
from gate.policy.runtime_options import OrtSetup
from gate.records.instruments import NoiseParity
from gate.records.runtime import RuntimeName
from gate.statistics.accumulators import distances
from gate.storage.arrays import Batch, OutputArray
from gate.weights.model_tensors import MIN_MASK, are_converted_masks


class Deviation:
    """The deviation of one tensor from one value, over all samples.

    Differences are over all elements. Noise is over the elements of the sketches in the first
    batch, for which the float64 reference was run.
    """

    def __init__(self) -> None:
        self.mismatch: dict[str, str] | None = None
        """The first pair of different shapes, or why there is no tensor, as a detail of
        `gate.decision.faults`."""
        self.failure: str | None = None
        """The exception of the runtime instead of the tensor."""
        self.largest = 0.0
        """max|c - r|; infinite if only one of them is finite."""
        self._sum = 0.0
        self._elements = 0
        self._noise = NoiseStatistics()
        self._rounding: NoiseStatistics | None = None
        self._is_compared = False
        self._exact = False
        self.finite = False
        """True if the model's value has a finite element."""
        self._scale = 0.0
        self._scale_in_float64 = 0.0

    def update(self, value: OutputArray, tensor: OutputArray) -> None:
        """Add a batch."""
        self.finite = self.finite or bool(np.isfinite(value).any())
        if value.shape != tensor.shape:
            shapes = {"got": str(tensor.shape), "want": str(value.shape)}
            self.mismatch = self.mismatch or {"code": "mismatch", **shapes}
            return
        self._is_compared = True
        self._exact = value.dtype.kind != "f"
        self._scale = max(self._scale, _magnitude(value))
        difference = distances(tensor, value)
        self.largest = max(self.largest, float(difference.max(initial=0.0)))
        self._sum += float(difference.sum())
        self._elements += difference.size

    def fail(self, failure: str) -> None:
        """Record that the runtime can't compute the tensor."""
        self.failure = failure
        self.mismatch = {"code": "unrun"}

    def update_noise(
        self,
        value: OutputArray,
        tensor: OutputArray,
        truth: OutputArray | None,
        rounding: OutputArray | None = None,
    ) -> None:
        """Add the noise of the first batch. truth: sketch of the float64 reference.

        Without a truth the value itself is used. Then the unit is the rounding of one float32
        operation, or `rounding`, the error of random rounding."""
        if value.shape == tensor.shape and value.dtype.kind == "f":
            sketched = sketch(value)
            true = sketched.astype(np.float64) if truth is None else truth
            if rounding is not None:
                true = sketched.astype(np.float64)
                sketched = np.add(true, rounding, dtype=np.float64)
            self._scale_in_float64 = max(self._scale_in_float64, _magnitude(value))
            self._noise.update(
                true, sketched, sketch(tensor), samples=len(value) if value.ndim else 1
            )

    def widen(self, rounding: NoiseStatistics | None) -> None:
        """Measure in units of random rounding where that is more than the model's own error."""
        self._rounding = rounding

    @property
    def equal(self) -> bool:
        """Return whether all elements are equal; NaN equals NaN."""
        return self._is_compared and self.mismatch is None and self.largest == 0.0

    @property
    def mean(self) -> float:
        """Return mean|c - r|; NaN if nothing was compared."""
        return self._sum / self._elements if self._elements else math.nan

    @property
    def ratio(self) -> float:
        """Return the `noise_ratio`; 0 or infinite for integers and bools, NaN if not compared."""
        noise = self._record()
        return self._measured(noise.ratio if noise.elements else math.nan)

    @property
    def peak(self) -> float:
        """Return the `noise_diff` over all samples.

        The unit grows with the values, if they exceed those of the float64 reference."""
        floor = self._record().floor_peak
        return self._measured(self.largest / self._growth / floor if floor else math.nan)

    @property
    def relative(self) -> float:
        """Return rms(c - r64) / rms(r64)."""
        noise = self._record()
        return noise.candidate_rms / noise.truth_rms if noise.truth_rms else math.nan

    def tolerances(self, bounds: tuple[float, float]) -> tuple[float, float]:
        """Return the rms and maximum of c - r at which `ratio` and `peak` reach their `bounds`.

        Both are 0 for integers and bools."""
        noise = self._record()
        if self._exact or not noise.elements:
            return 0.0, 0.0
        ratio, peak = bounds
        return (
            ratio * noise.floor_rms * (noise.scatter or 1.0),
            peak * (noise.floor_peak or 0.0) * self._growth,
        )

    @property
    def _growth(self) -> float:
        return self._scale / self._scale_in_float64 if self._scale_in_float64 else 1.0

    def _record(self) -> NoiseParity:
        return self._noise.result(rounding=self._rounding)

    def _measured(self, number: float) -> float:
        if self.mismatch is not None or math.isinf(self.largest):
            return math.inf
        if self._exact:
            return 0.0 if self.equal else math.inf
        return 0.0 if self.equal and math.isnan(number) else number  # no finite number, no noise


def _without_float16_limits(value: OutputArray, tensor: OutputArray) -> OutputArray:
    """Return the tensor with the model's value where float16 cannot represent it: for masks that
    its conversion clamps, and within the smallest step of a float16 tensor."""
    if value.dtype.kind != "f" or value.shape != tensor.shape:
        return tensor
    if tensor.dtype == np.float16:
        tensor = np.where(distances(tensor, value) <= _FLOAT16_STEP, value, tensor)
    if _magnitude(value) >= MIN_MASK:
        tensor = np.where(are_converted_masks(value, tensor), value, tensor)
    return tensor


_FLOAT16_STEP = 2.0**-24
"""Distance of the subnormal numbers of float16."""


def _magnitude(value: OutputArray) -> float:
    """Return max|value| over its finite elements."""
    with np.errstate(all="ignore"):
        largest = max(float(value.max(initial=0)), -float(value.min(initial=0)))
        if not math.isfinite(largest):
            finite = value[np.isfinite(value)].astype(np.float64)
            largest = float(np.abs(finite).max(initial=0.0))
    return largest


Level = Literal["ORT_ENABLE_ALL", "ORT_DISABLE_ALL"]

LEVELS: tuple[Level, ...] = ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL")

OFF: Level = "ORT_DISABLE_ALL"


@dataclass
class LayerDeviations:
    """The deviations of one value in both runs: through the whole file, and from right inputs."""

    through: Deviation = field(default_factory=Deviation)
    alone: Deviation = field(default_factory=Deviation)


@dataclass
class Measured:
    """The deviations measured for one file."""

    layers: dict[int, LayerDeviations]
    """Deviations by the number of the value."""
    marked: dict[str, Deviation] = field(default_factory=dict)
    """Deviations of the outputs of the marked file, which also returns the layers' tensors."""
    unmodified: dict[Level, dict[str, Deviation]] = field(default_factory=dict)
    """Deviations of the outputs of the unmodified file, by optimization level. ORT_ENABLE_ALL
    stands for the level of the runtime, if it enables any."""
    samples: int = 0
    noise_unmeasured: str | None = None


@dataclass(frozen=True)
class _View:
    """A session, with the (value, tensor, deviation) triples that it measures."""

    run: SubgraphSession
    pairs: Sequence[tuple[int, str, Deviation]]
    is_cut: bool = False
    """True if the layers are computed from right inputs."""
    may_fail: bool = False
    """True if a failure of the session is a result instead of an error."""


class Measuring:
    """Runs all batches for groups of layers that fit into the memory budget."""

    def __init__(
        self,
        context: LocalizationContext,
        survey: ValueSurvey,
        layout: ValueLayout,
        setup: OrtSetup,
        *,
        optimized: OrtSetup,
    ) -> None:
        """setup: for the layers. optimized: for the unmodified file with optimizations."""
        self._optimized = optimized
        self._context = context
        self._survey = survey
        self._layout = layout
        self._setup = setup
        producer = context.graph.producer
        self._names = {
            n: name for n, name in layout.names.items() if name in producer or n in layout.missing
        }
        self._returned = returned_values(context.graph.outputs, survey, layout.names)

    def run(self) -> Measured:
        """Measure all layers. Raises EvidenceError and the exceptions of ONNX Runtime."""
        measured = Measured({number: LayerDeviations() for number in self._names})
        size = 2 * sum(self._survey.values[number].nbytes for number in self._names)
        parts = list(self._context.parts(list(self._names), size=size)) or [()]
        for index, part in enumerate(parts):
            views = self._layers(part, measured)
            if index == 0:
                views = [*views, *self._outputs(measured)]
            self._compare(views, measured)
        return measured

    def _layers(self, part: Sequence[int], measured: Measured) -> list[_View]:
        """Return both runs of some layers; the first call also measures the marked outputs."""
        graph = self._context.graph
        names = {number: self._names[number] for number in part}
        tensors = [name for name in dict.fromkeys(names.values()) if name in graph.producer]
        layers = measured.layers
        through = [(n, name, layers[n].through) for n, name in names.items()]
        alone = [(n, name, layers[n].alone) for n, name in names.items()]
        if not measured.marked:
            measured.marked = {name: Deviation() for name in self._returned}
            through += [(n, o, measured.marked[o]) for o, n in self._returned.items()]
        marked = SubgraphSession(graph.marked(tensors), self._setup)
        cut = SubgraphSession(graph.cut(tensors, self._layout.cuts), self._setup)
        return [_View(marked, through), _View(cut, alone, is_cut=True)]

    def _outputs(self, measured: Measured) -> Iterator[_View]:
        """Yield the unmodified file with the runtime's optimizations and without any.

        Without optimizations marking changes nothing. With them a failure to run is a result.
        """
        for level in LEVELS:
            may_fail = level != OFF
            if level == self._setup.optimization == OFF:
                measured.unmodified[level] = measured.marked
                continue
            unmodified = measured.unmodified[level] = {name: Deviation() for name in self._returned}
            setup = self._optimized if may_fail else self._setup.plain
            try:
                run = SubgraphSession(self._context.graph.marked(()), setup)
            except GateError:
                raise
            except Exception as error:  # of ONNX Runtime, without a common base
                if not may_fail:
                    raise
                _fail(unmodified.values(), error)
                continue
            pairs = [(n, o, unmodified[o]) for o, n in self._returned.items()]
            yield _View(run, pairs, may_fail=may_fail)

    def _compare(self, views: Sequence[_View], measured: Measured) -> None:
        layout = self._layout
        needed = {number for view in views for number, _, _ in view.pairs}
        needed |= {layout.value_at_cut[cut] for view in views for cut in view.run.cuts}
        sample_count = 0
        for batch, values in self._values(needed):
            truths = None if sample_count else self._truths(batch, values, measured)
            for view in views:
                self._measure_view(view, batch, values, truths, first=not sample_count)
            sample_count += length(batch)
        measured.samples = sample_count

    def _measure_view(
        self,
        view: _View,
        batch: Batch,
        values: Mapping[int, OutputArray],
        truths: Float64Values | None,
        *,
        first: bool,
    ) -> None:
        cuts = self._layout.references(view.run.cuts, values)
        feed = self._context.feed(batch)
        # A missing layer may have an input of the file in its place.
        names = dict.fromkeys(name for _, name, _ in view.pairs)
        only = [name for name in names if name not in feed]
        try:
            arrays = {**feed, **view.run(feed, cuts, only=only)}
        except Exception as error:  # of ONNX Runtime, without a common base
            if not view.may_fail:
                raise
            _fail((deviation for _, _, deviation in view.pairs), error)
            return
        true: Mapping[int, OutputArray] | None = None
        rounding: Mapping[int, OutputArray] = {}
        if truths is not None:
            true = truths.alone if view.is_cut else truths.through
            rounding = truths.rounding[view.is_cut]
        for number, name, deviation in view.pairs:
            tensor = arrays[name]
            if self._context.policy.precision == "reduced":
                tensor = _without_float16_limits(values[number], tensor)
            deviation.update(values[number], tensor)
            if first:
                deviation.update_noise(
                    values[number],
                    tensor,
                    true[number] if true else None,
                    rounding.get(number),
                )

    def _values(self, needed: set[int]) -> Iterator[tuple[Batch, dict[int, OutputArray]]]:
        """Yield the batches whose forward calls the same modules as in the first one."""
        for index, batch in enumerate(self._context.batches):
            try:
                yield batch, self._context.runner.values(batch, self._survey, needed)
            except ForwardPathChanged:
                if index == 0:
                    raise

    def _truths(
        self, batch: Batch, values: Mapping[int, OutputArray], measured: Measured
    ) -> Float64Values | None:
        try:
            return self._context.runner.float64_values(batch, self._survey, values)
        except ModelError as error:
            measured.noise_unmeasured = str(error)
            return None


def widen_by_rounding(
    measured: Measured, context: LocalizationContext, survey: ValueSurvey, layout: ValueLayout
) -> Measured:
    """Return the deviations in units of random rounding, where that is larger on the first batch.

    PyTorch's own error is no unit for an operator whose kernel in ONNX Runtime has an absolute
    error, as that of a saturated sigmoid. Raises ModelError or EvidenceError where the model can't
    run in float64 or under random rounding.
    """
    returned = returned_values(context.graph.outputs, survey, layout.names)
    numbers = {*measured.layers, *returned.values(), *layout.value_at_cut.values()}
    runner, batch = context.runner, context.batches[0]
    values = runner.values(batch, survey, numbers)
    truths = runner.float64_values(batch, survey, values)
    runs = [runner.rounded(batch, survey, values, draw=draw) for draw in range(DRAWS)]

    def floors(*, alone: bool) -> dict[int, NoiseStatistics]:
        """Return the noise floors by value, where float64 computes the same function."""
        truth = (truths.through, truths.alone)[alone]
        return {
            number: NoiseStatistics.median(
                [_noise_of(truth[number], value, run[alone][number]) for run in runs]
            )
            for number, value in values.items()
            if value.dtype.kind == "f" and number in truth and number not in truths.rounding[alone]
        }

    through, alone = floors(alone=False), floors(alone=True)
    widened = copy.deepcopy(measured)
    for number, layer in widened.layers.items():
        layer.through.widen(through.get(number))
        layer.alone.widen(alone.get(number))
    for outputs in (widened.marked, *widened.unmodified.values()):
        for name, output in outputs.items():
            output.widen(through.get(returned[name]))
    return widened


def _noise_of(truth: OutputArray, value: OutputArray, run: OutputArray) -> NoiseStatistics:
    noise = NoiseStatistics()
    noise.update(truth, sketch(value), run, samples=len(value) if value.ndim else 1)
    return noise


def _fail(deviations: Iterable[Deviation], error: Exception) -> None:
    for deviation in deviations:
        deviation.fail(describe_failure(error))


_LAYER_BOUNDS = (8.0, 24.0)
"""Bounds on `ratio` and `peak` of a layer alone.

Measured on the corpus of correct files (benchmarks/corpus: all architectures, exporters and opsets,
both levels of optimization) and on resnet18, mobilenet_v3_small, densenet121, convnext_tiny, swin_t
and a small vision transformer with all exporters that support them: right layers have at most 3.2
and 6.6. An error of 10 % in one weight gives 2 400, one tensor in float16 1 100, GELU by tanh
3 400, epsilon 1e-3 instead of 1e-5 4 000, and 1e-5 instead of 1e-6 14.
"""

_MAX_PROPAGATED_RATIO = 16.0
"""Bound on `ratio` of a layer in the whole file, where errors accumulate: right layers have at most
7. It only separates propagated deviations from layers that are still right."""

_OUTPUT_BOUNDS = (8.0, 64.0)
"""Bounds on `ratio` and `peak` of the outputs of the unmodified file: right ones have at most 3 and
7. They are wider than the policy's, because there are few samples and no verdict depends on it."""

_MIN_GROWTH = 2.0
"""Minimum factor between the deviations with and without optimizations at which the optimizers are
suspected. Otherwise the limit could lie between two similar deviations."""

_CUDA_FACTOR = 10.0
"""Factor for CUDA, where other algorithms and orders of summation may round more. It is wider than
the policy's bounds, because no verdict depends on it."""

_FACTOR_WITHOUT_FLOAT64 = 64.0
"""Factor without float64, where the unit is one rounding instead of those of a whole layer."""


@dataclass(frozen=True)
class DeviationLimits:
    """The limits up to which a deviation counts as rounding."""

    runtime: RuntimeName
    setup: OrtSetup
    float64: bool
    """False if the model can't run in float64."""
    reduced: bool = False
    """True if the policy allows 16-bit floats."""
    bfloat16: bool = False
    """True if the 16-bit floats are bfloat16."""
    quantized: bool = False
    """True if the policy allows quantization."""
    fake_quantized: bool = False
    """True if the model itself rounds floats to the steps of a quantized type."""
    plain_refused: bool = False
    """True if the same providers without optimizations were refused, so that the optimizers are not
    the only cause."""

    @property
    def level(self) -> Level:
        """Return the optimization level of the runtime."""
        enabled = self.setup.optimization != "ORT_DISABLE_ALL"
        return "ORT_ENABLE_ALL" if enabled else "ORT_DISABLE_ALL"

    def is_optimizer(self, unmodified: Mapping[Level, Mapping[str, Deviation]]) -> bool:
        """Return whether the unmodified file is right without optimizations and clearly wrong with
        them."""
        return self.relaxed_limit(unmodified, refused=False) is not None

    def relaxed_limit(
        self, unmodified: Mapping[Level, Mapping[str, Deviation]], *, refused: bool
    ) -> float | None:
        """Return the `bound_usage` up to which outputs are as right as without optimizations, or
        None if the optimizers are not suspected.

        refused: the outputs with optimizations are refused although they are within the limits."""
        off, on = (
            self.bound_usage(unmodified["ORT_DISABLE_ALL"]),
            self.bound_usage(unmodified["ORT_ENABLE_ALL"]),
        )
        wrong = on > 1.0 or (refused and self.level != "ORT_DISABLE_ALL" and on > 0.0)
        if self.plain_refused or not (off <= 1.0 and wrong and on >= _MIN_GROWTH * off):
            return None
        return min(1.0, math.sqrt(max(off, on / _MIN_GROWTH**4) * on))

    def is_source(self, layer: LayerDeviations) -> bool:
        """Return True if the layer is wrong although its inputs are right."""
        ratio, peak = self.layer_bounds
        return not (layer.alone.ratio <= ratio and layer.alone.peak <= peak)

    def is_off(self, layer: LayerDeviations) -> bool:
        """Return whether the layer's output in the whole file differs by more than rounding."""
        return not layer.through.ratio <= _MAX_PROPAGATED_RATIO * self._factor

    def agrees(self, outputs: Mapping[str, Deviation]) -> bool:
        """Return whether all outputs differ only by rounding."""
        return self.bound_usage(outputs) <= 1.0

    def bound_usage(self, outputs: Mapping[str, Deviation]) -> float:
        """Return the largest share of its bound that an output uses; infinite for NaN."""
        ratio, peak = self.output_bounds
        parts = [p for o in outputs.values() for p in (o.ratio / ratio, o.peak / peak)]
        return math.inf if any(map(math.isnan, parts)) else max(parts, default=0.0)

    @property
    def layer_bounds(self) -> tuple[float, float]:
        """Return the bounds on `ratio` and `peak` of a layer alone."""
        return self._widen(_LAYER_BOUNDS)

    @property
    def output_bounds(self) -> tuple[float, float]:
        """Return the bounds on `ratio` and `peak` of an output of the unmodified file."""
        return self._widen(_OUTPUT_BOUNDS)

    def _widen(self, bounds: tuple[float, float]) -> tuple[float, float]:
        return bounds[0] * self._factor, bounds[1] * self._factor

    @property
    def _factor(self) -> float:
        factor = 1.0 if self.setup.on_cpu else _CUDA_FACTOR
        if self.reduced:  # other orders of summation are negligible in comparison
            factor = REDUCED_UNIT * (BFLOAT16 if self.bfloat16 else 1.0)
        return factor if self.float64 else factor * _FACTOR_WITHOUT_FLOAT64


def worst(outputs: Mapping[str, Deviation]) -> float:
    """Return the largest `ratio` of the outputs; NaN without outputs."""
    ratios = [output.ratio for output in outputs.values()]
    return math.nan if any(map(math.isnan, ratios)) else max(ratios, default=math.nan)
