"""The same tree of sums, whoever brings the parts and when."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.statistics.serialization import InOrder, PairwiseMerge


def folded(values: list[str]) -> str:
    fold = PairwiseMerge(lambda left, right: f"({left}{right})")
    for value in values:
        fold.add(value)
    return fold.result()


@pytest.mark.parametrize(
    ("letters", "tree"),
    [
        ("a", "a"),
        ("ab", "(ab)"),
        ("abc", "((ab)c)"),
        ("abcd", "((ab)(cd))"),
        ("abcdefg", "(((ab)(cd))((ef)g))"),
    ],
)
def test_a_binary_tree_by_index(letters: str, tree: str) -> None:
    assert folded(list(letters)) == tree


@given(st.integers(1, 500))
def test_it_holds_the_logarithm_of_what_came(count: int) -> None:
    fold = PairwiseMerge(lambda left, right: left + right)
    for value in range(count):
        fold.add(value)
        assert len(fold._waiting) <= math.log2(value + 1) + 1
    assert fold.result() == count * (count - 1) // 2


@given(st.integers(1, 60), st.randoms(use_true_random=False))
def test_no_order_and_no_doubled_part_changes_a_bit(count: int, chance: random.Random) -> None:
    values = [chance.uniform(-1, 1) * 10.0 ** chance.randrange(-8, 8) for _ in range(count)]
    wanted = PairwiseMerge(lambda left, right: left + right)
    for value in values:
        wanted.add(value)
    came = [*range(count), *(chance.randrange(count) for _ in range(count // 2))]
    chance.shuffle(came)
    fold = PairwiseMerge(lambda left, right: left + right)
    ordered = InOrder(fold.add)
    for index in came:
        ordered.add(index, values[index])
    assert ordered.next == count
    assert fold.result().hex() == wanted.result().hex()


def test_what_is_missing_holds_up_all_that_comes_after() -> None:
    taken: list[str] = []
    ordered = InOrder(taken.append)
    for index, value in enumerate("abcd"):
        if value != "b":
            ordered.add(index, value)
    assert (taken, ordered.next) == (["a"], 1)
    ordered.add(1, "b")
    assert (taken, ordered.next) == (list("abcd"), 4)
