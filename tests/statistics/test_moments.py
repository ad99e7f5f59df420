"""The scale of an output leaves out what is the same in every sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.statistics.accumulators import ElementMoments


def moments(*batches, unequal=False):
    found = ElementMoments()
    for batch in batches:
        array = np.asarray(batch, np.float64)
        found.update(array, np.full(array.shape, unequal))
    return found


def values(count=20, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 4)) * 3.0 + 1.0


def test_it_is_the_standard_deviation():
    assert moments(values()).std == pytest.approx(values().std())


@pytest.mark.parametrize("mask", [-1e9, -np.inf, float(np.finfo(np.float32).min)])
def test_masks_are_no_part_of_the_scale(mask):
    masked = values()
    masked[:, 2] = mask
    assert moments(masked).std == pytest.approx(np.delete(masked, 2, axis=1).std())


def test_a_constant_that_differs_counts():
    masked = values()
    masked[:, 2] = 50.0
    assert moments(masked, unequal=True).std == pytest.approx(masked.std())


def test_where_nothing_varies_all_counts():
    assert moments(np.tile([1.0, 5.0], (6, 1))).std == 2.0


def test_samples_of_other_lengths_are_taken_as_they_are():
    first, other = values(), np.ones((3, 2))
    assert moments(first, other).std == pytest.approx(np.concatenate([first, other], None).std())


@given(st.integers(1, 19), st.integers(0, 5), st.booleans())
def test_merging_any_split_is_one_pass(cut, seed, holes):
    array = values(seed=seed)
    if holes:
        array[::3, 1] = np.nan
    merged = moments(array[:cut]).merge(moments(array[cut:]))
    assert merged.std == pytest.approx(moments(array).std)
    assert merged.std == pytest.approx(np.nanstd(array))
