from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gate.records.outputs import EDGES, PER_OCTAVE
from gate.statistics.accumulators import MagnitudeHistogram

NAN, INF = math.nan, math.inf


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
