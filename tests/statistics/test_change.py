"""How far two results are apart, column by column."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gate.statistics.accumulators import by_column, columns, worse_columns, worst_ratio

NAN, INF = math.nan, math.inf


def floats(*rows):
    return np.array(rows, np.float32)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (floats([1, 2], [3, 4]), floats([1, 2], [3, 4]), [0.0, 0.0]),
        (floats([1, 2], [3, 4]), floats([1, 2.5], [3, 3]), [0.0, 1.0]),
        (np.array([[1, 2]]), np.array([[1, 5]]), [3.0]),
        (floats([1, NAN]), floats([1, 2]), [0.0, INF]),
        (floats([1, NAN, INF]), floats([1, NAN, -INF]), [0.0, 0.0, INF]),
        (np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32), [0.0]),
        (floats([1, 2]).ravel(), floats([1, 5]).ravel(), [3.0]),
    ],
    ids=["equal", "floats", "integers", "nan", "infinite", "empty", "one axis"],
)
def test_the_largest_of_each_column(left, right, expected):
    assert by_column(left, right).tolist() == expected


def test_masks_that_are_equal_are_no_change():
    left = floats([1, -INF], [2, -INF])
    assert by_column(left, left + floats([0.5, 0], [0, 0])).tolist() == [0.5, 0.0]


@pytest.mark.parametrize(
    ("moved", "unit", "expected"),
    [
        ([0.0, 0.0], [0.0, 1.0], 0.0),
        ([1.0, 1.0], [1e6, 1e-3], 1e3),
        ([1.0], [0.0], INF),
        ([INF, 1.0], [1.0, 1.0], INF),
        ([0.0, 1.0], [0.0, 0.0], INF),
        ([1.0, 3.0, 1.0], [1.0, 2.0], 1.5),
        ([4.0, 6.0], [2.0], 3.0),
    ],
)
def test_each_column_in_its_own_unit(moved, unit, expected):
    assert worst_ratio(np.array(moved), np.array(unit)) == pytest.approx(expected)


def test_columns_of_other_lengths_are_taken_together():
    assert worse_columns(np.array([1.0, 5.0]), np.array([2.0, 3.0, 4.0])).tolist() == [5.0]
    assert worse_columns(np.zeros(1), columns(np.ones((2, 3)))).tolist() == [1.0] * 3
