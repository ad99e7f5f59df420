from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.statistics.classification import ClassAnswers, ConfidenceStatistics
from tests.measure.close import assert_close


def measured(r, c):
    statistics = ConfidenceStatistics(r.shape[1])
    if len(r):
        statistics.update(
            ClassAnswers.of(r, normalised=True), ClassAnswers.of(c, normalised=True)
        )  # fmt: skip
    return statistics


def test_the_sign_says_who_is_surer():
    r = np.array([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]])
    c = np.array([[0.8, 0.2], [0.8, 0.2], [0.1, 0.9]])
    zero, one = measured(r, c).result().per_class
    assert zero.mean == pytest.approx(0.1)
    assert zero.signed_mean == pytest.approx(0.0, abs=1e-12)
    assert (zero.reference_mean, zero.candidate_mean) == pytest.approx((0.8, 0.8))
    assert (one.signed_mean, one.mean) == pytest.approx((0.1, 0.1))
    surer = measured(c[2:], r[2:]).result().per_class[0]
    assert surer.signed_mean == pytest.approx(-0.1)


@given(st.integers(0, 99), st.permutations(range(3)))
def test_streams_add_up_in_any_order(seed, order):
    rng = np.random.default_rng(seed)
    r, c = rng.dirichlet(np.ones(4), size=20), rng.dirichlet(np.ones(4), size=20)
    parts = [measured(r[rows], c[rows]) for rows in (slice(0, 7), slice(7, 7), slice(7, 20))]
    merged = functools.reduce(ConfidenceStatistics.merge, [parts[place] for place in order])
    assert_close(merged.result().model_dump(), measured(r, c).result().model_dump())
    for one in merged.result().per_class:
        assert one.signed_mean == pytest.approx(one.candidate_mean - one.reference_mean)
        assert abs(one.signed_mean) <= one.mean + 1e-12
