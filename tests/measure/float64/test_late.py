"""Late samples: the floor grows with the magnitude, by column, and the worst are kept."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from gate.measure.noise_floor import KEPT, NoiseStatistics, OutlierTracker
from gate.statistics.output import Span

SCALE = np.array([1.0, 1e6, 1e-3])


def first(rng, *, scale=SCALE, spoilt=0.0):
    """`spoilt`: the error of one sample among them."""
    noise = NoiseStatistics(columns=True)
    truth = rng.normal(size=(32, 3)) * scale
    reference, candidate = (truth + rng.normal(size=truth.shape) * 1e-7 * scale for _ in range(2))
    reference[5] += spoilt * scale
    noise.update(truth, reference, candidate, samples=32)
    return noise.floors()


def late(reference, candidate, *, scale=SCALE, spoilt=0.0):
    errors = OutlierTracker(first(np.random.default_rng(0), scale=scale, spoilt=spoilt))
    errors.update(reference, candidate, Span(32, len(reference)))
    return errors


def values(count=100, *, size=1.0):
    rng = np.random.default_rng(1)
    reference = rng.normal(size=(count, 3)) * SCALE * size
    return reference, reference + rng.normal(size=reference.shape) * 1e-7 * SCALE * size


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_larger_values_may_be_off_by_more(size):
    errors = late(*values(size=size))
    assert errors.worst < 100.0
    assert len(errors.doubtful) < 0.2 * 100


@pytest.mark.parametrize("column", range(3))
def test_a_sample_that_is_wrong_in_one_column_is_doubtful(column):
    reference, candidate = values()
    candidate[70, column] *= 1.001
    assert late(reference, candidate).doubtful == [102]


def test_a_second_look_settles_a_score():
    reference, candidate = values()
    candidate[70, 0] += 1.0
    errors = late(reference, candidate)
    errors.record(102, by_own=1.5, by_first=1.5)
    assert errors.worst < 8.0


def test_a_plain_difference_is_doubtful_however_wide_the_floor_of_the_first_is():
    reference, candidate = values()
    candidate[70] *= 1.2
    errors = late(reference, candidate, spoilt=10.0)
    assert errors.doubtful == [102]
    errors.record(102, by_own=1e5, by_first=0.1)
    assert errors.worst == 1e5


def test_samples_may_lie_on_another_axis():
    """As in the states of an LSTM, (layers, samples, width)."""
    reference, candidate = values()
    candidate[70] *= 1.2
    errors = OutlierTracker(first(np.random.default_rng(0)), axis=1)
    errors.update(reference[None], candidate[None], Span(32, len(reference)))
    assert errors.doubtful == [102]


def test_an_output_without_samples_has_a_score_for_each_batch():
    reference, candidate = values()
    candidate[70] *= 1.2
    errors = OutlierTracker(first(np.random.default_rng(0)), axis=None)
    errors.update(reference, candidate, Span(32, 50))
    assert errors.doubtful == [32]


def test_more_doubtful_samples_than_are_kept_are_not_forgotten():
    reference, candidate = values(3 * KEPT)
    errors = late(reference, candidate + 1.0)
    for sample in errors.doubtful:
        errors.record(sample, by_own=0.0, by_first=0.0)
    assert errors.worst > 8.0


def test_a_column_that_was_zero_among_the_first_has_the_floor_of_the_whole():
    scale = np.array([1.0, 0.0, 1.0])
    reference = np.full((4, 3), 2.0)
    assert late(reference, reference + 1e-7, scale=scale).worst < 8.0
    assert late(reference, reference + 1e-3, scale=scale).worst > 8.0


def test_what_is_not_finite_is_left_to_another_check():
    reference, candidate = values()
    candidate[5, 0] = np.nan
    assert late(reference, candidate).worst < 8.0


@pytest.mark.parametrize("cuts", [(1,), (100,), (299,), (10, 20, 250)])
def test_merged_it_is_as_in_one_stream(cuts):
    reference, candidate = values(300)
    candidate[200:280, 1] *= 1.01
    rng = np.random.default_rng(0)
    floors = first(rng)
    whole = OutlierTracker(floors)
    whole.update(reference, candidate, Span(32, 300))
    parts = []
    for start, stop in itertools.pairwise((0, *cuts, 300)):
        parts.append(OutlierTracker(floors))
        parts[-1].update(
            reference[start:stop], candidate[start:stop], Span(32 + start, stop - start)
        )
    merged = functools.reduce(OutlierTracker.merge, parts)
    assert merged.worst == whole.worst
    assert merged.doubtful == whole.doubtful
    assert len(merged._scores) == KEPT
    assert merged._other == whole._other > 0.0
