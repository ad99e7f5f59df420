"""The fewest that must be off: laws."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from gate.localize.ort_optimizers import minimal_set

NAMES = tuple("abcdefghijklmnopqrst")


@given(st.sets(st.sampled_from(NAMES), min_size=1), st.permutations(NAMES))
def test_all_that_are_needed_and_no_others(needed, names):
    assert set(minimal_set(names, lambda off: needed <= off)) == needed


@given(st.sampled_from(NAMES), st.sampled_from(NAMES))
def test_of_two_that_would_do_the_one_that_comes_first(one, other):
    found = minimal_set(NAMES, lambda off: one in off or other in off)
    assert found == (min(one, other),)


@given(st.sampled_from(NAMES))
def test_one_of_n_takes_about_two_questions_for_each_halving(needed):
    questions = []

    def heals(off: frozenset[str]) -> bool:
        questions.append(off)
        return needed in off

    minimal_set(NAMES, heals)
    assert len(questions) <= 2 * math.ceil(math.log2(len(NAMES)))


def test_what_heals_without_any_needs_none():
    assert minimal_set((), lambda off: True) == ()
