"""Integers that differ, and which of them rounding alone makes."""

from __future__ import annotations

import numpy as np
import pytest

from gate.statistics.output import MOST, IntegerMismatches


def mismatches(reference, candidate, *, start=0):
    found = IntegerMismatches()
    found.update(np.abs(candidate - reference).astype(np.float64), candidate, start=start)
    return found


R = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
C = np.array([[1, 2, 3], [4, 9, 7], [7, 8, 1]])


def test_samples_that_differ_are_doubtful():
    assert mismatches(R, C, start=10).doubtful == [11, 12]


@pytest.mark.parametrize(
    ("alternative", "excused"),
    [
        ([[4, 9, 6]], 1),
        ([[4, 9, 7]], 2),
        ([[4, 5, 6]], 0),
        ([[3, 8, 5]], 0),
        ([[4]], 0),
    ],
)
def test_only_what_rounding_makes_of_the_element_is_excused(alternative, excused):
    found = mismatches(R, C)
    found.accept_ties(1, np.array(alternative))
    assert found.excused == excused


def test_what_is_left_is_counted_without_the_excused():
    found = mismatches(R, C)
    found.accept_ties(1, np.array([[4, 9, 6]]))
    worst, total, (norms, largest) = found.remaining()
    assert (worst.value, worst.sample) == (8.0, 2)
    assert total == 9.0
    assert (norms, largest) == (9.0, 8.0)


def test_where_too_much_differs_nothing_is_a_tie():
    many = np.zeros((1, MOST + 1), np.int64)
    found = mismatches(many, many + 1)
    found.accept_ties(0, many + 1)
    assert found.doubtful == []
    assert found.excused == 0


def test_merging_is_one_pass():
    whole, first, rest = mismatches(R, C), mismatches(R[:2], C[:2]), IntegerMismatches()
    rest.update(np.abs(C - R)[2:].astype(np.float64), C[2:], start=2)
    assert first.merge(rest).remaining() == whole.remaining()


def test_alternatives_of_another_size_say_nothing():
    found = mismatches(R, C)
    found.accept_ties(1, np.array([[4, 9]]))
    found.accept_ties(1, np.array([[4, 9, 7, 7]]))
    assert found.excused == 0


def test_every_run_excuses_some_until_nothing_is_left():
    found = mismatches(R, C)
    assert found.unexplained(1) == 2
    found.accept_ties(1, np.array([[4, 9, 6]]))
    assert found.unexplained(1) == 1
    found.accept_ties(1, np.array([[4, 5, 7]]))
    assert (found.unexplained(1), found.excused, found.doubtful) == (0, 2, [2])
