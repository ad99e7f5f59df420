from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

from gate.records.outputs import LISTED
from gate.statistics.classification import ClassAnswers, ClassStatistics
from tests.measure.close import assert_close

NAN, INF = math.nan, math.inf


def measured(r, c, labels=None, start=0):
    r, c = np.array(r, float), np.array(c, float)
    statistics = ClassStatistics(r.shape[1])
    statistics.update(ClassAnswers.of(r), ClassAnswers.of(c), start=start, labels=labels)
    return statistics.result()


def test_numbers_match_a_plain_computation():
    rng = np.random.default_rng(0)
    r = rng.normal(size=(200, 12)) * 3
    c = r + rng.normal(size=r.shape) * 0.7
    labels = rng.integers(0, 12, 200)
    result = measured(r, c, labels)

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
    for one in result.confidence.per_class:
        mine = moved[r.argmax(1) == one.label]
        assert (one.samples, one.mean, one.max) == (
            len(mine), pytest.approx(mine.mean()), pytest.approx(mine.max())
        )  # fmt: skip
    assert sum(one.samples for one in result.confidence.per_class) == 200
    assert result.accuracy.reference == np.mean(r.argmax(1) == labels)
    assert result.accuracy.candidate == np.mean(c.argmax(1) == labels)
    assert result.accuracy.drop == pytest.approx(
        result.accuracy.reference - result.accuracy.candidate
    )


def test_a_tie_broken_differently_is_a_disagreement_without_margin():
    result = measured([[1, 5, 5], [1, 5, 5]], [[1, 5, 5.001], [1, 5.001, 5]])
    assert result.top1_disagreements == 1
    assert result.disagreeing[0].sample == 0
    assert result.disagreeing[0].margin == 0.0


def test_equal_ties_agree():
    r = np.zeros((4, 9))
    assert measured(r, r).top1_agreement == measured(r, r).top5_agreement == 1.0


@pytest.mark.parametrize(
    ("r", "c"),
    [
        ([[1, 2, 3]], [[1, NAN, 3]]),
        ([[1, NAN, 3]], [[1, 2, 3]]),
        ([[1, NAN, 3]], [[1, NAN, NAN]]),
        ([[NAN] * 3], [[1, 2, 3]]),
    ],
)
def test_nan_on_one_side_agrees_in_nothing(r, c):
    result = measured([*r, [3, 2, 1]], [*c, [3, 2, 1]], labels=np.array([2, 0]))
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


def test_nan_predicts_no_label():
    r, c = [[NAN, 2, 3]], [[NAN, NAN, 3]]
    accuracy = measured(r, c, labels=np.array([0])).accuracy
    assert (accuracy.reference, accuracy.candidate) == (0.0, 0.0)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_row_with_nan_in_the_same_places_is_left_out_and_counted(batch):
    r = np.array([[1, 2, 3], [1, NAN, 3], [3, 2, 1]])
    c = np.array([[1, 2, 3], [1, NAN, 9], [3, 2, 9]])
    labels = np.array([2, 0, 0])
    rows = range(0, 3, batch)
    parts = [ClassStatistics(3) for _ in rows]
    for part, start in zip(parts, rows, strict=True):
        stop = start + batch
        part.update(
            ClassAnswers.of(r[start:stop]),
            ClassAnswers.of(c[start:stop]),
            start=start,
            labels=labels[start:stop],
        )
    result = functools.reduce(ClassStatistics.merge, parts).result()
    assert result.nan_rows == 1
    assert (result.top1_agreement, result.top1_disagreements) == (0.5, 1)
    assert [one.sample for one in result.disagreeing] == [2]
    assert (result.accuracy.reference, result.accuracy.candidate) == (1.0, 0.5)
    assert math.isfinite(result.confidence.max)


def test_rows_of_nan_alone_prove_nothing():
    result = measured([[NAN] * 3], [[NAN] * 3])
    assert (result.nan_rows, result.predicted_classes) == (1, 0)
    assert result.top1_agreement == 0.0


@pytest.mark.parametrize(
    ("r", "c", "moved"),
    [
        ([INF, 1, 0], [INF, 1, 0], 0.0),
        ([INF, INF, 0], [INF, INF, 0], 0.0),
        ([-INF, -INF, -INF], [-INF, -INF, -INF], 0.0),
        ([INF, INF, 0], [INF, 5, 0], 0.5),
    ],
)
def test_equal_infinite_logits_share_the_probability(r, c, moved):
    assert measured([r], [c]).confidence.max == moved


def test_masked_classes_are_judged():
    result = measured([[-INF, 1, 0]], [[-INF, 1, 0]])
    assert result.confidence.max == 0.0
    assert result.top1_agreement == 1.0


def test_top5_with_ties_at_the_border_prefers_low_indices():
    r = [[9, 8, 7, 6, 5, 5, 5]]
    assert measured(r, r).top5_agreement == 1.0
    assert measured(r, [[9, 8, 7, 6, 5.1, 5, 5]]).top5_agreement == 1.0
    assert measured(r, [[9, 8, 7, 6, 5, 5, 5.1]]).top5_agreement == 0.0


@pytest.mark.parametrize("classes", [2, 5])
def test_few_classes_have_one_top5_set(classes):
    rng = np.random.default_rng(0)
    r = rng.normal(size=(8, classes))
    assert measured(r, -r).top5_agreement == 1.0


def test_the_list_of_disagreements_is_capped_and_the_count_is_not():
    r = np.tile([1.0, 0.0], (300, 1))
    statistics = ClassStatistics(2)
    for start in (150, 0):
        statistics.update(ClassAnswers.of(r[:150]), ClassAnswers.of(-r[:150]), start=start)
    result = statistics.result()
    assert result.top1_disagreements == 300
    assert [d.sample for d in result.disagreeing] == list(range(LISTED))


def test_accuracy_needs_a_label_for_every_sample():
    statistics = ClassStatistics(3)
    r = np.eye(3)
    statistics.update(ClassAnswers.of(r), ClassAnswers.of(r), start=0, labels=np.arange(3))
    statistics.update(ClassAnswers.of(r), ClassAnswers.of(r), start=3)
    assert statistics.result().accuracy is None


def test_without_samples_every_number_is_zero():
    result = ClassStatistics(3).result()
    assert result.top1_disagreements == 0
    for number in (result.top1_agreement, result.top5_agreement, result.l2_probabilities_max,
                   result.confidence.mean, result.confidence.max, result.confidence.min,
                   *result.confidence.bands):  # fmt: skip
        assert number == 0.0


@given(seed=st.integers(0, 99), cut=st.integers(1, 19), scale=st.sampled_from([1e-9, 1.0, 1e12]))
def test_merging_parts_equals_the_whole(seed, cut, scale):
    rng = np.random.default_rng(seed)
    r = rng.normal(size=(20, 8)) * scale
    c = r + rng.normal(size=r.shape) * scale * 0.5
    labels = rng.integers(0, 8, 20)
    parts = []
    for start, stop in ((0, cut), (cut, 20)):
        part = ClassStatistics(8)
        part.update(
            ClassAnswers.of(r[start:stop]),
            ClassAnswers.of(c[start:stop]),
            start=start,
            labels=labels[start:stop],
        )
        parts.append(part)
    whole = measured(r, c, labels).model_dump()
    for merged in (parts[0].merge(parts[1]), parts[1].merge(parts[0])):
        assert_close(merged.result().model_dump(), whole)
    assert_close(ClassStatistics(8).merge(parts[0]).result().model_dump(),
                 parts[0].result().model_dump())  # fmt: skip
