from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

from gate.statistics.classification import ClassAnswers

NAN, INF = math.nan, math.inf


@given(st.integers(0, 99))
def test_answers_are_those_of_a_plain_computation(seed):
    values = np.random.default_rng(seed).normal(size=(6, 5)) * 4
    answers = ClassAnswers.of(values)
    ordered = np.sort(values, axis=1)
    assert (answers.top1 == values.argmax(1)).all()
    assert answers.confidence == pytest.approx(softmax(values, axis=1).max(1))
    assert (answers.margin == ordered[:, -1] - ordered[:, -2]).all()


def test_probabilities_are_taken_as_they_are():
    values = np.array([[0.7, 0.2, 0.1], [0.25, 0.5, 0.25]])
    answers = ClassAnswers.of(values, normalised=True)
    assert answers.confidence.tolist() == [0.7, 0.5]
    assert answers.of_row(1).probability == 0.5
    assert answers.of_row(1).margin == 0.25


@pytest.mark.parametrize(
    ("row", "top1", "margin"),
    [([1, 5, 5], 1, 0.0), ([1, NAN, 3], 1, 0.0), ([INF, 1, 0], 0, INF), ([-INF, 1, 0], 1, 1.0)],
)
def test_ties_nan_and_infinity(row, top1, margin):
    answer = ClassAnswers.of(np.array([row], float)).of_row(0)
    assert answer.top1 == top1
    assert answer.margin == pytest.approx(margin)


def test_rows_of_a_mask():
    values = np.random.default_rng(0).normal(size=(4, 3))
    kept = ClassAnswers.of(values).rows(np.array([True, False, True, False]))
    again = ClassAnswers.of(values[[0, 2]])
    assert (kept.top1 == again.top1).all()
    assert (kept.margin == again.margin).all()
    assert len(kept) == 2
