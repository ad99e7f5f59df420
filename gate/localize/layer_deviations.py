"""Measure and classify the deviation of every layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

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
from gate.storage.arrays import Batch, OutputArray


class Deviation:
    """One tensor against one value, over all samples.

    Differences count every element. Noise counts the elements of the sketches, on the first batch,
    on which the float64 reference ran.
    """

    def __init__(self) -> None:
        self.mismatch: dict[str, str] | None = None
        """The first shapes that are not equal, or why there is no tensor, as a detail of
        `gate.decision.faults`."""
        self.failure: str | None = None
        """What the runtime raised in the tensor's place."""
        self.largest = 0.0
        """max|c - r|; infinite where only one of them is finite."""
        self._sum = 0.0
        self._elements = 0
        self._noise = NoiseStatistics()
        self._rounding: NoiseStatistics | None = None
        self._compared = False
        self._exact = False
        self.finite = False
        """True if the model has any finite number here."""
        self._scale = 0.0
        self._scale_in_float64 = 0.0

    def update(self, value: OutputArray, tensor: OutputArray) -> None:
        """Add a batch."""
        self.finite = self.finite or bool(np.isfinite(value).any())
        if value.shape != tensor.shape:
            shapes = {"got": str(tensor.shape), "want": str(value.shape)}
            self.mismatch = self.mismatch or {"code": "mismatch", **shapes}
            return
        self._compared = True
        self._exact = value.dtype.kind != "f"
        self._scale = max(self._scale, _magnitude(value))
        apart = _apart(value, tensor)
        self.largest = max(self.largest, float(apart.max(initial=0.0)))
        self._sum += float(apart.sum())
        self._elements += apart.size

    def fail(self, failure: str) -> None:
        """There is no tensor, because the runtime can't compute it."""
        self.failure = failure
        self.mismatch = {"code": "unrun"}

    def update_noise(
        self,
        value: OutputArray,
        tensor: OutputArray,
        truth: OutputArray | None,
        rounding: OutputArray | None = None,
    ) -> None:
        """Add the first batch again, with the sketch of what the float64 reference computed.
        Without one the value itself is the truth, and the unit is the rounding of one float32
        operation, or `rounding`: the error that random rounding makes."""
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
        """Return True if all elements are equal, NaN to NaN."""
        return self._compared and self.mismatch is None and self.largest == 0.0

    @property
    def mean(self) -> float:
        """mean|c - r|; NaN where nothing could be compared."""
        return self._sum / self._elements if self._elements else math.nan

    @property
    def ratio(self) -> float:
        """`noise_ratio`; of integers and bools 0 or infinite, NaN where nothing could be
        compared."""
        noise = self._record()
        return self._measured(noise.ratio if noise.elements else math.nan)

    @property
    def peak(self) -> float:
        """`noise_diff` over all samples; where values are larger than those that the float64
        reference computed, they may be off by more."""
        grown = self._scale / self._scale_in_float64 if self._scale_in_float64 else 1.0
        floor = self._record().floor_peak
        return self._measured(self.largest / grown / floor if floor else math.nan)

    @property
    def relative(self) -> float:
        """rms(c - r64) / rms(r64)."""
        noise = self._record()
        return noise.candidate_rms / noise.truth_rms if noise.truth_rms else math.nan

    def tolerances(self, bounds: tuple[float, float]) -> tuple[float, float]:
        """Return the rms and the maximum of c - r up to which `ratio` and `peak` over the whole
        tensor are within `bounds`; 0 for integers and bools."""
        noise = self._record()
        if self._exact or not noise.elements:
            return 0.0, 0.0
        grown = self._scale / self._scale_in_float64 if self._scale_in_float64 else 1.0
        ratio, peak = bounds
        return (
            ratio * noise.floor_rms * (noise.scatter or 1.0),
            peak * (noise.floor_peak or 0.0) * grown,
        )

    def _record(self) -> NoiseParity:
        return self._noise.result(rounding=self._rounding)

    def _measured(self, number: float) -> float:
        if self.mismatch is not None or math.isinf(self.largest):
            return math.inf
        if self._exact:
            return 0.0 if self.equal else math.inf
        return 0.0 if self.equal and math.isnan(number) else number  # no finite number, no noise


def _apart(value: OutputArray, tensor: OutputArray) -> NDArray[np.float64]:
    """|tensor - value|; infinite where only one of them is finite, 0 where both are the same NaN
    or infinity."""
    with np.errstate(all="ignore"):
        apart = np.asarray(np.subtract(tensor, value, dtype=np.float64))  # of scalars no array
        np.abs(apart, out=apart)
        if not np.isfinite(apart).all():
            alike = (tensor == value) | (_is_nan(tensor) & _is_nan(value))
            apart = np.where(alike, 0.0, np.where(np.isfinite(apart), apart, math.inf))
    return apart


def _is_nan(array: OutputArray) -> NDArray[np.bool_]:
    nan: NDArray[np.bool_] = np.isnan(array)
    return nan


def _magnitude(value: OutputArray) -> float:
    """max|value| over its finite elements."""
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
    """One value in both runs: through the whole file, and alone, from right inputs."""

    through: Deviation = field(default_factory=Deviation)
    alone: Deviation = field(default_factory=Deviation)


@dataclass
class Measured:
    """The deviations measured for one file."""

    layers: dict[int, LayerDeviations]
    """By the numbers of values."""
    marked: dict[str, Deviation] = field(default_factory=dict)
    """The file's outputs, when the tensors of all layers are outputs too."""
    whole: dict[Level, dict[str, Deviation]] = field(default_factory=dict)
    """The same for the unmodified file, by optimization level: ORT_ENABLE_ALL stands for the level
    of the runtime, where it enables any."""
    samples: int = 0
    noise_unmeasured: str | None = None


@dataclass(frozen=True)
class _View:
    """A run, and which of its tensors is compared with which value, in what."""

    run: SubgraphSession
    pairs: Sequence[tuple[int, str, Deviation]]
    references: ValueLayout | None = None
    """Where the file is cut."""
    doubted: bool = False
    """True if it is a result that it can't run."""


class Measuring:
    """Runs all batches, in parts of the layers that fit the budget."""

    def __init__(
        self,
        bench: LocalizationContext,
        survey: ValueSurvey,
        layout: ValueLayout,
        setup: OrtSetup,
        *,
        optimized: OrtSetup,
    ) -> None:
        """`setup`: of the layers; `optimized`: of the file as it is, with optimizations on."""
        self._optimized = optimized
        self._bench = bench
        self._survey = survey
        self._layout = layout
        self._setup = setup
        producer = bench.graph.producer
        self._names = {n: name for n, name in layout.names.items() if name in producer}
        self._returned = returned_values(bench.graph.outputs, survey, layout.names)

    def run(self) -> Measured:
        """Raises EvidenceError, and what ONNX Runtime raises."""
        measured = Measured({number: LayerDeviations() for number in self._names})
        size = 2 * sum(self._survey.values[number].nbytes for number in self._names)
        parts = list(self._bench.parts(list(self._names), size=size)) or [()]
        for place, part in enumerate(parts):
            views = self._layers(part, measured)
            if place == 0:
                views = [*views, *self._outputs(measured)]
            self._compare(views, measured)
        return measured

    def _layers(self, part: Sequence[int], measured: Measured) -> list[_View]:
        """Both runs of some layers; the outputs of the marked file with the first of them."""
        graph = self._bench.graph
        names = {number: self._names[number] for number in part}
        tensors = list(dict.fromkeys(names.values()))
        layers = measured.layers
        through = [(n, name, layers[n].through) for n, name in names.items()]
        alone = [(n, name, layers[n].alone) for n, name in names.items()]
        if not measured.marked:
            measured.marked = {name: Deviation() for name in self._returned}
            through += [(n, o, measured.marked[o]) for o, n in self._returned.items()]
        return [
            _View(SubgraphSession(graph.marked(tensors), self._setup), through),
            _View(
                SubgraphSession(graph.cut(tensors, self._layout.cuts), self._setup),
                alone,
                self._layout,
            ),
        ]

    def _outputs(self, measured: Measured) -> Iterator[_View]:
        """The file as it is, with the runtime's optimizations and without any.

        Without optimizations marking changes nothing. That it can't run with them is a result.
        """
        for level in LEVELS:
            doubted = level != OFF
            if level == self._setup.optimization == OFF:
                measured.whole[level] = measured.marked
                continue
            whole = measured.whole[level] = {name: Deviation() for name in self._returned}
            setup = self._optimized if doubted else self._setup.plain
            try:
                run = SubgraphSession(self._bench.graph.marked(()), setup)
            except GateError:
                raise
            except Exception as error:  # of ONNX Runtime, without a common base
                if not doubted:
                    raise
                _fail(whole.values(), error)
                continue
            pairs = [(n, o, whole[o]) for o, n in self._returned.items()]
            yield _View(run, pairs, doubted=doubted)

    def _compare(self, views: Sequence[_View], measured: Measured) -> None:
        layout = self._layout
        needed = {number for view in views for number, _, _ in view.pairs}
        needed |= {layout.put_in[cut] for view in views for cut in view.run.cuts}
        done = 0
        for batch, values in self._values(needed):
            truths = None if done else self._truths(batch, values, measured)
            for view in views:
                self._measure_view(view, (batch, values), truths, first=not done)
            done += length(batch)
        measured.samples = done

    def _measure_view(
        self,
        view: _View,
        computed: tuple[Batch, Mapping[int, OutputArray]],
        truths: Float64Values | None,
        *,
        first: bool,
    ) -> None:
        batch, values = computed
        cuts = self._layout.references(view.run.cuts, values)
        only = list(dict.fromkeys(name for _, name, _ in view.pairs))
        try:
            arrays = view.run(self._bench.feed(batch), cuts, only=only)
        except Exception as error:  # of ONNX Runtime, without a common base
            if not view.doubted:
                raise
            _fail((deviation for _, _, deviation in view.pairs), error)
            return
        true: Mapping[int, OutputArray] | None = None
        rounding: Mapping[int, OutputArray] = {}
        if truths is not None:
            alone = view.references is not None
            true, rounding = (truths.through, truths.alone)[alone], truths.rounding[alone]
        for number, name, deviation in view.pairs:
            deviation.update(values[number], arrays[name])
            if first:
                deviation.update_noise(
                    values[number],
                    arrays[name],
                    true[number] if true else None,
                    rounding.get(number),
                )

    def _values(self, needed: set[int]) -> Iterator[tuple[Batch, dict[int, OutputArray]]]:
        """All batches whose forward takes the way of the first one."""
        for place, batch in enumerate(self._bench.batches):
            try:
                yield batch, self._bench.side.values(batch, self._survey, needed)
            except ForwardPathChanged:
                if place == 0:
                    raise

    def _truths(
        self, batch: Batch, values: Mapping[int, OutputArray], measured: Measured
    ) -> Float64Values | None:
        try:
            return self._bench.side.truths(batch, self._survey, values)
        except ModelError as error:
            measured.noise_unmeasured = str(error)
            return None


def widen_by_rounding(
    measured: Measured, bench: LocalizationContext, survey: ValueSurvey, layout: ValueLayout
) -> Measured:
    """Return the deviations in units of random rounding, where that is larger on the first batch.

    PyTorch's own error is no unit for an operator whose kernel in ONNX Runtime has an absolute
    error, as that of a saturated sigmoid. Raises ModelError or EvidenceError where the model can't
    run in float64 or under random rounding.
    """
    returned = returned_values(bench.graph.outputs, survey, layout.names)
    numbers = {*measured.layers, *returned.values(), *layout.put_in.values()}
    side, batch = bench.side, bench.batches[0]
    values = side.values(batch, survey, numbers)
    truths = side.truths(batch, survey, values)
    runs = [side.rounded(batch, survey, values, draw=draw) for draw in range(DRAWS)]

    def floors(*, alone: bool) -> dict[int, NoiseStatistics]:
        """By number, of the floats of which float64 is the same function."""
        truth = (truths.through, truths.alone)[alone]
        return {
            number: NoiseStatistics.middle(
                [_noise_of(truth[number], value, run[alone][number]) for run in runs]
            )
            for number, value in values.items()
            if value.dtype.kind == "f" and number in truth and number not in truths.rounding[alone]
        }

    through, apart = floors(alone=False), floors(alone=True)
    widened = copy.deepcopy(measured)
    for number, layer in widened.layers.items():
        layer.through.widen(through.get(number))
        layer.alone.widen(apart.get(number))
    for outputs in (widened.marked, *widened.whole.values()):
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


_ALONE = (8.0, 24.0)
"""Bounds on `ratio` and `peak` of a layer alone.

Measured on the corpus of correct files (benchmarks/corpus: all architectures, exporters and opsets,
both levels of optimization) and on resnet18, mobilenet_v3_small, densenet121, convnext_tiny, swin_t
and a small vision transformer by all exporters that take them: layers that are right have at most
3.2 and 6.6. One weight of a layer off by 10 % gives 2 400, one tensor through float16 1 100, GELU
by tanh 3 400, epsilon 1e-3 for 1e-5 4 000 and 1e-5 for 1e-6 14.
"""

_THROUGH = 16.0
"""Bound on `ratio` of a layer in the run through, where errors add up: correct layers have at most
7. It only separates propagated deviations from layers that are still correct."""

_OUTPUT = (8.0, 64.0)
"""Bounds on `ratio` and `peak` of the outputs of the file as it is: right ones have at most 3 and
7. Wider than the policy's, because here are few samples and no verdict depends on it."""

_FARTHER = 2.0
"""By what factor an answer must be farther off with optimizations on for these to be in doubt: the
limit may lie between two that are off by nearly the same."""

_ON_CUDA = 10.0
"""Other algorithms, with other orders of summation, may round more; wider than the policy's bounds,
because no verdict depends on it."""

_WITHOUT_FLOAT64 = 64.0
"""Then the unit is one rounding, not that of all operations of the layer."""


@dataclass(frozen=True)
class DeviationLimits:
    """Up to where a difference is rounding."""

    runtime: RuntimeName
    setup: OrtSetup
    float64: bool
    """False if the model can't run in float64."""
    reduced: bool = False
    """True if the file is in 16 bits on purpose, by its policy."""
    bfloat16: bool = False
    """True if these are those of bfloat16."""
    quantized: bool = False
    """True if the file is quantized on purpose, by its policy."""
    fake_quantized: bool = False
    """True if the model itself rounds floats to the steps of a quantized type."""
    plain_refused: bool = False
    """True if the same providers with optimizations off were refused: then no optimizer is at fault
    alone."""

    @property
    def level(self) -> Level:
        """Optimization level of the runtime."""
        enabled = self.setup.optimization != "ORT_DISABLE_ALL"
        return "ORT_ENABLE_ALL" if enabled else "ORT_DISABLE_ALL"

    def is_optimizer(self, whole: Mapping[Level, Mapping[str, Deviation]]) -> bool:
        """Return True if the file as it is agrees with optimizations off, and not with them on, by
        more than the limit lies between the two."""
        return self.relaxed_limit(whole, refused=False) is not None

    def relaxed_limit(
        self, whole: Mapping[Level, Mapping[str, Deviation]], *, refused: bool
    ) -> float | None:
        """The strain up to which an answer is as right as with optimizations off, where these are
        in doubt; else None. `refused`: with them on it is not right enough, though within
        limits."""
        off, on = self.strain(whole["ORT_DISABLE_ALL"]), self.strain(whole["ORT_ENABLE_ALL"])
        wrong = on > 1.0 or (refused and self.level != "ORT_DISABLE_ALL" and on > 0.0)
        if self.plain_refused or not (off <= 1.0 and wrong and on >= _FARTHER * off):
            return None
        return min(1.0, math.sqrt(max(off, on / _FARTHER**4) * on))

    def is_source(self, layer: LayerDeviations) -> bool:
        """Return True if the layer is wrong although its inputs are right."""
        ratio, peak = self.layer_bounds
        return not (layer.alone.ratio <= ratio and layer.alone.peak <= peak)

    def is_off(self, layer: LayerDeviations) -> bool:
        """Return True if its output in the file differs by more than rounding."""
        return not layer.through.ratio <= _THROUGH * self._wider

    def agrees(self, outputs: Mapping[str, Deviation]) -> bool:
        """Return True if all outputs differ by rounding only."""
        return self.strain(outputs) <= 1.0

    def strain(self, outputs: Mapping[str, Deviation]) -> float:
        """The largest part of its bound that an output takes; infinite for NaN."""
        ratio, peak = self.output_bounds
        parts = [p for o in outputs.values() for p in (o.ratio / ratio, o.peak / peak)]
        return math.inf if any(map(math.isnan, parts)) else max(parts, default=0.0)

    @property
    def layer_bounds(self) -> tuple[float, float]:
        """The bounds on `ratio` and `peak` of a layer alone."""
        return self._widened(_ALONE)

    @property
    def output_bounds(self) -> tuple[float, float]:
        """The bounds on `ratio` and `peak` of an output of the file as it is."""
        return self._widened(_OUTPUT)

    def _widened(self, bounds: tuple[float, float]) -> tuple[float, float]:
        return bounds[0] * self._wider, bounds[1] * self._wider

    @property
    def _wider(self) -> float:
        wider = 1.0 if self.setup.on_cpu else _ON_CUDA
        if self.reduced:  # other orders of summation are negligible in comparison
            wider = REDUCED_UNIT * (BFLOAT16 if self.bfloat16 else 1.0)
        return wider if self.float64 else wider * _WITHOUT_FLOAT64


def worst(outputs: Mapping[str, Deviation]) -> float:
    """The largest `ratio`; NaN without outputs."""
    ratios = [output.ratio for output in outputs.values()]
    return math.nan if any(map(math.isnan, ratios)) else max(ratios, default=math.nan)
