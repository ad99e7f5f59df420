"""Sums of errors by group, and the random scatter of their ratio."""

import numpy as np
import pytest

from gate.statistics.error_groups import CANDIDATE, REFERENCE, GroupedErrors, scatter


def random_errors(seed, *, samples=6, columns=3):
    rng = np.random.default_rng(seed)
    values = np.abs(rng.normal(size=(4, samples, 2, columns)))
    return values, GroupedErrors.from_values(values, np.ones((samples, 2, columns), np.bool_))


def test_from_values_groups_by_column():
    values, sums = random_errors(0)
    assert sums.counts.tolist() == [12, 12, 12]
    assert sums.rms(CANDIDATE) == pytest.approx(np.sqrt(np.square(values[2]).mean(axis=(0, 1))))
    assert sums.peaks[CANDIDATE] == pytest.approx(values[2].max(axis=(0, 1)))


def test_by_label_equals_from_values_for_equal_groups():
    values, sums = random_errors(0)
    labels = np.broadcast_to(np.arange(3), values[0].shape).ravel()
    second = GroupedErrors.by_label(values.reshape(4, -1), labels, 3)
    assert second.sums == pytest.approx(sums.sums)
    assert second.peaks == pytest.approx(sums.peaks)
    assert second.counts == pytest.approx(sums.counts)


def test_merged_groups_equal_one_pass():
    parts = [random_errors(seed) for seed in (1, 2)]
    complete = GroupedErrors.from_values(
        np.concatenate([values for values, _ in parts], axis=1), np.ones((12, 2, 3), np.bool_)
    )
    merged = parts[0][1].merge(parts[1][1])
    for name in ("counts", "sums", "peaks", "spread", "limit"):
        assert getattr(merged, name) == pytest.approx(getattr(complete, name))


def test_joined_sums_groups_up_to_each_stop():
    _, sums = random_errors(3)
    joined = sums.joined(np.array([1, 3]))
    assert joined.counts.tolist() == [12, 36]
    assert joined.sums[REFERENCE] == pytest.approx(sums.sums[REFERENCE].cumsum()[[0, 2]])
    assert joined.peaks[REFERENCE, 1] == sums.peaks[REFERENCE].max()


@pytest.mark.parametrize(("heavy", "least", "most"), [(False, 20, 32), (True, 1, 4)])
def test_draws_is_small_when_one_sample_dominates(heavy, least, most):
    values = np.abs(np.random.default_rng(0).normal(size=(4, 32, 1, 1)))
    if heavy:
        values[:, 7] = 100.0
    sums = GroupedErrors.from_values(values, np.ones((32, 1, 1), np.bool_))
    assert least <= sums.draws(REFERENCE)[0] <= most


def test_middle_is_the_median():
    tallies = [random_errors(seed)[1] for seed in range(3)]
    middle = GroupedErrors.median(tallies)
    assert middle.sums == pytest.approx(np.median([item.sums for item in tallies], axis=0))


@pytest.mark.parametrize("draws", [2, 8, 32, 320])
@pytest.mark.parametrize("groups", [1, 10, 100])
def test_random_ratio_rarely_exceeds_scatter(draws, groups):
    rng = np.random.default_rng(draws + groups)
    candidate, reference, tossed = (
        np.sqrt(np.square(rng.normal(size=(2000 // groups, groups, draws))).mean(axis=2))
        for _ in range(3)
    )
    ratios = candidate / np.maximum(reference, tossed)
    exceeding = (ratios.max(axis=1) > scatter(np.array([float(draws)]), groups)).sum()
    assert exceeding <= 1


def test_scatter_decreases_with_draws_and_increases_with_groups():
    by_draws = scatter(np.array([1.0, 2.0, 4.0, 32.0, 1e4, 1e6]), 1)
    assert (np.diff(by_draws) < 0.0).all()
    assert 1.0 < by_draws[-1] < 1.01
    assert scatter(np.array([32.0]), 1000) > scatter(np.array([32.0]), 1)


@pytest.mark.parametrize("draws", [0.0, 0.1, 1.0])
def test_scatter_is_capped(draws):
    assert scatter(np.array([draws]), 10**6) == 100.0
