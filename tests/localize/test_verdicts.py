"""Where rounding ends: a fault is never taken for rounding, and no number is no pass."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.localize.layer_deviations import DeviationLimits, LayerDeviations, worst
from gate.policy.runtime_options import plain_setup


class Fixed:
    """A deviation of these numbers."""

    def __init__(self, ratio: float, peak: float = 0.0) -> None:
        self.ratio, self.peak = ratio, peak


def limits_of(runtime: str, *, float64: bool = True) -> DeviationLimits:
    return DeviationLimits(runtime, plain_setup(runtime), float64=float64)


CPU, CUDA = limits_of("ort-cpu"), limits_of("ort-cuda")
BLIND = limits_of("ort-cpu", float64=False)
IN_16_BITS = replace(CPU, reduced=True)


def layer(ratio: float, peak: float = 0.0) -> LayerDeviations:
    return LayerDeviations(through=Fixed(ratio, peak), alone=Fixed(ratio, peak))


@pytest.mark.parametrize(
    ("limits", "ratio", "peak", "source"),
    [
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
    ],
)
def test_a_layer_alone(limits, ratio, peak, source):
    assert limits.is_source(layer(ratio, peak)) is source


@pytest.mark.parametrize(
    ("ratio", "off"), [(0.0, False), (16.0, False), (16.1, True), (math.nan, True)]
)
def test_a_layer_in_the_run_through(ratio, off):
    assert CPU.is_off(layer(ratio)) is off


@pytest.mark.parametrize(
    ("outputs", "agrees"),
    [
        ({}, True),
        ({"a": Fixed(8.0, 64.0), "b": Fixed(0.0)}, True),
        ({"a": Fixed(8.1), "b": Fixed(0.0)}, False),
        ({"a": Fixed(0.0, 64.1)}, False),
        ({"a": Fixed(math.nan)}, False),
    ],
)
def test_outputs(outputs, agrees):
    assert CPU.agrees(outputs) is agrees


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.floats(1, 1e3))
def test_worse_numbers_never_become_right(ratio, peak, more):
    for limits in (CPU, CUDA, BLIND):
        if limits.is_source(layer(ratio, peak)):
            assert limits.is_source(layer(ratio * more, peak))
            assert limits.is_source(layer(ratio, peak * more))


@pytest.mark.parametrize(
    ("ratios", "most"), [([], math.nan), ([1.0, 3.0], 3.0), ([1.0, math.nan], math.nan)]
)
def test_the_worst_output(ratios, most):
    seen = worst({str(place): Fixed(ratio) for place, ratio in enumerate(ratios)})
    assert seen == most or (math.isnan(seen) and math.isnan(most))


@pytest.mark.parametrize(
    ("runtime", "level"),
    [
        ("ort-cpu", "ORT_DISABLE_ALL"),
        ("ort-cpu-optimized", "ORT_ENABLE_ALL"),
        ("ort-cuda", "ORT_DISABLE_ALL"),
        ("ort-cuda-optimized", "ORT_ENABLE_ALL"),
    ],
)
def test_the_level_of_a_runtime(runtime, level):
    assert limits_of(runtime).level == level


def whole(off: float, on: float) -> dict:
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
def test_when_optimizations_are_in_doubt(off, on, refused, doubted):
    """Where they are, what is right with them off is right, and what is wrong is wrong."""
    limits = limits_of("ort-cpu-optimized")
    bound = limits.relaxed_limit(whole(off, on), refused=refused)
    assert (bound is not None) is doubted
    if bound is not None:
        assert limits.strain({"y": Fixed(off)}) <= bound <= 1.0
        assert not limits.strain({"y": Fixed(on)}) <= bound


@pytest.mark.parametrize(("off", "on"), [(7.9, 8.1), (1.0, 800.0)])
def test_no_optimiser_is_at_fault_alone_where_it_is_refused_without_them_too(off, on):
    limits = dataclasses.replace(limits_of("ort-cpu-optimized"), plain_refused=True)
    assert limits.relaxed_limit(whole(off, on), refused=True) is None
    assert not limits.is_optimizer(whole(off, on))


def test_a_limit_between_both_makes_no_optimiser():
    assert not limits_of("ort-cpu-optimized").is_optimizer(whole(7.9, 8.1))


def test_a_policy_that_refused_a_runtime_without_optimizations_doubts_none():
    assert CPU.relaxed_limit(whole(1.0, 6.0), refused=True) is None
