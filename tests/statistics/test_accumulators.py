"""Differences by column, the scale of an output, and a histogram of magnitudes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gate.records.outputs import EDGES, PER_OCTAVE
from gate.statistics.accumulators import (
    ElementMoments,
    MagnitudeHistogram,
    by_column,
    worst_ratio,
)

NAN, INF = math.nan, math.inf


def floats(*rows):
    return np.array(rows, np.float32)


@pytest.mark.parametrize(("left", "right", "expected"), [
    (floats([1, 2], [3, 4]), floats([1, 2], [3, 4]), [0.0, 0.0]),
    (floats([1, 2], [3, 4]), floats([1, 2.5], [3, 3]), [0.0, 1.0]),
    (np.array([[1, 2]]), np.array([[1, 5]]), [3.0]),
    (np.array([2**62]), np.array([2**62 + 1]), [1.0]),
    (floats([1, NAN]), floats([1, 2]), [0.0, INF]),
    (floats([1, NAN, INF]), floats([1, NAN, -INF]), [0.0, 0.0, INF]),
    (np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32), [0.0]),
    (floats([1, 2]).ravel(), floats([1, 5]).ravel(), [3.0]),
], ids=["equal", "floats", "integers", "large integers", "nan", "infinite", "empty", "one axis"])  # fmt: skip
def test_by_column_returns_largest_difference_per_column(left, right, expected):
    assert by_column(left, right).tolist() == expected


def test_equal_infinities_are_no_difference():
    left = floats([1, -INF], [2, -INF])
    assert by_column(left, left + floats([0.5, 0], [0, 0])).tolist() == [0.5, 0.0]


@pytest.mark.parametrize(("moved", "unit", "expected"), [
    ([0.0, 0.0], [0.0, 1.0], 0.0),
    ([1.0, 1.0], [1e6, 1e-3], 1e3),
    ([1.0], [0.0], INF),
    ([INF, 1.0], [1.0, 1.0], INF),
    ([0.0, 1.0], [0.0, 0.0], INF),
    ([1.0, 3.0, 1.0], [1.0, 2.0], 1.5),
    ([4.0, 6.0], [2.0], 3.0),
])  # fmt: skip
def test_worst_ratio_divides_each_column_by_its_unit(moved, unit, expected):
    assert worst_ratio(np.array(moved), np.array(unit)) == pytest.approx(expected)


def moments(*batches, unequal=False):
    result = ElementMoments()
    for batch in batches:
        array = np.asarray(batch, np.float64)
        result.update(array, np.full(array.shape, unequal))
    return result


def values(count=20, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 4)) * 3.0 + 1.0


def test_std_matches_numpy():
    assert moments(values()).std == pytest.approx(values().std())


@pytest.mark.parametrize("mask", [-1e9, -np.inf, float(np.finfo(np.float32).min)])
def test_constant_mask_columns_are_excluded_from_std(mask):
    masked = values()
    masked[:, 2] = mask
    assert moments(masked).std == pytest.approx(np.delete(masked, 2, axis=1).std())


def test_constant_column_that_differs_is_included_in_std():
    masked = values()
    masked[:, 2] = 50.0
    assert moments(masked, unequal=True).std == pytest.approx(masked.std())


def test_all_columns_count_when_all_are_constant():
    assert moments(np.tile([1.0, 5.0], (6, 1))).std == 2.0


def test_std_of_batches_with_different_widths():
    first, second = values(), np.ones((3, 2))
    assert moments(first, second).std == pytest.approx(np.concatenate([first, second], None).std())


@given(st.integers(1, 19), st.integers(0, 5), st.booleans())
def test_merged_moments_equal_one_pass(cut, seed, holes):
    array = values(seed=seed)
    if holes:
        array[::3, 1] = np.nan
    merged = moments(array[:cut]).merge(moments(array[cut:]))
    assert merged.std == pytest.approx(moments(array).std)
    assert merged.std == pytest.approx(np.nanstd(array))


def create_histogram(sizes):
    histogram = MagnitudeHistogram()
    histogram.update(np.asarray(sizes, float))
    return histogram


def bin_edge(index):
    """Return the lower edge of a bin."""
    octave, part = divmod(index, PER_OCTAVE)
    return math.ldexp(EDGES[part], octave)


def test_bin_edges_have_equal_ratio():
    ideal = [2 ** (part / PER_OCTAVE) for part in range(PER_OCTAVE)]
    assert pytest.approx(ideal, rel=0.006) == EDGES
    assert all(math.frexp(value)[0] * 64 == int(math.frexp(value)[0] * 64) for value in EDGES)


@given(st.floats(5e-324, 1.7e308, exclude_min=False))
def test_size_is_counted_in_its_bin(size):
    result = create_histogram([size]).result()
    assert result.counts == (1,)
    assert max(size, 2.0**-1022) >= bin_edge(result.first)
    if result.first < PER_OCTAVE * 1024 - 1:
        assert max(size, 2.0**-1022) < bin_edge(result.first + 1)


@pytest.mark.parametrize("power", [-1022, -126, -24, 0, 1, 1023])
def test_power_of_two_is_the_lower_edge_of_its_bin(power):
    """float32 differences are often powers of two: a rounded logarithm must not move them."""
    assert create_histogram([2.0**power]).result().first == PER_OCTAVE * power
    below = np.nextafter(2.0**power, 0.0)
    if power > -1022:
        assert create_histogram([below]).result().first == PER_OCTAVE * power - 1


def test_zeros_and_nonfinite_sizes_are_counted_separately():
    result = create_histogram([0.0, 1.0, NAN, INF, 0.0, 5.0]).result()
    assert (result.zeros, result.nonfinite) == (2, 2)
    assert (result.first, sum(result.counts), len(result.counts)) == (0, 2, 10)
    empty = MagnitudeHistogram().result()
    assert (empty.zeros, empty.first, empty.counts, empty.nonfinite) == (0, 0, (), 0)


def test_excluded_sizes_become_zeros():
    result = create_histogram([0.0, 1.0, 1.0, 3.0]).without([1.0, 3.0]).result()
    assert (result.zeros, result.counts) == (3, (1,))


SIZES = hnp.arrays(
    np.float64, st.integers(0, 30), elements=st.floats(0, 1e300) | st.sampled_from([NAN, INF, 0.0])
)


@given(SIZES, SIZES, SIZES)
def test_merged_histograms_do_not_depend_on_order(a, b, c):
    first, two, three = map(create_histogram, (a, b, c))
    complete = create_histogram(np.concatenate([a, b, c])).result()
    assert first.merge(two).merge(three).result() == complete
    assert three.merge(first.merge(two)).result() == complete
    assert two.merge(first).result() == first.merge(two).result()
    assert complete.zeros + sum(complete.counts) + complete.nonfinite == len(a) + len(b) + len(c)
