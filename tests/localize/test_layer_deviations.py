"""Deviations of a layer, and where rounding ends."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gate.localize.layer_deviations import Deviation, DeviationLimits, LayerDeviations, worst
from gate.policy.runtime_options import plain_setup

NAN, INF = math.nan, math.inf
NUMBERS = st.floats(-1e6, 1e6, width=32)
PAIRS = st.integers(1, 9).flatmap(
    lambda n: st.tuples(*(arrays.arrays(np.float32, (n, 3), elements=NUMBERS) for _ in range(2)))
)


def deviation(value, tensor, *, dtype=np.float32, truth=None) -> Deviation:
    """Of one batch, which is the first one too."""
    result = Deviation()
    first, second = np.array(value, dtype), np.array(tensor, dtype)
    result.update(first, second)
    result.update_noise(first, second, truth)
    return result


@given(PAIRS, st.integers(0, 9))
def test_batches_do_not_change_the_deviation(pair, cut):
    value, tensor = pair
    ratios_by_level, parts = Deviation(), Deviation()
    ratios_by_level.update(value, tensor)
    for part in (slice(None, cut), slice(cut, None)):
        if len(value[part]):
            parts.update(value[part], tensor[part])
    assert parts.largest == ratios_by_level.largest
    assert parts.mean == pytest.approx(ratios_by_level.mean)
    assert (parts.equal, parts.finite) == (ratios_by_level.equal, ratios_by_level.finite)


@given(PAIRS)
def test_largest_and_mean_match_numpy(pair):
    value, tensor = (array.astype(np.float64) for array in pair)
    result = deviation(*pair)
    assert result.largest == np.abs(tensor - value).max()
    assert result.mean == pytest.approx(np.abs(tensor - value).mean())


@given(PAIRS, st.integers(0, 26), st.sampled_from([NAN, INF, -INF]))
def test_nonfinite_value_is_never_within_rounding(pair, place, bad):
    value, tensor = pair
    tensor = value.copy()
    tensor.flat[place % tensor.size] = bad
    result = deviation(value, tensor)
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
    result = deviation(value, tensor)
    assert (result.largest, result.equal, result.finite) == (largest, equal, finite)
    assert result.ratio == (0.0 if equal else INF) or finite


def test_empty_deviation_is_not_equal():
    result = Deviation()
    assert not result.equal
    assert math.isnan(result.ratio)
    assert math.isnan(result.mean)
    assert math.isnan(result.relative)


def test_noise_without_finite_first_batch_is_nan():
    result = deviation([NAN, NAN], [NAN, NAN])
    result.update(np.array([1.0], np.float32), np.array([1.1], np.float32))
    assert math.isnan(result.ratio)


@pytest.mark.parametrize("dtype", [np.int64, bool, np.uint8])
def test_integers_and_booleans_are_exact(dtype):
    assert deviation([0, 1], [0, 1], dtype=dtype).ratio == 0.0
    off = deviation([0, 1], [1, 1], dtype=dtype)
    assert (off.ratio, off.peak, off.largest) == (INF, INF, 1.0)


def test_unsigned_differences_do_not_wrap():
    assert deviation([0, 250], [3, 249], dtype=np.uint8).largest == 3.0


def test_shape_mismatch_is_kept():
    result = deviation(np.zeros((2, 3)), np.zeros((2, 4)))
    result.update(np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32))
    result.update(np.zeros((2, 3), np.float32), np.zeros((9, 9), np.float32))
    assert result.mismatch == {"code": "mismatch", "got": "(2, 4)", "want": "(2, 3)"}
    assert result.ratio == INF
    assert not result.equal


def test_ratio_is_in_units_of_the_model_rounding():
    truth = np.linspace(1, 2, 1000)
    value = truth.astype(np.float32)
    apart = float(np.sqrt(np.mean((value - truth) ** 2)))
    result = deviation(value, truth + 100 * apart, truth=truth, dtype=np.float64)
    assert deviation(value, value, truth=truth).ratio < 2
    assert 20 < result.ratio < 200


def test_peak_is_relative_to_the_size_of_the_batch():
    """The peak of a batch whose values are 10 times as large counts a tenth."""
    first = np.linspace(1, 2, 100, dtype=np.float32)
    result = deviation(first, first, truth=first.astype(np.float64))
    result.update(first * 10, first * 10 + np.float32(1e-3))
    second = deviation(first, first, truth=first.astype(np.float64))
    second.update(first, first + np.float32(1e-3))
    assert second.peak / result.peak == pytest.approx(10, rel=0.02)


def test_scalar_value():
    assert deviation(1.5, 1.5).ratio == 0.0


def test_failed_deviation_is_never_within_rounding():
    deviation = Deviation()
    deviation.update(np.ones(3), np.ones(3))
    deviation.fail("no kernel")
    assert deviation.failure == "no kernel"
    assert (deviation.ratio, deviation.equal) == (math.inf, False)


class Fixed:
    """A deviation of these numbers."""

    def __init__(self, ratio: float, peak: float = 0.0) -> None:
        self.ratio, self.peak = ratio, peak


def limits_of(runtime: str, *, float64: bool = True) -> DeviationLimits:
    return DeviationLimits(runtime, plain_setup(runtime), float64=float64)


CPU, CUDA = limits_of("ort-cpu"), limits_of("ort-cuda")
BLIND = limits_of("ort-cpu", float64=False)
IN_16_BITS = replace(CPU, reduced=True)


def layer_with(ratio: float, peak: float = 0.0) -> LayerDeviations:
    return LayerDeviations(through=Fixed(ratio, peak), alone=Fixed(ratio, peak))


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
    (BLIND, 512.0, 0.0, False),
    (BLIND, 513.0, 0.0, True),
    (IN_16_BITS, 8.0 * 2**13, 24.0 * 2**13, False),
    (IN_16_BITS, 8.1 * 2**13, 0.0, True),
    (replace(CUDA, reduced=True), 8.0 * 2**13, 24.0 * 2**13, False),
    (replace(CUDA, reduced=True), 8.1 * 2**13, 0.0, True),
])  # fmt: skip
def test_is_source(limits, ratio, peak, source):
    assert limits.is_source(layer_with(ratio, peak)) is source


@pytest.mark.parametrize(
    ("ratio", "off"), [(0.0, False), (16.0, False), (16.1, True), (math.nan, True)]
)
def test_is_off(ratio, off):
    assert CPU.is_off(layer_with(ratio)) is off


@pytest.mark.parametrize(("outputs", "agrees"), [
    ({}, True),
    ({"a": Fixed(8.0, 64.0), "b": Fixed(0.0)}, True),
    ({"a": Fixed(8.1), "b": Fixed(0.0)}, False),
    ({"a": Fixed(0.0, 64.1)}, False),
    ({"a": Fixed(math.nan)}, False),
])  # fmt: skip
def test_outputs_agree(outputs, agrees):
    assert CPU.agrees(outputs) is agrees


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.floats(1, 1e3))
def test_larger_deviation_stays_a_source(ratio, peak, more):
    for limits in (CPU, CUDA, BLIND):
        if limits.is_source(layer_with(ratio, peak)):
            assert limits.is_source(layer_with(ratio * more, peak))
            assert limits.is_source(layer_with(ratio, peak * more))


@pytest.mark.parametrize(
    ("ratios", "most"), [([], math.nan), ([1.0, 3.0], 3.0), ([1.0, math.nan], math.nan)]
)
def test_worst_output(ratios, most):
    observed = worst({str(index): Fixed(ratio) for index, ratio in enumerate(ratios)})
    assert observed == most or (math.isnan(observed) and math.isnan(most))


@pytest.mark.parametrize(("runtime", "level"), [
    ("ort-cpu", "ORT_DISABLE_ALL"),
    ("ort-cpu-optimized", "ORT_ENABLE_ALL"),
    ("ort-cuda", "ORT_DISABLE_ALL"),
    ("ort-cuda-optimized", "ORT_ENABLE_ALL"),
])  # fmt: skip
def test_level_of_a_runtime(runtime, level):
    assert limits_of(runtime).level == level


def ratios_by_level(off: float, on: float) -> dict:
    """Ratios of an output with optimizations off and on: 8 is the limit on the CPU."""
    return {"ORT_DISABLE_ALL": {"y": Fixed(off)}, "ORT_ENABLE_ALL": {"y": Fixed(on)}}


@pytest.mark.parametrize(
    ("off", "on", "refused", "doubted"),
    [
        (1.0, 800.0, False, True),
        (1.0, math.inf, False, True),
        (1.0, math.nan, False, True),
        (0.0, 800.0, False, True),
        (7.9, 8.1, False, False),  # one fault, and the limit between two roundings of it
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
    """Where they are, what is right with them off is right, and what is wrong is wrong."""
    limits = limits_of("ort-cpu-optimized")
    bound = limits.relaxed_limit(ratios_by_level(off, on), refused=refused)
    assert (bound is not None) is doubted
    if bound is not None:
        assert limits.bound_usage({"y": Fixed(off)}) <= bound <= 1.0
        assert not limits.bound_usage({"y": Fixed(on)}) <= bound


@pytest.mark.parametrize(("off", "on"), [(7.9, 8.1), (1.0, 800.0)])
def test_no_optimizer_fault_when_the_plain_runtime_failed(off, on):
    limits = dataclasses.replace(limits_of("ort-cpu-optimized"), plain_refused=True)
    assert limits.relaxed_limit(ratios_by_level(off, on), refused=True) is None
    assert not limits.is_optimizer(ratios_by_level(off, on))


def test_limit_between_both_levels_is_no_optimizer_fault():
    assert not limits_of("ort-cpu-optimized").is_optimizer(ratios_by_level(7.9, 8.1))


def test_plain_runtime_has_no_relaxed_limit():
    assert CPU.relaxed_limit(ratios_by_level(1.0, 6.0), refused=True) is None
