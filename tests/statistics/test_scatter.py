"""What chance alone makes of a ratio of errors: few draws scatter much, and of many groups one."""

from __future__ import annotations

import numpy as np
import pytest

from gate.statistics.error_groups import scatter


@pytest.mark.parametrize("draws", [2, 8, 32, 320])
@pytest.mark.parametrize("groups", [1, 10, 100])
def test_errors_of_one_size_rarely_exceed_it(draws, groups):
    rng = np.random.default_rng(draws + groups)
    candidate, reference, tossed = (
        np.sqrt(np.square(rng.normal(size=(2000 // groups, groups, draws))).mean(axis=2))
        for _ in range(3)
    )
    ratios = candidate / np.maximum(reference, tossed)
    exceeding = (ratios.max(axis=1) > scatter(np.array([float(draws)]), groups)).sum()
    assert exceeding <= 1


def test_more_draws_scatter_less_and_more_groups_more():
    by_draws = scatter(np.array([1.0, 2.0, 4.0, 32.0, 1e4, 1e6]), 1)
    assert (np.diff(by_draws) < 0.0).all()
    assert 1.0 < by_draws[-1] < 1.01
    assert scatter(np.array([32.0]), 1000) > scatter(np.array([32.0]), 1)


@pytest.mark.parametrize("draws", [0.0, 0.1, 1.0])
def test_it_has_an_end(draws):
    assert scatter(np.array([draws]), 10**6) == 100.0
