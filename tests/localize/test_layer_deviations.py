"""Deviations of a layer are measured and compared with the limits of rounding."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gate.localize.layer_deviations import Deviation, DeviationLimits, LayerDeviations
from gate.policy.runtime_options import plain_setup

NAN, INF = math.nan, math.inf
NUMBERS = st.floats(-1e6, 1e6, width=32)
PAIRS = st.integers(1, 9).flatmap(
    lambda n: st.tuples(*(arrays.arrays(np.float32, (n, 3), elements=NUMBERS) for _ in range(2)))
)


def measure_deviation(value, tensor, *, dtype=np.float32, truth=None) -> Deviation:
    """Return the deviation of a single batch, which is also the first one."""
    result = Deviation()
    expected, actual = np.array(value, dtype), np.array(tensor, dtype)
    result.update(expected, actual)
    result.update_noise(expected, actual, truth)
    return result


@given(PAIRS, st.integers(0, 9))
def test_batches_do_not_change_the_deviation(pair, cut):
    value, tensor = pair
    one_pass, parts = Deviation(), Deviation()
    one_pass.update(value, tensor)
    for part in (slice(None, cut), slice(cut, None)):
        if len(value[part]):
            parts.update(value[part], tensor[part])
    assert parts.largest == one_pass.largest
    assert parts.mean == pytest.approx(one_pass.mean)
    assert (parts.equal, parts.finite) == (one_pass.equal, one_pass.finite)


@given(PAIRS, st.integers(0, 26), st.sampled_from([NAN, INF, -INF]))
def test_nonfinite_value_is_never_within_rounding(pair, index, bad):
    value, tensor = pair
    tensor = value.copy()
    tensor.flat[index % tensor.size] = bad
    result = measure_deviation(value, tensor)
    assert result.largest == result.ratio == result.peak == INF
    assert not result.equal


@pytest.mark.parametrize(("value", "tensor", "largest", "equal", "finite"), [
    ([1, NAN], [1, NAN], 0.0, True, True),
    ([1, INF], [1, INF], 0.0, True, True),
    ([NAN, NAN], [NAN, NAN], 0.0, True, False),
    ([INF, NAN], [INF, NAN], 0.0, True, False),
    ([INF], [-INF], INF, False, False),
    ([INF], [NAN], INF, False, False),
    ([NAN], [1], INF, False, False),
    ([1], [NAN], INF, False, True),
    ([[]], [[]], 0.0, True, False),
])  # fmt: skip
def test_deviation_of_nonfinite_values(value, tensor, largest, equal, finite):
    result = measure_deviation(value, tensor)
    assert (result.largest, result.equal, result.finite) == (largest, equal, finite)
    assert result.ratio == (0.0 if equal else INF) or finite


@pytest.mark.parametrize("dtype", [np.int64, bool, np.uint8])
def test_integers_and_booleans_are_exact(dtype):
    assert measure_deviation([0, 1], [0, 1], dtype=dtype).ratio == 0.0
    off = measure_deviation([0, 1], [1, 1], dtype=dtype)
    assert (off.ratio, off.peak, off.largest) == (INF, INF, 1.0)


def test_unsigned_differences_do_not_wrap():
    assert measure_deviation([0, 250], [3, 249], dtype=np.uint8).largest == 3.0


def test_ratio_is_in_units_of_the_model_rounding():
    truth = np.linspace(1, 2, 1000)
    value = truth.astype(np.float32)
    rounding = float(np.sqrt(np.mean((value - truth) ** 2)))
    result = measure_deviation(value, truth + 100 * rounding, truth=truth, dtype=np.float64)
    assert measure_deviation(value, value, truth=truth).ratio < 2
    assert 20 < result.ratio < 200


class FixedDeviation:
    """A deviation with a fixed ratio and peak."""

    def __init__(self, ratio: float, peak: float = 0.0) -> None:
        self.ratio, self.peak = ratio, peak


def make_limits(runtime: str, *, float64: bool = True) -> DeviationLimits:
    return DeviationLimits(runtime, plain_setup(runtime), float64=float64)


CPU, CUDA = make_limits("ort-cpu"), make_limits("ort-cuda")
WITHOUT_FLOAT64 = make_limits("ort-cpu", float64=False)
REDUCED = replace(CPU, reduced=True)


def make_layer(ratio: float, peak: float = 0.0) -> LayerDeviations:
    return LayerDeviations(through=FixedDeviation(ratio, peak), alone=FixedDeviation(ratio, peak))


@pytest.mark.parametrize(("limits", "ratio", "peak", "source"), [
    (CPU, 0.0, 0.0, False),
    (CPU, 8.0, 24.0, False),
    (CPU, 8.1, 0.0, True),
    (CPU, 0.0, 24.1, True),
    (CPU, math.nan, 0.0, True),
    (CPU, 0.0, math.nan, True),
    (CPU, math.inf, 0.0, True),
    (CUDA, 80.0, 240.0, False),
    (CUDA, 80.1, 0.0, True),
    (WITHOUT_FLOAT64, 512.0, 0.0, False),
    (WITHOUT_FLOAT64, 513.0, 0.0, True),
    (REDUCED, 8.0 * 2**13, 24.0 * 2**13, False),
    (REDUCED, 8.1 * 2**13, 0.0, True),
    (replace(CUDA, reduced=True), 8.0 * 2**13, 24.0 * 2**13, False),
    (replace(CUDA, reduced=True), 8.1 * 2**13, 0.0, True),
])  # fmt: skip
def test_is_source(limits, ratio, peak, source):
    assert limits.is_source(make_layer(ratio, peak)) is source


@pytest.mark.parametrize(("outputs", "agrees"), [
    ({}, True),
    ({"a": FixedDeviation(8.0, 64.0), "b": FixedDeviation(0.0)}, True),
    ({"a": FixedDeviation(8.1), "b": FixedDeviation(0.0)}, False),
    ({"a": FixedDeviation(0.0, 64.1)}, False),
    ({"a": FixedDeviation(math.nan)}, False),
])  # fmt: skip
def test_outputs_agree(outputs, agrees):
    assert CPU.agrees(outputs) is agrees


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.floats(1, 1e3))
def test_larger_deviation_stays_a_source(ratio, peak, more):
    for limits in (CPU, CUDA, WITHOUT_FLOAT64):
        if limits.is_source(make_layer(ratio, peak)):
            assert limits.is_source(make_layer(ratio * more, peak))
            assert limits.is_source(make_layer(ratio, peak * more))


def make_ratios(off: float, on: float) -> dict:
    """Return the ratios of an output without and with optimizations; the limit on the CPU is 8."""
    return {
        "ORT_DISABLE_ALL": {"y": FixedDeviation(off)},
        "ORT_ENABLE_ALL": {"y": FixedDeviation(on)},
    }


@pytest.mark.parametrize(
    ("off", "on", "refused", "doubted"),
    [
        (1.0, 800.0, False, True),
        (1.0, math.inf, False, True),
        (1.0, math.nan, False, True),
        (0.0, 800.0, False, True),
        (7.9, 8.1, False, False),  # one fault; the limit lies between its two ratios
        (7.9, 8.1, True, False),
        (4.0, 8.1, False, True),
        (1.0, 6.0, False, False),
        (1.0, 6.0, True, True),
        (0.0, 6.0, True, True),
        (1.0, 1.9, True, False),
        (80.0, 800.0, True, False),
        (math.nan, 800.0, True, False),
        (math.inf, math.inf, True, False),
        (0.0, 0.0, True, False),
    ],
)
def test_relaxed_limit(off, on, refused, doubted):
    """Accept the ratio without optimizations, and reject the ratio with them."""
    limits = make_limits("ort-cpu-optimized")
    bound = limits.relaxed_limit(make_ratios(off, on), refused=refused)
    assert (bound is not None) is doubted
    if bound is not None:
        assert limits.bound_usage({"y": FixedDeviation(off)}) <= bound <= 1.0
        assert not limits.bound_usage({"y": FixedDeviation(on)}) <= bound


@pytest.mark.parametrize(("off", "on"), [(7.9, 8.1), (1.0, 800.0)])
def test_no_optimizer_fault_when_the_plain_runtime_failed(off, on):
    limits = dataclasses.replace(make_limits("ort-cpu-optimized"), plain_refused=True)
    assert limits.relaxed_limit(make_ratios(off, on), refused=True) is None
    assert not limits.is_optimizer(make_ratios(off, on))
