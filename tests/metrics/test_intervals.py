import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gate.decision.metric_rules import samples_to_prove
from gate.metrics.builtin import built_in
from gate.metrics.intervals import (
    bca_limits,
    binary_bounds,
    block_sums,
    holds_by_holm,
    holm_levels,
    rare_change_bounds,
    resample,
    share_limits,
    unpaired_bounds,
)
from gate.metrics.metric import Metric, PerSample, State, drop_between, sides_of
from gate.records.metrics import MetricDrop


def linear(values: np.ndarray):
    sums = block_sums(np.stack([values, np.ones_like(values)], axis=1))

    def mean(weights: np.ndarray) -> np.ndarray:
        total = weights @ sums
        return total[:, 0] / total[:, 1]

    return mean, len(sums)


def test_changes_of_one_kind_have_the_exact_bound_of_scipy():
    for worse, samples, level in ((0, 500, 0.95), (1, 500, 0.95), (7, 900, 0.99), (500, 500, 0.9)):
        expected = stats.binomtest(worse, samples, alternative="less").proportion_ci(level, "exact")
        bounds = binary_bounds(worse, 0, samples, [level])
        assert bounds.upper[0] == pytest.approx(expected.high, rel=1e-9)
        assert bounds.method == ("exact" if worse else "rule_of_three")
    low, high = share_limits(3, 50, 0.95)
    assert (low, high) == pytest.approx(tuple(stats.binomtest(3, 50).proportion_ci(0.9, "exact")))


def test_no_change_is_the_rule_of_three():
    assert binary_bounds(0, 0, 1000, [0.95]).upper[0] == pytest.approx(3 / 1000, rel=4e-3)
    assert rare_change_bounds(0.0, 1000, [0.95], scale=2.0).upper[0] == pytest.approx(
        6e-3, rel=4e-3
    )
    alike = rare_change_bounds(0.25, 1000, [0.95], scale=1.0).upper[0]
    assert alike == pytest.approx(0.25 + 0.75 * 3 / 1000, rel=4e-3)


@pytest.mark.parametrize("kind", ["normal", "skewed", "rare"])
def test_bca_is_that_of_scipy(kind: str):
    rng = np.random.default_rng(3)
    values = {
        "normal": rng.normal(size=300),
        "skewed": rng.exponential(size=300),
        "rare": np.where(rng.random(300) < 0.05, 0.5, 0.0),
    }[kind]
    mean, blocks = linear(values)
    limits = bca_limits(resample(mean, blocks), [0.95, 0.99])
    assert limits is not None
    for index, level in enumerate((0.95, 0.99)):
        peer = stats.bootstrap(
            (values,), np.mean, confidence_level=2 * level - 1, n_resamples=20_000, rng=1
        ).confidence_interval
        tolerance = 0.12 * (peer.high - peer.low)
        assert limits[1][index] == pytest.approx(peer.high, abs=tolerance)
        assert limits[0][index] == pytest.approx(peer.low, abs=tolerance)


def test_blocks_keep_the_interval_of_single_samples():
    values = np.random.default_rng(5).exponential(size=20_000)
    mean, blocks = linear(values)
    limits = bca_limits(resample(mean, blocks), [0.95])
    assert limits is not None
    error = values.std() / math.sqrt(len(values))
    assert limits[1][0] - values.mean() == pytest.approx(1.645 * error, rel=0.1)
    assert blocks == 500


def test_what_never_varies_has_no_bootstrap():
    for values in (np.zeros(200), np.full(200, 0.1), np.full(2000, 0.1)):
        assert bca_limits(resample(*linear(values)), [0.95]) is None


def test_holm_is_a_step_down_procedure():
    levels = holm_levels(0.95, 3)
    assert levels == pytest.approx((0.95, 0.975, 1 - 0.05 / 3))
    # Upper bounds at the levels 0.95, 0.975, 0.983: the first passes at once, the second only
    # later.
    easy, middle, hard = (0.1, 0.2, 0.3), (0.1, 0.3, 0.6), (0.6, 0.7, 0.8)
    assert holds_by_holm([easy, middle, hard], 0.5) == [True, True, False]
    assert holds_by_holm([middle, middle, middle], 0.5) == [False] * 3
    assert holds_by_holm([(math.nan,) * 2, (0.0, 0.0)], 0.5) == [False, True]
    assert holds_by_holm([], 0.5) == []


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(80, 5000))
def test_bounds_grow_with_drop_and_level(worse: int, better: int, samples: int):
    levels = holm_levels(0.95, 4)
    bounds = binary_bounds(worse, better, samples, levels).upper
    assert list(bounds) == sorted(bounds)
    assert bounds[0] >= (worse - better) / samples
    assert binary_bounds(worse + 1, better, samples, levels).upper[0] > bounds[0]


def needed_samples(worse: int, better: int, samples: int, *, limit: float) -> int | None:
    bounds = binary_bounds(worse, better, samples, [0.95])
    change = MetricDrop(drop=(worse - better) / samples, changed=worse + better,
                        method=bounds.method, bounds=bounds.upper, scale=1.0)  # fmt: skip
    return samples_to_prove(samples, change, bound=bounds.upper[0], limit=limit, alpha=0.05)


def test_the_needed_number_of_samples_is_enough():
    count = needed_samples(0, 0, 100, limit=0.01)
    assert count == 299
    assert binary_bounds(0, 0, count, [0.95]).upper[0] <= 0.01
    assert binary_bounds(0, 0, count - 1, [0.95]).upper[0] > 0.01
    for worse, better, limit in ((4, 2, 0.01), (5, 5, 0.012)):
        count = needed_samples(worse, better, 400, limit=limit)
        assert count is not None
        assert count > 400
        times = count / 400
        bounds = binary_bounds(int(worse * times), int(better * times), count, [0.95])
        assert bounds.upper[0] <= 1.01 * limit
    assert needed_samples(4, 0, 400, limit=0.01) is None
    assert needed_samples(8, 0, 400, limit=0.01) is None
    alike = rare_change_bounds(0.25, 1000, [0.95], scale=1.0)
    change = MetricDrop(drop=0.25, changed=1000, method=alike.method, bounds=alike.upper, scale=1.0)
    count = samples_to_prove(1000, change, bound=alike.upper[0], limit=0.251, alpha=0.05)
    assert rare_change_bounds(0.25, count or 1, [0.95], scale=1.0).upper[0] <= 0.251 + 1e-12
    for bound in (math.nan, math.inf):
        assert samples_to_prove(400, change, bound=bound, limit=0.3, alpha=0.05) is None


def drop(metric: Metric, before: State, after: State) -> MetricDrop:
    sides = sides_of(metric, {"before": before, "after": after})
    return drop_between(*sides.values(), sign=1.0, levels=[0.95])


def test_rounding_is_no_change():
    """A file with other rounding proves as little about rare drops as an identical file."""
    values = np.random.default_rng(8).normal(size=500)
    drops = [
        drop(PerSample(abs), State(values[:, None]), State((values - change)[:, None]))
        for change in (0.0, 1e-8 * values, 0.25 + 1e-8 * values, 0.25 * (np.arange(500) < 12))
    ]  # fmt: skip
    assert [(each.method, each.changed) for each in drops] == [
        ("rule_of_three", 0), ("rule_of_three", 0), ("rule_of_three", 500), ("bca", 12),
    ]  # fmt: skip
    assert drops[1].bounds == pytest.approx(drops[0].bounds)


@pytest.mark.parametrize("better", [1, 3])
def test_a_few_improvements_do_not_exclude_drops(better: int):
    """BCa resamples only changes that occurred, so that its bound would be 0."""
    labels = np.arange(500) % 10 < 3
    after = np.where(np.arange(500) % 10 == 9, True, labels)
    before = np.where(np.cumsum(labels) * labels > labels.sum() - better, False, after)
    metric = built_in("f1", {"average": "binary"})
    states = [metric.update(side.astype(int), labels.astype(int)) for side in (before, after)]
    change = drop(metric, *states)
    assert change.changed == better
    assert change.drop < 0.0
    assert change.bounds[0] - change.drop >= 0.99 * 3 / 500 * (change.scale - change.drop)


@pytest.mark.parametrize("samples", [500, 2000])
def test_changed_scores_in_the_same_order_are_no_evidence(samples: int):
    """Rounding keeps the order of the scores except for one pair, which becomes correct."""
    rng = np.random.default_rng(1)
    labels = rng.random(samples) < 0.5
    after = np.sort(rng.random(samples) + 0.05 * np.arange(samples))[rng.permutation(samples)]
    after += 2.0 * samples * labels
    before = after * 1.01
    worst, best = np.where(labels, after, np.inf).argmin(), np.where(labels, 0.0, after).argmax()
    before[[worst, best]] = before[[best, worst]]
    metric = built_in("auroc", {})
    states = [metric.update(side, labels.astype(int)) for side in (before, after)]
    change = drop(metric, *states)
    assert change.changed > 0.9 * samples
    assert change.drop < 0.0 < change.bounds[0]


def test_unpaired_bounds_widen_with_both_sides():
    paired = unpaired_bounds((0.9, 0.92), (0.88, 0.85), [0.95, 0.99])
    assert paired.upper[0] == pytest.approx(0.02 + math.hypot(0.02, 0.03))
    assert paired.upper[1] > paired.upper[0]
