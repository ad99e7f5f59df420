"""Properties of all statistics for empty arrays, infinities, masks and huge values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gate.measure.noise_floor import NoiseStatistics
from gate.policy.sections import OperatingPoint
from gate.records.instruments import NoiseParity
from gate.records.outputs import OutputParity
from gate.statistics.accumulators import by_column, columns, distances, worst_ratio
from gate.statistics.classification import ClassReading
from gate.statistics.error_groups import representable
from gate.statistics.output import OutputStatistics, Span
from gate.statistics.serialization import from_plain, to_plain
from tests.measure.close import assert_close

NAN, INF = math.nan, math.inf
LOWEST = float(np.finfo(np.float32).min)

MASKS = [LOWEST, LOWEST / 3, -1e30, 1e20, 1e19, 1e-30, 1e-45, 0.0, 3.0]
FINITE = st.one_of(st.floats(-10, 10, width=32), st.sampled_from(MASKS))
ANY = st.one_of(FINITE, st.sampled_from([NAN, INF, -INF]))
WIDE = st.one_of(ANY, st.sampled_from([1e154, -1e200, 1e300, float(np.finfo(np.float64).min)]))

SHAPES = st.tuples(st.integers(0, 6), st.integers(2, 4))
DTYPES = [(np.float32, ANY), (np.float64, WIDE)]
ERRORS = ("max_abs_diff", "mean_abs_diff", "scaled_diff", "l2_mean", "l2_max")
READINGS = [ClassReading(), ClassReading(normalised=True, points=(OperatingPoint(0.5),)),
            ClassReading(points=(OperatingPoint(0.5), OperatingPoint(0.7, 1)))]  # fmt: skip


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Draw two arrays of one shape that are mostly equal, as for correct files."""
    dtype, elements = draw(st.sampled_from(DTYPES))
    shape = draw(SHAPES)
    reference = draw(hnp.arrays(dtype, shape, elements=elements))
    second = draw(hnp.arrays(dtype, shape, elements=elements))
    differs = draw(hnp.arrays(np.bool_, shape, fill=st.just(False)))
    return reference, np.where(differs, second, reference)


def find_nans(value: Any, place: str = "") -> list[str]:
    if isinstance(value, dict):
        return [each for key, item in value.items() for each in find_nans(item, f"{place}.{key}")]
    if isinstance(value, tuple | list):
        return [each for item in value for each in find_nans(item, place)]
    return [place] if isinstance(value, float) and math.isnan(value) else []


def accumulate(reference, candidate, reading, *, batch=100):
    """Accumulate one sample per row; an array without rows is one empty sample."""
    statistics = OutputStatistics("y", reference.dtype.name, reading)
    for start in range(0, max(len(reference), 1), batch):
        rows = slice(start, start + batch)
        count = max(len(reference[rows]), 1)
        labels = np.zeros(count, np.int64)
        statistics.update(reference[rows], candidate[rows], Span(start, count, labels))
    return statistics


def compute_output(reference: np.ndarray, candidate: np.ndarray, **how: Any) -> OutputParity:
    return accumulate(reference, candidate, how.pop("reading", READINGS[0]), **how).result()


def compute_noise(truth: np.ndarray, reference: np.ndarray, candidate: np.ndarray) -> NoiseParity:
    statistics = NoiseStatistics(columns=True)
    statistics.update(truth, reference, candidate, samples=max(len(truth), 1))
    return statistics.result()


@given(pair=pairs(), reading=st.sampled_from(READINGS))
def test_output_statistics_are_never_nan(pair, reading):
    reference, candidate = pair
    result = compute_output(reference, candidate, reading=reading)
    assert not find_nans(result.model_dump())
    same = compute_output(reference, reference, reading=reading)
    assert not find_nans(same.model_dump())
    assert {getattr(same, name) for name in ERRORS} == {0.0}
    assert same.nonfinite_mismatched == 0


@given(pair=pairs(), share=st.sampled_from([0.0, 2.0**-24, 1e-3]))
def test_noise_statistics_are_never_nan(pair, share):
    reference, candidate = pair
    with np.errstate(all="ignore"):
        truth = reference.astype(np.float64) * (1 + share)
    result = compute_noise(truth, reference, candidate)
    assert not find_nans(result.model_dump())
    exact = compute_noise(truth, reference, reference)
    assert exact.ratio <= 1.0 + 1e-9
    assert exact.closer == "neither"


@given(pair=pairs())
def test_column_differences_are_never_nan(pair):
    first, second = pair
    moved = by_column(first, second)
    assert not np.isnan(moved).any()
    assert not by_column(first, first).any()
    assert not math.isnan(worst_ratio(moved, np.zeros(1)))
    assert not math.isnan(worst_ratio(moved, columns(distances(first, np.zeros_like(first)))))


@given(pair=pairs(), small=st.floats(0.0, 1.0), times=st.floats(1.0, 1e6))
def test_statistics_do_not_decrease_with_larger_error(pair, small, times):
    reference, second = pair
    base = reference.astype(np.float64)
    with np.errstate(all="ignore"):
        step = np.where(np.isfinite(second), np.abs(second.astype(np.float64)), 1.0)
        near, far = (base + factor * step for factor in (small, small * times))
    first, two = compute_output(base, near), compute_output(base, far)
    for name in ERRORS:
        assert getattr(first, name) <= getattr(two, name) * (1 + 1e-12)
    assert first.nonfinite_mismatched <= two.nonfinite_mismatched


@given(
    truth=hnp.arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(2, 4)), elements=FINITE),
    times=st.floats(1.0, 1e9),
)
def test_noise_does_not_decrease_with_larger_error(truth, times):
    reference = truth.astype(np.float32)
    error = np.maximum(np.abs(truth) * 2.0**-20, 1e-30)
    first, two = (compute_noise(truth, reference, truth + k * error) for k in (1.0, times))
    for name in ("ratio", "peak", "diff"):
        assert getattr(first, name) <= getattr(two, name) * (1 + 1e-9)


@given(pair=pairs(), spoiled=st.sampled_from([NAN, INF, -INF]))
def test_nonfinite_value_on_one_side_makes_every_statistic_infinite(pair, spoiled):
    reference, _ = pair
    finite = np.isfinite(reference)
    if not finite.any():
        return
    candidate = reference.copy()
    candidate[tuple(np.argwhere(finite)[0])] = spoiled
    result = compute_output(reference, candidate)
    assert result.nonfinite_mismatched == 1
    assert {getattr(result, name) for name in ERRORS} == {INF}
    assert compute_noise(reference.astype(np.float64), reference, candidate).ratio == INF


@given(pair=pairs(), size=st.integers(1, 3), empty=st.booleans())
def test_merged_units_equal_one_pass(pair, size, empty):
    reference, candidate = (np.clip(side, -3e38, 3e38).astype(np.float32) for side in pair)
    rows = np.zeros((0, reference.shape[1]), np.float32)
    complete = accumulate(reference, candidate, READINGS[2])
    merged = accumulate(rows, rows, READINGS[2]) if empty else OutputStatistics("y", "float32")
    for start in range(0, max(len(reference), 1), size):
        part = slice(start, start + size)
        unit = OutputStatistics("y", "float32", READINGS[2])
        count = max(len(reference[part]), 1)
        span = Span(start, count, np.zeros(count, np.int64))
        unit.update(reference[part], candidate[part], span)
        merged = merged.merge(from_plain(to_plain(unit)))
    got, want = merged.result(), complete.result()
    if empty:  # one additional sample without rows
        left_out = {"samples", "classification", "reference_constant", "worst"}
        assert got.samples == want.samples + 1
        assert got.reference_constant is (not reference.size)
    else:
        left_out = set()
    assert_close(got.model_dump(exclude=left_out), want.model_dump(exclude=left_out))


def test_value_beyond_float32_is_replaced_by_the_reference():
    lowest = float(np.finfo(np.float64).min)
    truth = np.array([[lowest, 1.0, INF]])
    reference = np.array([[LOWEST, 2.0, INF]], np.float32)
    assert representable(truth, reference).tolist() == [[LOWEST, 1.0, INF]]


def test_large_values_keep_their_relative_error():
    truth = np.random.default_rng(0).normal(size=(8, 4)) * 1e300
    reference = truth * (1 + 2.0**-24)
    assert compute_noise(truth, reference, reference).ratio == pytest.approx(1.0, rel=0.6)
    assert compute_noise(truth, reference, truth * 1.001).ratio > 1e3
