"""Float64 answers by sample."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gate.reference.cache import SampleTruths, agree
from gate.runtimes.recording_format import row_digests

X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
DIGESTS = row_digests({"x": X})
R = [X * 2, X.argmax(1)]
R64 = [X.astype(np.float64) * 2, X.argmax(1)]
NAN, INF = math.nan, math.inf


def noted(reference=R, truth=R64, *, room=2**10):
    truths = SampleTruths(room=room)
    truths.note(DIGESTS, reference, truth)
    return truths


def test_any_batch_of_what_was_noted_is_put_together():
    places = [4, 0, 4, 2]
    truths = noted()
    assert truths.holds(DIGESTS[places])
    assert not truths.holds(row_digests({"x": np.concatenate([X[:2], X[:1] + 1])}))
    for made, whole in zip(truths.of(DIGESTS[places], [r[places] for r in R]), R64, strict=True):
        assert np.array_equal(made, whole[places])


@pytest.mark.parametrize(
    "other",
    [
        [R[0] * (1 + 1e-4), R[1]],
        [R[0], R[1] + 1],
        [R[0]],
        [R[0][:, :2], R[1]],
        [np.where(R[0] == R[0][0, 0], NAN, R[0]).astype(np.float32), R[1]],
    ],
    ids=["moved", "another class", "one output less", "another shape", "NaN"],
)
def test_not_where_the_float32_answer_is_another(other):
    assert noted().of(DIGESTS, other) is None


def test_rounding_is_no_other_answer():
    assert noted().of(DIGESTS, [R[0] * np.float32(1 + 1e-6), R[1]]) is not None


@pytest.mark.parametrize(
    ("reference", "truth"),
    [
        ([R[0].sum(keepdims=True)], [R64[0].sum(keepdims=True)]),
        ([R[0].sum()], [R64[0].sum()]),
        ([R[0]], R64),
        ([R[0], R[1]], [R64[0], R64[1][:5]]),
    ],
    ids=["no row for each", "no axis", "other outputs", "other rows"],
)
def test_nothing_is_kept_of_what_has_no_row_for_each_sample(reference, truth):
    assert not noted(reference, truth).holds(DIGESTS[:1])


@pytest.mark.parametrize(
    ("reference", "truth"),
    [([R[0][:, :2], R[1]], [R64[0][:, :2], R64[1]]), ([R[0]], [R64[0]])],
    ids=["another width", "one output less"],
)
def test_samples_whose_outputs_the_data_shape_are_not_put_together(reference, truth):
    truths = SampleTruths(room=2**10)
    truths.note(DIGESTS[:3], [r[:3] for r in R], [r64[:3] for r64 in R64])
    truths.note(DIGESTS[3:], [r[3:] for r in reference], [r64[3:] for r64 in truth])
    assert truths.holds(DIGESTS)
    assert truths.of(DIGESTS, R) is None


def test_what_is_kept_is_bounded():
    one = 3 * 4 + 8 + 3 * 8 + 8
    truths = noted(room=2 * one)
    assert [truths.holds(DIGESTS[row : row + 1]) for row in range(4)] == [True, True, False, False]


def test_what_was_noted_is_a_copy():
    reference, truth = [R[0].copy(), R[1].copy()], [R64[0].copy(), R64[1].copy()]
    truths = noted(reference, truth)
    reference[0][:], truth[0][:] = 7.0, 7.0
    assert np.array_equal(truths.of(DIGESTS, R)[0], R64[0])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [1.0, 2.0 + 1e-5], True),
        ([1.0, 2.0], [1.0, 2.0 + 1e-4], False),
        ([NAN, 2.0], [NAN, 2.0], True),
        ([NAN, 2.0], [INF, 2.0], False),
        ([INF, 2.0], [-INF, 2.0], False),
        ([1.0, 2.0], [NAN, 2.0], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([1e-30, 0.0], [0.0, 0.0], False),
        ([], [], True),
    ],
)
def test_agreement(one, other, same):
    assert agree(np.array(one), np.array(other)) is same
    assert agree(np.array(one), np.array(other, np.float32)) is same


def test_integers_agree_only_where_they_are_equal():
    assert agree(np.array([1, 2]), np.array([1, 2], np.int32))
    assert not agree(np.array([1, 2]), np.array([1, 3]))
    assert not agree(np.array([1, 2]), np.array([1.0, 2.0]))
