"""Fixed ranges of whole batches."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.measure.work_units import MOST, split_into_units

SIZES = st.integers(1, 70_000)


@given(SIZES, st.integers(1, 300), st.integers(0, 500), st.integers(1, 400))
def test_units_are_all_samples_once_in_whole_batches(samples, batch_size, lead, most):
    units = split_into_units(samples, batch_size=batch_size, lead=lead, most=most)
    assert [unit.index for unit in units] == list(range(len(units)))
    assert units[0].start == 0
    assert units[-1].stop == samples
    assert all(one.stop == other.start for one, other in itertools.pairwise(units))
    assert all(len(unit) > 0 and unit.start % batch_size == 0 for unit in units)
    assert len(units) <= most + 1


@given(SIZES, st.integers(1, 300), st.integers(1, 500))
def test_the_first_unit_is_the_batches_with_a_float64_reference(samples, batch_size, lead):
    first = split_into_units(samples, batch_size=batch_size, lead=lead)[0]
    assert len(first) == min(math.ceil(lead / batch_size) * batch_size, samples)


@pytest.mark.parametrize(
    ("samples", "lead", "lengths"),
    [
        (64, 64, [64]),
        (20, 64, [20]),
        (65, 64, [64, 1]),
        (64 + 128 + 5, 64, [64, 128, 5]),
        (300, 0, [128, 128, 44]),
    ],
)
def test_few_samples_make_few_units(samples: int, lead: int, lengths: list[int]) -> None:
    assert [len(unit) for unit in split_into_units(samples, batch_size=32, lead=lead)] == lengths


def test_many_samples_make_larger_units() -> None:
    units = split_into_units(1_000_000, batch_size=32, lead=64)
    assert MOST / 2 < len(units) <= MOST + 1
    assert {len(unit) for unit in units[1:-1]} == {math.ceil(999_936 / 32 / MOST) * 32}
