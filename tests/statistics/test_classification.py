"""Statistics of classifiers: agreement, confidence, threshold crossings and worst samples."""

import functools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import softmax

from gate.policy.sections import OperatingPoint
from gate.records.outputs import LISTED
from gate.statistics.accumulators import KEPT
from gate.statistics.classification import (
    ClassAnswers,
    ClassStatistics,
    ConfidenceStatistics,
    CrossingStatistics,
    WorstSamples,
)
from tests.measure.close import assert_close

NAN, INF = math.nan, math.inf


def class_statistics(r, c, labels=None, start=0):
    r, c = np.array(r, float), np.array(c, float)
    statistics = ClassStatistics(r.shape[1])
    statistics.update(
        ClassAnswers.from_values(r), ClassAnswers.from_values(c), start=start, labels=labels
    )
    return statistics.result()


def test_class_statistics_match_numpy():
    rng = np.random.default_rng(0)
    r = rng.normal(size=(200, 12)) * 3
    c = r + rng.normal(size=r.shape) * 0.7
    labels = rng.integers(0, 12, 200)
    result = class_statistics(r, c, labels)

    p_r, p_c = softmax(r, axis=1), softmax(c, axis=1)
    moved = abs(p_r.max(1) - p_c.max(1))
    norms = np.linalg.norm(p_r - p_c, axis=1)
    top = [{*np.argsort(-row)[:5]} for row in r], [{*np.argsort(-row)[:5]} for row in c]
    differ = np.flatnonzero(r.argmax(1) != c.argmax(1))
    assert result.top1_disagreements == len(differ) > 0
    assert result.top1_agreement == pytest.approx(1 - len(differ) / 200)
    assert result.top5_agreement == pytest.approx(
        np.mean([a == b for a, b in zip(*top, strict=True)])
    )
    assert [d.sample for d in result.disagreeing] == list(differ)
    ordered = np.sort(r, axis=1)
    for d in result.disagreeing:
        assert d.reference == r[d.sample].argmax()
        assert d.candidate == c[d.sample].argmax()
        assert d.margin == ordered[d.sample, -1] - ordered[d.sample, -2]
    assert result.predicted_classes == len(set(r.argmax(1)))
    assert result.l2_probabilities_mean == pytest.approx(norms.mean())
    assert result.l2_probabilities_max == pytest.approx(norms.max())
    assert result.confidence.mean == pytest.approx(moved.mean())
    assert result.confidence.min == pytest.approx(moved.min())
    assert result.confidence.max == pytest.approx(moved.max())
    shares = [np.mean(moved < 0.01), np.mean((moved >= 0.01) & (moved < 0.05)),
              np.mean((moved >= 0.05) & (moved <= 0.1)), np.mean(moved > 0.1)]  # fmt: skip
    assert result.confidence.bands == pytest.approx(tuple(shares))
    for item in result.confidence.per_class:
        mine = moved[r.argmax(1) == item.label]
        assert (item.samples, item.mean, item.max) == (
            len(mine), pytest.approx(mine.mean()), pytest.approx(mine.max())
        )  # fmt: skip
    assert sum(item.samples for item in result.confidence.per_class) == 200
    assert result.accuracy.reference == np.mean(r.argmax(1) == labels)
    assert result.accuracy.candidate == np.mean(c.argmax(1) == labels)
    assert result.accuracy.drop == pytest.approx(
        result.accuracy.reference - result.accuracy.candidate
    )


def test_differently_broken_tie_is_a_disagreement_with_zero_margin():
    result = class_statistics([[1, 5, 5], [1, 5, 5]], [[1, 5, 5.001], [1, 5.001, 5]])
    assert result.top1_disagreements == 1
    assert result.disagreeing[0].sample == 0
    assert result.disagreeing[0].margin == 0.0


@pytest.mark.parametrize(("r", "c"), [
    ([[1, 2, 3]], [[1, NAN, 3]]),
    ([[1, NAN, 3]], [[1, 2, 3]]),
    ([[1, NAN, 3]], [[1, NAN, NAN]]),
    ([[NAN] * 3], [[1, 2, 3]]),
])  # fmt: skip
def test_nan_on_one_side_is_a_disagreement_with_infinite_distance(r, c):
    result = class_statistics([*r, [3, 2, 1]], [*c, [3, 2, 1]], labels=np.array([2, 0]))
    assert result.top1_disagreements == 1
    assert result.top1_agreement == result.top5_agreement == 0.5
    assert result.confidence.bands == (0.5, 0.0, 0.0, 0.5)
    assert result.confidence.min == 0.0
    for number in (
        result.confidence.mean,
        result.confidence.max,
        result.l2_probabilities_mean,
        result.l2_probabilities_max,
    ):
        assert number == INF


def test_row_with_nan_counts_as_wrong_label():
    r, c = [[NAN, 2, 3]], [[NAN, NAN, 3]]
    accuracy = class_statistics(r, c, labels=np.array([0])).accuracy
    assert (accuracy.reference, accuracy.candidate) == (0.0, 0.0)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_row_with_nan_on_both_sides_is_excluded_and_counted(batch):
    r = np.array([[1, 2, 3], [1, NAN, 3], [3, 2, 1]])
    c = np.array([[1, 2, 3], [1, NAN, 9], [3, 2, 9]])
    labels = np.array([2, 0, 0])
    rows = range(0, 3, batch)
    parts = [ClassStatistics(3) for _ in rows]
    for part, start in zip(parts, rows, strict=True):
        stop = start + batch
        part.update(
            ClassAnswers.from_values(r[start:stop]),
            ClassAnswers.from_values(c[start:stop]),
            start=start,
            labels=labels[start:stop],
        )
    result = functools.reduce(ClassStatistics.merge, parts).result()
    assert result.nan_rows == 1
    assert (result.top1_agreement, result.top1_disagreements) == (0.5, 1)
    assert [item.sample for item in result.disagreeing] == [2]
    assert (result.accuracy.reference, result.accuracy.candidate) == (1.0, 0.5)
    assert math.isfinite(result.confidence.max)


def test_agreement_is_zero_when_all_rows_are_nan():
    result = class_statistics([[NAN] * 3], [[NAN] * 3])
    assert (result.nan_rows, result.predicted_classes) == (1, 0)
    assert result.top1_agreement == 0.0


@pytest.mark.parametrize(("r", "c", "moved"), [
    ([INF, 1, 0], [INF, 1, 0], 0.0),
    ([INF, INF, 0], [INF, INF, 0], 0.0),
    ([-INF, -INF, -INF], [-INF, -INF, -INF], 0.0),
    ([-INF, 1, 0], [-INF, 1, 0], 0.0),
    ([INF, INF, 0], [INF, 5, 0], 0.5),
])  # fmt: skip
def test_equal_infinite_logits_have_equal_probability(r, c, moved):
    result = class_statistics([r], [c])
    assert result.confidence.max == moved
    assert moved or result.top1_agreement == 1.0


def test_top5_tie_prefers_lower_class_index():
    r = [[9, 8, 7, 6, 5, 5, 5]]
    assert class_statistics(r, r).top5_agreement == 1.0
    assert class_statistics(r, [[9, 8, 7, 6, 5.1, 5, 5]]).top5_agreement == 1.0
    assert class_statistics(r, [[9, 8, 7, 6, 5, 5, 5.1]]).top5_agreement == 0.0


def test_disagreement_list_is_capped_but_count_is_exact():
    r = np.tile([1.0, 0.0], (300, 1))
    statistics = ClassStatistics(2)
    for start in (150, 0):
        statistics.update(
            ClassAnswers.from_values(r[:150]), ClassAnswers.from_values(-r[:150]), start=start
        )
    result = statistics.result()
    assert result.top1_disagreements == 300
    assert [d.sample for d in result.disagreeing] == list(range(LISTED))


def test_accuracy_is_none_when_a_batch_has_no_labels():
    statistics = ClassStatistics(3)
    r = np.eye(3)
    statistics.update(
        ClassAnswers.from_values(r), ClassAnswers.from_values(r), start=0, labels=np.arange(3)
    )
    statistics.update(ClassAnswers.from_values(r), ClassAnswers.from_values(r), start=3)
    assert statistics.result().accuracy is None


def test_statistics_without_samples_are_zero():
    result = ClassStatistics(3).result()
    assert result.top1_disagreements == 0
    for number in (result.top1_agreement, result.top5_agreement, result.l2_probabilities_max,
                   result.confidence.mean, result.confidence.max, result.confidence.min,
                   *result.confidence.bands):  # fmt: skip
        assert number == 0.0


@given(seed=st.integers(0, 99), cut=st.integers(1, 19), scale=st.sampled_from([1e-9, 1.0, 1e12]))
def test_merged_class_statistics_equal_one_pass(seed, cut, scale):
    rng = np.random.default_rng(seed)
    r = rng.normal(size=(20, 8)) * scale
    c = r + rng.normal(size=r.shape) * scale * 0.5
    labels = rng.integers(0, 8, 20)
    parts = []
    for start, stop in ((0, cut), (cut, 20)):
        part = ClassStatistics(8)
        part.update(
            ClassAnswers.from_values(r[start:stop]),
            ClassAnswers.from_values(c[start:stop]),
            start=start,
            labels=labels[start:stop],
        )
        parts.append(part)
    complete = class_statistics(r, c, labels).model_dump()
    for merged in (parts[0].merge(parts[1]), parts[1].merge(parts[0])):
        assert_close(merged.result().model_dump(), complete)
    assert_close(ClassStatistics(8).merge(parts[0]).result().model_dump(),
                 parts[0].result().model_dump())  # fmt: skip


def test_normalized_outputs_are_not_passed_through_softmax():
    values = np.array([[0.7, 0.2, 0.1], [0.25, 0.5, 0.25]])
    answers = ClassAnswers.from_values(values, normalised=True)
    assert answers.confidence.tolist() == [0.7, 0.5]
    assert answers.row_answer(1).probability == 0.5
    assert answers.row_answer(1).margin == 0.25


@pytest.mark.parametrize(
    ("row", "top1", "margin"),
    [([1, 5, 5], 1, 0.0), ([1, NAN, 3], 1, 0.0), ([INF, 1, 0], 0, INF), ([-INF, 1, 0], 1, 1.0)],
)
def test_top1_and_margin_with_ties_nan_and_infinity(row, top1, margin):
    answer = ClassAnswers.from_values(np.array([row], float)).row_answer(0)
    assert answer.top1 == top1
    assert answer.margin == pytest.approx(margin)


def test_answers_are_filtered_by_mask():
    values = np.random.default_rng(0).normal(size=(4, 3))
    worst_samples = ClassAnswers.from_values(values).rows(np.array([True, False, True, False]))
    again = ClassAnswers.from_values(values[[0, 2]])
    assert (worst_samples.top1 == again.top1).all()
    assert (worst_samples.margin == again.margin).all()
    assert len(worst_samples) == 2


def compute_confidence(r, c):
    statistics = ConfidenceStatistics(r.shape[1])
    if len(r):
        statistics.update(
            ClassAnswers.from_values(r, normalised=True), ClassAnswers.from_values(c, normalised=True)
        )  # fmt: skip
    return statistics


def test_signed_mean_is_positive_when_candidate_is_more_confident():
    r = np.array([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]])
    c = np.array([[0.8, 0.2], [0.8, 0.2], [0.1, 0.9]])
    zero, first = compute_confidence(r, c).result().per_class
    assert zero.mean == pytest.approx(0.1)
    assert zero.signed_mean == pytest.approx(0.0, abs=1e-12)
    assert (zero.reference_mean, zero.candidate_mean) == pytest.approx((0.8, 0.8))
    assert (first.signed_mean, first.mean) == pytest.approx((0.1, 0.1))
    surer = compute_confidence(c[2:], r[2:]).result().per_class[0]
    assert surer.signed_mean == pytest.approx(-0.1)


def count_crossings(r, c, point, *, sample_indices=None):
    statistics = CrossingStatistics(point)
    sides = [ClassAnswers.from_values(np.array(side, float), normalised=True) for side in (r, c)]
    statistics.update(*sides, np.arange(len(r)) if sample_indices is None else sample_indices)
    return statistics


A, B = [0.8, 0.1, 0.1], [0.6, 0.2, 0.2]
"""Class 0, with a probability above and below 0.7."""
C = [0.1, 0.8, 0.1]


@pytest.mark.parametrize(
    ("r", "c", "label", "expected"),
    [
        (A, A, None, (1, 1, 1, 0)),
        (B, B, None, (1, 0, 0, 0)),
        (A, B, None, (1, 1, 0, 1)),
        (B, A, None, (1, 0, 1, 1)),
        (A, C, None, (1, 1, 1, 1)),  # both exceed the threshold, with different classes
        (A, B, 0, (1, 1, 0, 1)),
        (A, B, 1, (0, 0, 0, 0)),
        (A, C, 0, (1, 1, 0, 1)),
        (A, C, 1, (1, 0, 1, 1)),
        (A, C, 2, (0, 0, 0, 0)),
        (A, [NAN, 0.1, 0.1], None, (1, 1, 0, 1)),
        (B, [NAN, 0.1, 0.1], None, (1, 0, 0, 1)),
    ],
)
def test_crossing_counts_samples_above_threshold_on_one_side(r, c, label, expected):
    got = count_crossings([r], [c], OperatingPoint(0.7, label)).result()
    assert (got.samples, got.reference_above, got.candidate_above, got.crossed) == expected
    assert got.crossing == ((0,) if got.crossed else ())
    assert (got.threshold, got.label) == (0.7, label)


def test_probability_equal_to_threshold_counts_as_above():
    assert count_crossings([[0.5, 0.5]], [[0.5, 0.5]], OperatingPoint(0.5)).result().crossed == 0
    below = count_crossings([[0.5, 0.5]], [[0.49, 0.49]], OperatingPoint(0.5)).result()
    assert (below.reference_above, below.crossed) == (1, 1)


def test_near_ties_are_excluded_from_crossing_counts():
    statistics = count_crossings([A, A, B], [C, B, B], OperatingPoint(0.7))
    assert statistics.result().crossed == 2
    got = statistics.result({0, 2})
    assert (got.samples, got.reference_above, got.candidate_above, got.crossed) == (2, 1, 0, 1)
    assert got.crossing == (1,)


def test_crossing_list_is_capped_and_refilled_when_ties_are_excluded():
    n = 3 * LISTED
    statistics = count_crossings([A] * n, [C] * n, OperatingPoint(0.7))
    assert statistics.result().crossing == tuple(range(LISTED))
    ties = set(range(LISTED))
    got = statistics.result(ties)
    assert (got.crossed, got.crossing) == (n - LISTED, tuple(range(LISTED, 2 * LISTED)))


@given(st.integers(0, 99), st.lists(st.integers(0, 40), max_size=3), st.data())
def test_crossings_do_not_depend_on_batches_and_order(seed, cuts, data):
    rng = np.random.default_rng(seed)
    r = rng.dirichlet(np.ones(3) * 0.5, size=40)
    c = np.clip(r + rng.normal(scale=0.1, size=r.shape), 0, 1)
    c[rng.random(40) < 0.1] = NAN
    point = OperatingPoint(0.7, data.draw(st.sampled_from([None, 0, 2])))
    bounds = list(zip([0, *sorted(cuts)], [*sorted(cuts), 40], strict=True))
    stream, left = CrossingStatistics(point), CrossingStatistics(point)
    parts = []
    for start, stop in data.draw(st.permutations(bounds)):
        sample_indices = np.arange(start, stop)
        parts.append(
            count_crossings(r[start:stop], c[start:stop], point, sample_indices=sample_indices)
        )
        left = left.merge(parts[-1])
        stream = stream.merge(CrossingStatistics(point))
        sides = [ClassAnswers.from_values(x[start:stop], normalised=True) for x in (r, c)]
        stream.update(*sides, sample_indices)
    right = CrossingStatistics(point)
    for part in parts:
        right = part.merge(right)
    complete = count_crossings(r, c, point)
    ties = set(data.draw(st.lists(st.integers(0, 39), max_size=5)))
    for item in (stream, left, right):
        assert item.result() == complete.result()
        assert item.result(ties) == complete.result(ties)


def worst_samples(values, *, start=0, **more):
    samples = WorstSamples()
    samples.update(np.array(values, float), start=start, **more)
    return samples


def sample_indices(samples):
    return [item.sample for item in samples.result(classes=False)]


def test_worst_sample_keeps_both_answers_and_label():
    r, c = np.array([[0.0, 1.0], [2.0, 0.0]]), np.array([[0.0, 1.0], [0.0, 3.0]])
    samples = worst_samples([0.0, 3.0], answers=(ClassAnswers.from_values(r), ClassAnswers.from_values(c)),
                   labels=np.array([1, 0]))  # fmt: skip
    (worst,) = samples.result(classes=True)
    assert (worst.sample, worst.label, worst.max_abs_diff) == (1, 0, 3.0)
    assert (worst.reference.top1, worst.candidate.top1) == (0, 1)
    assert (worst.reference.margin, worst.candidate.margin) == (2.0, 3.0)
    (bare,) = samples.result(classes=False)
    assert bare.reference is bare.candidate is bare.label is None


VALUES = hnp.arrays(
    np.float64, st.integers(0, 30), elements=st.sampled_from([0.0, 1.0, 2.0, NAN]) | st.floats(0, 9)
)


@given(VALUES, st.data())
def test_worst_samples_do_not_depend_on_batches_and_order(values, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    bounds = list(zip([0, *cuts], [*cuts, len(values)], strict=True))
    stream, parts = WorstSamples(), []
    for start, stop in data.draw(st.permutations(bounds)):
        stream.update(values[start:stop], start=start)
        parts.append(worst_samples(values[start:stop], start=start))
    left = WorstSamples()
    for part in parts:
        left = left.merge(part)
    right = WorstSamples()
    for part in parts:
        right = part.merge(right)
    complete = sorted(
        (index for index, value in enumerate(values) if value != 0),
        key=lambda p: (not math.isnan(values[p]), -np.nan_to_num(values[p]), p),
    )[:KEPT]
    assert sample_indices(stream) == sample_indices(left) == sample_indices(right) == complete
