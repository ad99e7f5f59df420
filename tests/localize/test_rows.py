"""Deviations of a layer: all elements, split as one likes; NaN and infinity; shapes; noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gate.localize.layer_deviations import Deviation

NAN, INF = math.nan, math.inf
NUMBERS = st.floats(-1e6, 1e6, width=32)
PAIRS = st.integers(1, 9).flatmap(
    lambda n: st.tuples(*(arrays.arrays(np.float32, (n, 3), elements=NUMBERS) for _ in range(2)))
)


def deviation(value, tensor, *, dtype=np.float32, truth=None) -> Deviation:
    """Of one batch, which is the first one too."""
    found = Deviation()
    one, other = np.array(value, dtype), np.array(tensor, dtype)
    found.update(one, other)
    found.update_noise(one, other, truth)
    return found


@given(PAIRS, st.integers(0, 9))
def test_any_split_into_batches_gives_the_same(pair, cut):
    value, tensor = pair
    whole, parts = Deviation(), Deviation()
    whole.update(value, tensor)
    for part in (slice(None, cut), slice(cut, None)):
        if len(value[part]):
            parts.update(value[part], tensor[part])
    assert parts.largest == whole.largest
    assert parts.mean == pytest.approx(whole.mean)
    assert (parts.equal, parts.finite) == (whole.equal, whole.finite)


@given(PAIRS)
def test_the_largest_and_the_mean_are_those_of_numpy(pair):
    value, tensor = (array.astype(np.float64) for array in pair)
    found = deviation(*pair)
    assert found.largest == np.abs(tensor - value).max()
    assert found.mean == pytest.approx(np.abs(tensor - value).mean())


@given(PAIRS, st.integers(0, 26), st.sampled_from([NAN, INF, -INF]))
def test_one_value_that_is_not_finite_is_never_within_rounding(pair, place, bad):
    value, tensor = pair
    tensor = value.copy()
    tensor.flat[place % tensor.size] = bad
    found = deviation(value, tensor)
    assert found.largest == found.ratio == found.peak == INF
    assert not found.equal


@pytest.mark.parametrize(
    ("value", "tensor", "largest", "equal", "finite"),
    [
        ([1, NAN], [1, NAN], 0.0, True, True),
        ([1, INF], [1, INF], 0.0, True, True),
        ([NAN, NAN], [NAN, NAN], 0.0, True, False),
        ([INF, NAN], [INF, NAN], 0.0, True, False),
        ([INF], [-INF], INF, False, False),
        ([INF], [NAN], INF, False, False),
        ([NAN], [1], INF, False, False),
        ([1], [NAN], INF, False, True),
        ([[]], [[]], 0.0, True, False),
    ],
)
def test_what_is_not_finite(value, tensor, largest, equal, finite):
    found = deviation(value, tensor)
    assert (found.largest, found.equal, found.finite) == (largest, equal, finite)
    assert found.ratio == (0.0 if equal else INF) or finite


def test_nothing_compared_is_not_equal():
    found = Deviation()
    assert not found.equal
    assert math.isnan(found.ratio)
    assert math.isnan(found.mean)
    assert math.isnan(found.relative)


def test_noise_on_a_first_batch_without_finite_numbers_is_unknown():
    found = deviation([NAN, NAN], [NAN, NAN])
    found.update(np.array([1.0], np.float32), np.array([1.1], np.float32))
    assert math.isnan(found.ratio)


@pytest.mark.parametrize("dtype", [np.int64, bool, np.uint8])
def test_integers_and_bools_are_exact(dtype):
    assert deviation([0, 1], [0, 1], dtype=dtype).ratio == 0.0
    off = deviation([0, 1], [1, 1], dtype=dtype)
    assert (off.ratio, off.peak, off.largest) == (INF, INF, 1.0)


def test_unsigned_differences_do_not_wrap():
    assert deviation([0, 250], [3, 249], dtype=np.uint8).largest == 3.0


def test_other_shapes_are_a_mismatch_that_stays():
    found = deviation(np.zeros((2, 3)), np.zeros((2, 4)))
    found.update(np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32))
    found.update(np.zeros((2, 3), np.float32), np.zeros((9, 9), np.float32))
    assert found.mismatch == {"code": "mismatch", "got": "(2, 4)", "want": "(2, 3)"}
    assert found.ratio == INF
    assert not found.equal


def test_the_ratio_is_in_units_of_the_models_own_rounding():
    truth = np.linspace(1, 2, 1000)
    value = truth.astype(np.float32)
    apart = float(np.sqrt(np.mean((value - truth) ** 2)))
    found = deviation(value, truth + 100 * apart, truth=truth, dtype=np.float64)
    assert deviation(value, value, truth=truth).ratio < 2
    assert 20 < found.ratio < 200


def test_later_batches_with_larger_values_may_be_off_by_more():
    """The peak of a batch whose values are 10 times as large counts a tenth."""
    first = np.linspace(1, 2, 100, dtype=np.float32)
    found = deviation(first, first, truth=first.astype(np.float64))
    found.update(first * 10, first * 10 + np.float32(1e-3))
    other = deviation(first, first, truth=first.astype(np.float64))
    other.update(first, first + np.float32(1e-3))
    assert other.peak / found.peak == pytest.approx(10, rel=0.02)


def test_a_scalar_value():
    assert deviation(1.5, 1.5).ratio == 0.0


def test_what_the_runtime_can_not_compute_is_never_within_rounding():
    deviation = Deviation()
    deviation.update(np.ones(3), np.ones(3))
    deviation.fail("no kernel")
    assert deviation.failure == "no kernel"
    assert (deviation.ratio, deviation.equal) == (math.inf, False)
