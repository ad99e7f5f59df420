"""Differences by column, the scale of an output, and a histogram of sizes."""

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
    columns,
    worse_columns,
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
def test_the_largest_of_each_column(left, right, expected):
    assert by_column(left, right).tolist() == expected


def test_masks_that_are_equal_are_no_change():
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
def test_each_column_in_its_own_unit(moved, unit, expected):
    assert worst_ratio(np.array(moved), np.array(unit)) == pytest.approx(expected)


def test_columns_of_other_lengths_are_taken_together():
    assert worse_columns(np.array([1.0, 5.0]), np.array([2.0, 3.0, 4.0])).tolist() == [5.0]
    assert worse_columns(np.zeros(1), columns(np.ones((2, 3)))).tolist() == [1.0] * 3


def moments(*batches, unequal=False):
    found = ElementMoments()
    for batch in batches:
        array = np.asarray(batch, np.float64)
        found.update(array, np.full(array.shape, unequal))
    return found


def values(count=20, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 4)) * 3.0 + 1.0


def test_it_is_the_standard_deviation():
    assert moments(values()).std == pytest.approx(values().std())


@pytest.mark.parametrize("mask", [-1e9, -np.inf, float(np.finfo(np.float32).min)])
def test_masks_are_no_part_of_the_scale(mask):
    masked = values()
    masked[:, 2] = mask
    assert moments(masked).std == pytest.approx(np.delete(masked, 2, axis=1).std())


def test_a_constant_that_differs_counts():
    masked = values()
    masked[:, 2] = 50.0
    assert moments(masked, unequal=True).std == pytest.approx(masked.std())


def test_where_nothing_varies_all_counts():
    assert moments(np.tile([1.0, 5.0], (6, 1))).std == 2.0


def test_samples_of_other_lengths_are_taken_as_they_are():
    first, other = values(), np.ones((3, 2))
    assert moments(first, other).std == pytest.approx(np.concatenate([first, other], None).std())


@given(st.integers(1, 19), st.integers(0, 5), st.booleans())
def test_merging_any_split_is_one_pass(cut, seed, holes):
    array = values(seed=seed)
    if holes:
        array[::3, 1] = np.nan
    merged = moments(array[:cut]).merge(moments(array[cut:]))
    assert merged.std == pytest.approx(moments(array).std)
    assert merged.std == pytest.approx(np.nanstd(array))


def counted(sizes):
    histogram = MagnitudeHistogram()
    histogram.update(np.asarray(sizes, float))
    return histogram


def edge(place):
    """Where the bin at this place begins."""
    octave, part = divmod(place, PER_OCTAVE)
    return math.ldexp(EDGES[part], octave)


def test_the_edges_are_those_of_equal_ratio_up_to_the_bits_that_decide():
    ideal = [2 ** (part / PER_OCTAVE) for part in range(PER_OCTAVE)]
    assert pytest.approx(ideal, rel=0.006) == EDGES
    assert all(math.frexp(value)[0] * 64 == int(math.frexp(value)[0] * 64) for value in EDGES)


@given(st.floats(5e-324, 1.7e308, exclude_min=False))
def test_a_size_is_in_the_bin_that_holds_it(size):
    result = counted([size]).result()
    assert result.counts == (1,)
    assert max(size, 2.0**-1022) >= edge(result.first)
    if result.first < PER_OCTAVE * 1024 - 1:
        assert max(size, 2.0**-1022) < edge(result.first + 1)


@pytest.mark.parametrize("power", [-1022, -126, -24, 0, 1, 1023])
def test_a_power_of_two_begins_its_bin(power):
    """Differences of float32 often are one: no rounding of a logarithm may move it."""
    assert counted([2.0**power]).result().first == PER_OCTAVE * power
    below = np.nextafter(2.0**power, 0.0)
    if power > -1022:
        assert counted([below]).result().first == PER_OCTAVE * power - 1


def test_zeros_and_what_is_no_number_are_counted_apart():
    result = counted([0.0, 1.0, NAN, INF, 0.0, 5.0]).result()
    assert (result.zeros, result.nonfinite) == (2, 2)
    assert (result.first, sum(result.counts), len(result.counts)) == (0, 2, 10)
    empty = MagnitudeHistogram().result()
    assert (empty.zeros, empty.first, empty.counts, empty.nonfinite) == (0, 0, (), 0)


def test_large_arrays_are_counted_as_small_ones():
    sizes = np.abs(np.random.default_rng(0).normal(size=(3, 40_000))) * 1e-6
    whole = counted(sizes).result()
    exponents = np.floor(np.log2(sizes[(sizes >= 2.0**-20) & (sizes < 2.0**-19)]))
    octave = range(-20 * PER_OCTAVE, -19 * PER_OCTAVE)
    assert sum(whole.counts[place - whole.first] for place in octave) == len(exponents)


def test_excused_sizes_become_zeros():
    result = counted([0.0, 1.0, 1.0, 3.0]).without([1.0, 3.0]).result()
    assert (result.zeros, result.counts) == (3, (1,))


SIZES = hnp.arrays(
    np.float64, st.integers(0, 30), elements=st.floats(0, 1e300) | st.sampled_from([NAN, INF, 0.0])
)


@given(SIZES, SIZES, SIZES)
def test_streams_add_up_in_any_order(a, b, c):
    one, two, three = map(counted, (a, b, c))
    whole = counted(np.concatenate([a, b, c])).result()
    assert one.merge(two).merge(three).result() == whole
    assert three.merge(one.merge(two)).result() == whole
    assert two.merge(one).result() == one.merge(two).result()
    assert whole.zeros + sum(whole.counts) + whole.nonfinite == len(a) + len(b) + len(c)
