from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.policy.sections import OperatingPoint
from gate.records.outputs import LISTED
from gate.statistics.classification import ClassAnswers, CrossingStatistics

NAN = math.nan


def counted(r, c, point, *, places=None):
    statistics = CrossingStatistics(point)
    sides = [ClassAnswers.of(np.array(side, float), normalised=True) for side in (r, c)]
    statistics.update(*sides, np.arange(len(r)) if places is None else places)
    return statistics


A, B = [0.8, 0.1, 0.1], [0.6, 0.2, 0.2]
"""Class 0, above 0.7 and below it."""
C = [0.1, 0.8, 0.1]


@pytest.mark.parametrize(
    ("r", "c", "label", "expected"),
    [
        (A, A, None, (1, 1, 1, 0)),
        (B, B, None, (1, 0, 0, 0)),
        (A, B, None, (1, 1, 0, 1)),
        (B, A, None, (1, 0, 1, 1)),
        (A, C, None, (1, 1, 1, 1)),  # both act, on different classes
        (A, B, 0, (1, 1, 0, 1)),
        (A, B, 1, (0, 0, 0, 0)),
        (A, C, 0, (1, 1, 0, 1)),
        (A, C, 1, (1, 0, 1, 1)),
        (A, C, 2, (0, 0, 0, 0)),
        (A, [NAN, 0.1, 0.1], None, (1, 1, 0, 1)),
        (B, [NAN, 0.1, 0.1], None, (1, 0, 0, 1)),
    ],
)
def test_who_acts_by_one_side_only(r, c, label, expected):
    got = counted([r], [c], OperatingPoint(0.7, label)).result()
    assert (got.samples, got.reference_above, got.candidate_above, got.crossed) == expected
    assert got.crossing == ((0,) if got.crossed else ())
    assert (got.threshold, got.label) == (0.7, label)


def test_at_the_point_is_above_it():
    assert counted([[0.5, 0.5]], [[0.5, 0.5]], OperatingPoint(0.5)).result().crossed == 0
    below = counted([[0.5, 0.5]], [[0.49, 0.49]], OperatingPoint(0.5)).result()
    assert (below.reference_above, below.crossed) == (1, 1)


def test_a_near_tie_of_two_classes_is_left_out_of_every_count():
    statistics = counted([A, A, B], [C, B, B], OperatingPoint(0.7))
    assert statistics.result().crossed == 2
    got = statistics.result({0, 2})
    assert (got.samples, got.reference_above, got.candidate_above, got.crossed) == (2, 1, 0, 1)
    assert got.crossing == (1,)


def test_the_list_is_capped_and_whole_in_spite_of_ties():
    n = 3 * LISTED
    statistics = counted([A] * n, [C] * n, OperatingPoint(0.7))
    assert statistics.result().crossing == tuple(range(LISTED))
    ties = set(range(LISTED))
    got = statistics.result(ties)
    assert (got.crossed, got.crossing) == (n - LISTED, tuple(range(LISTED, 2 * LISTED)))


@given(st.integers(0, 99), st.lists(st.integers(0, 40), max_size=3), st.data())
def test_neither_batches_nor_order_matter(seed, cuts, data):
    rng = np.random.default_rng(seed)
    r = rng.dirichlet(np.ones(3) * 0.5, size=40)
    c = np.clip(r + rng.normal(scale=0.1, size=r.shape), 0, 1)
    c[rng.random(40) < 0.1] = NAN
    point = OperatingPoint(0.7, data.draw(st.sampled_from([None, 0, 2])))
    bounds = list(zip([0, *sorted(cuts)], [*sorted(cuts), 40], strict=True))
    stream, left = CrossingStatistics(point), CrossingStatistics(point)
    parts = []
    for start, stop in data.draw(st.permutations(bounds)):
        places = np.arange(start, stop)
        parts.append(counted(r[start:stop], c[start:stop], point, places=places))
        left = left.merge(parts[-1])
        stream = stream.merge(CrossingStatistics(point))
        sides = [ClassAnswers.of(x[start:stop], normalised=True) for x in (r, c)]
        stream.update(*sides, places)
    right = CrossingStatistics(point)
    for part in parts:
        right = part.merge(right)
    whole = counted(r, c, point)
    ties = set(data.draw(st.lists(st.integers(0, 39), max_size=5)))
    for one in (stream, left, right):
        assert one.result() == whole.result()
        assert one.result(ties) == whole.result(ties)
