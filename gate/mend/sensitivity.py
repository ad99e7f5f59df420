"""Find the smallest set of layers that must stay in float32 in a float16 or int8 file."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.api import collect_evidence
from gate.decision.decide import decide
from gate.errors import ExportError, GateError, NothingQuantized
from gate.export.quantize import QuantizerTrials, QuantizeSettings, quantized_layers
from gate.installation import onnx_runtime
from gate.measure.job import EvaluationData
from gate.mend.mixed_precision import Float16Conversion, round_as_device, save_model
from gate.mend.recipe import Feed, Float16Settings, Float32Layers, calibration_of, make_feeds
from gate.mend.search import BudgetSpent, CutShort, Search, worst_ratio
from gate.onnx_file.sessions import open_on_cpu
from gate.policy.policy import Policy
from gate.policy.sections import Instruments
from gate.storage.digest import Digest
from gate.storage.files import temporary_folder

Evaluate = Callable[[Path], float]
"""Returns the largest ratio of a deviation to its bound. A file passes with at most 1."""

SENSITIVITY_SAMPLES = 16
"""Number of samples for the sensitivity of each layer, which only orders the layers."""


_NEVER = "1970-01-01T00:00:00+00:00"
"""The date of decisions that are not stored."""


Smallest = Callable[
    [Path, Search, Policy, EvaluationData, float],
    tuple[Float16Settings | QuantizeSettings, Float32Layers] | None,
]
"""`smallest_float16` or `smallest_int8`."""

_CPU = ("ort-cpu-optimized", "ort-cpu")


def evaluator(search: Search, policy: Policy, data: EvaluationData, *, most: int = 1) -> Evaluate:
    """Return a function that measures a file on these samples by the bounds of a policy only, in a
    limited number of CPU runtimes, and takes its forward passes from the budget of the search.
    """
    instruments = Instruments.none().model_copy(
        update={
            "noise_samples": policy.instruments.noise_samples,
            "stability_samples": policy.instruments.stability_samples,  # its bounds need them
            "max_floor": policy.instruments.max_floor,
        }
    )
    runtimes = policy.runtimes
    on_cpu = [name for name in runtimes if name in _CPU][:most]
    update = {"runtimes": {name: runtimes[name] for name in on_cpu or runtimes}}
    policy = policy.model_copy(update={**update, "instruments": instruments})
    conditions = Digest.from_json(
        {"samples": str(data.samples.digest()), "policy": str(policy.digest())}
    )

    def evaluate(path: Path) -> float:
        search.spend(len(data.samples))
        return search.conversion_ratio(path, conditions, lambda: measure(path))

    def measure(path: Path) -> float | None:
        try:
            evidence = collect_evidence(path, search.reference, data, policy)
        except GateError:
            return None
        decision = decide(policy, evidence, decided_at=_NEVER)  # without localization
        ratio = worst_ratio(decision.checks)
        if decision.passed:
            return min(1.0, ratio or 0.0)
        return ratio if ratio is not None and ratio > 1.0 else math.inf

    return evaluate


class OutputError:
    """The error of a file's outputs relative to the exact file, for any output role."""

    def __init__(self, exact: Path, feeds: Sequence[Feed]) -> None:
        """Run the exact file. Raises what ONNX Runtime raises."""
        self._feeds = feeds
        self._expected = self._outputs(exact)

    def __call__(self, path: Path | bytes) -> float:
        """Return the largest error over the outputs: the RMS error in units of the standard
        deviation, for integers and bools the share of unequal elements. Infinite if a value became
        NaN or infinite, or if the file does not run."""
        try:
            actual = self._outputs(path)
        except Exception:  # exceptions of ONNX Runtime have no common base
            return math.inf
        return max(map(_error, self._expected, actual), default=math.inf)

    def _outputs(self, model: Path | bytes) -> list[NDArray[Any]]:
        session = open_on_cpu(model)
        batches = [session.run(None, dict(feed)) for feed in self._feeds]
        outputs = zip(*batches, strict=True)
        return [np.concatenate([np.ravel(part) for part in parts]) for parts in outputs]


def _error(expected: NDArray[Any], actual: NDArray[Any]) -> float:
    if expected.shape != actual.shape:
        return math.inf
    if expected.dtype.kind != "f":
        return float(np.mean(expected != actual)) if expected.size else 0.0
    expected, actual = expected.astype(np.float64), actual.astype(np.float64)
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(actual)):
        return math.inf
    difference = (actual - expected)[finite]
    if not difference.size or not difference.any():
        return 0.0
    spread = float(np.std(expected[finite])) or float(np.abs(expected[finite]).max())
    return float(np.sqrt(np.mean(difference**2))) / spread if spread else math.inf


def smallest_set(
    ranked: Sequence[str],
    order: Sequence[str],
    passes: Callable[[Sequence[str]], bool],
    *,
    cut_short: Callable[[CutShort], None] = lambda _by: None,
) -> tuple[str, ...] | None:
    """Return a set that passes and can't spare any single member, in the order of `order`. None if
    not even all of `ranked` pass.

    Finds the shortest prefix of `ranked` (most harmful first) that passes by doubling and halving,
    then removes blocks of neighbors in `order` by delta debugging. If the budget is spent or Ctrl-C
    is pressed meanwhile, returns the smallest set so far and calls `cut_short`. Raises BudgetSpent
    or KeyboardInterrupt if no set has passed yet.
    """
    index = {name: position for position, name in enumerate(order)}

    def sorted_set(some: Sequence[str]) -> tuple[str, ...]:
        return tuple(sorted(some, key=index.__getitem__))

    low, high = 0, 1
    while not passes(sorted_set(ranked[:high])):
        if high >= len(ranked):
            return None
        low, high = high, min(2 * high, len(ranked))
    best = sorted_set(ranked[:high])
    try:
        while high - low > 1:
            middle = (low + high) // 2
            if passes(sorted_set(ranked[:middle])):
                high, best = middle, sorted_set(ranked[:middle])
            else:
                low = middle
        for smaller in _shrink(best, passes):
            best = smaller
    except BudgetSpent as spent:
        cut_short(spent.by)
    except KeyboardInterrupt:
        cut_short("interrupt")
    return best


def _shrink(
    best: tuple[str, ...], passes: Callable[[Sequence[str]], bool]
) -> Iterator[tuple[str, ...]]:
    """Yield smaller and smaller sets that pass, down to one without a superfluous member."""
    size = max(1, len(best) // 2)
    while best:
        removed, start = False, 0
        while start < len(best):
            rest = best[:start] + best[start + size :]
            if passes(rest):
                best, removed = rest, True
                yield best
            else:
                start += size
        if size == 1 and not removed:
            return
        size = max(1, size // 2)


def _smallest_passing(
    search: Search,
    ranked: Sequence[str],
    order: Sequence[str],
    ratio: Callable[[Sequence[str]], float],
    target: float,
) -> tuple[str, ...] | None:
    """Return the smallest set of layers in float32 whose ratio is at most `target`."""

    def passes(some: Sequence[str]) -> bool:
        passed = ratio(some) <= target
        if passed:
            search.note(f"passes with {len(some)} layers chosen for float32")
        return passed

    return smallest_set(ranked, order, passes, cut_short=search.end_early)


def smallest_float16(
    exact: Path, search: Search, policy: Policy, data: EvaluationData, target: float
) -> tuple[Float16Settings, Float32Layers] | None:
    """Return the settings of the float16 file with the smallest set of nodes in float32 that passes
    the policy on these samples, with each float16 value rounded as on a device. None if no set
    passes.

    `target`: the largest ratio of a deviation to its bound for a file that passes. Raises
    GateError, and BudgetSpent if the budget is spent before a set passes.
    """
    onnx_runtime()
    conversion = Float16Conversion(exact)
    always = conversion.unrepresentable
    evaluate = evaluator(search, policy, data)
    with temporary_folder() as folder:
        path = Path(folder, "rounded.onnx")

        def rounded(float32: Collection[str]) -> Path:
            return save_model(round_as_device(conversion.convert({*always, *float32})), path)

        def ratio(float32: Collection[str]) -> float:
            return evaluate(rounded(float32))

        def alone(node: str) -> float:
            search.spend(len(few))
            return error(rounded([name for name in conversion.nodes if name != node]))

        chosen: tuple[str, ...] | None = ()
        if ratio(()) > target:
            overflowing = conversion.overflowing(make_feeds(exact, data))
            order = tuple(node for node in overflowing if node not in always)
            if not order or ratio(order) > target:
                few = data.samples.take(range(min(SENSITIVITY_SAMPLES, len(data.samples))))
                error = OutputError(exact, make_feeds(exact, replace(data, samples=few)))
                rest = [node for node in conversion.nodes if node not in (*always, *order)]
                order = (*order, *sorted(rest, key=alone, reverse=True))
            chosen = _smallest_passing(search, order, conversion.nodes, ratio, target)
    if chosen is None:
        return None
    chosen = tuple(node for node in conversion.nodes if node in {*always, *chosen})
    kept = conversion.float32_nodes(conversion.convert(chosen))
    layers = Float32Layers.from_layers(kept, conversion.nodes, {})
    return Float16Settings(float32_nodes=chosen), layers


def smallest_int8(
    exact: Path, search: Search, policy: Policy, data: EvaluationData, target: float
) -> tuple[QuantizeSettings, Float32Layers] | None:
    """Return the settings of the int8 file with the fewest layers in float32 that passes the policy
    on these samples, with scales per channel or per tensor and symmetric or asymmetric ranges. None
    if no set passes.

    Calibrated on a part of the samples (`calibration_of`). `target`: the largest ratio of a
    deviation to its bound for a file that passes. Raises GateError, and BudgetSpent if the budget
    is spent before a set passes.
    """
    # With optimizations, ONNX Runtime computes in int8, and without them in float32.
    evaluate = evaluator(search, policy, data, most=len(_CPU))
    feeds = make_feeds(exact, data)
    calibration = calibration_of(data)
    base = QuantizeSettings(samples=len(calibration.samples), batch_size=data.batch_size)
    with temporary_folder() as folder:
        trials = QuantizerTrials(exact, make_feeds(exact, calibration), Path(folder))
        path = Path(folder, "int8.onnx")
        failed: list[ExportError] = []

        def ratio(settings: QuantizeSettings) -> float:
            try:
                return evaluate(trials.write(path, settings))
            except ExportError as error:  # per-channel scales need opset 13
                failed.append(error)
                return math.inf

        variants = [
            base.model_copy(update={"per_channel": channel, "symmetric_activations": symmetric})
            for symmetric in (False, True)
            for channel in (True, False)
        ]
        ratios = [ratio(settings) for settings in variants]
        if len(failed) == len(variants):
            raise failed[0]
        best, settings = min(zip(ratios, variants, strict=True), key=lambda pair: pair[0])
        layers = quantized_layers(trials.write(path, settings))
        if not layers:
            raise NothingQuantized(
                f"nothing in {exact} could be quantized: it has no operator that the quantizer "
                "knows (Conv, MatMul, Gemm and others). Serve the exact file."
            )
        chosen: tuple[str, ...] | None = ()
        sensitivity: dict[str, float] = {}
        if best > target:
            few = feeds[: max(1, SENSITIVITY_SAMPLES // data.batch_size)]
            error = OutputError(exact, few)
            samples = min(len(data.samples), len(few) * data.batch_size)

            def alone(layer: str) -> float:
                search.spend(samples)
                return error(trials.write(path, settings, only=(layer,)))

            def excluding(some: Sequence[str]) -> float:
                return ratio(settings.model_copy(update={"exclude": tuple(some)}))

            total = error(trials.write(path, settings))
            alone_errors = {layer: alone(layer) for layer in layers}
            ranked = sorted(layers, key=alone_errors.__getitem__, reverse=True)
            unit = best / total if total > 0.0 else math.nan
            sensitivity = {layer: alone_errors[layer] * unit for layer in ranked}
            chosen = _smallest_passing(search, ranked, layers, excluding, target)
        settings = settings.model_copy(update={"exclude": chosen or ()})
        if chosen is None or not quantized_layers(trials.write(path, settings)):
            return None
    return settings, Float32Layers.from_layers(chosen, layers, sensitivity)
