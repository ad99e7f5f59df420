from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gate.statistics.sample_table import RowStatistics
from tests.measure.close import assert_close

NAN, INF = math.nan, math.inf


def measured(r, c):
    statistics = RowStatistics()
    statistics.update(np.array(r, float), np.array(c, float))
    return statistics.result()


@pytest.mark.parametrize(
    ("r", "c", "distance"),
    [
        ([1, 0], [1, 0], 0.0),
        ([1, 0], [5, 0], 0.0),
        ([1, 0], [0, 1], 1.0),
        ([1, 0], [-1, 0], 2.0),
        ([1, 1], [1, 0], 1.0 - math.sqrt(0.5)),
        ([0, 0], [0, 0], 0.0),
        ([0, 0], [0, 1], 1.0),
        ([1e300, 1e300], [1e300, 1e300], 0.0),
        ([1e-300, 0], [0, 1e-300], 1.0),
    ],
)
def test_the_cosine_distance(r, c, distance) -> None:
    assert measured([r], [c]).cosine_distance == pytest.approx(distance, abs=1e-15)


def test_a_distance_near_zero_keeps_its_digits() -> None:
    """1 - cos of an angle of 1e-6 is 5e-13."""
    seen = measured([[1.0, 0.0]], [[math.cos(1e-6), math.sin(1e-6)]])
    assert seen.cosine_distance == pytest.approx(5e-13, rel=1e-6)


def test_rows_as_probabilities() -> None:
    seen = measured([[0.7, 0.3], [0.5, 0.5]], [[0.63, 0.3], [0.5, 0.5]])
    assert seen.confidence_diff == pytest.approx(0.07)
    assert seen.bands == (0.5, 0.0, 0.5, 0.0)
    assert seen.sum_diff == pytest.approx(0.07)
    assert seen.sum_error == pytest.approx(0.0, abs=1e-15)
    assert measured([[3.0, 1.0]], [[3.0, 1.0]]).sum_error == 3.0


@pytest.mark.parametrize(("r", "c"), [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, -INF), (INF, -INF)])
def test_nan_and_infinity_are_never_small(r, c) -> None:
    seen = measured([[1.0, 2.0], [r, 0.0]], [[1.0, 2.0], [c, 0.0]])
    assert not math.isfinite(seen.cosine_distance)
    assert not math.isfinite(seen.confidence_diff) or not math.isfinite(seen.sum_diff)


def test_what_is_beside_equal_infinities_is_compared() -> None:
    same = measured([[INF, 1.0, 2.0]], [[INF, 1.0, 2.0]])
    assert (same.cosine_distance, same.confidence_diff, same.sum_diff) == (0.0, 0.0, 0.0)
    assert same.sum_error == INF
    assert measured([[-INF, 1.0, 2.0]], [[-INF, 2.0, 1.0]]).cosine_distance > 0.1


def test_rows_of_nan_on_both_sides_are_left_out() -> None:
    seen = measured([[1.0, 2.0], [NAN, 0.0]], [[1.0, 2.0], [NAN, 5.0]])
    assert (seen.cosine_distance, seen.sum_diff) == (0.0, 0.0)
    assert measured([[NAN, 0.0]], [[NAN, 5.0]]) is None
    assert RowStatistics().result() is None


PAIRS = hnp.arrays(
    np.float64,
    st.tuples(st.just(2), st.integers(1, 8), st.just(3)),
    elements=st.floats(-1e6, 1e6) | st.sampled_from([NAN, INF]),
)


@given(PAIRS, st.integers(0, 8))
def test_two_streams_are_one(pair, cut) -> None:
    parts = [RowStatistics(), RowStatistics()]
    for part, rows in zip(parts, (slice(None, cut), slice(cut, None)), strict=True):
        part.update(pair[0, rows], pair[1, rows])
    merged, whole = parts[0].merge(parts[1]).result(), measured(*pair)
    if whole is None:
        assert merged is None
    else:
        assert_close(merged.model_dump(), whole.model_dump())
