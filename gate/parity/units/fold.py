"""Folding what units gave, pairwise and by index: the same tree of sums for any number of workers.

Its errors are those of pairwise summation (Higham 1993: "The accuracy of floating point
summation").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PairwiseFold(Generic[T]):
    """Merges values that come in order, as a full binary tree over them would.

    At most log2 of their number are held.
    """

    def __init__(self, merge: Callable[[T, T], T]) -> None:
        self._merge = merge
        self._waiting: list[tuple[int, T]] = []
        """Leaves and value of each subtree that is complete, the largest first."""

    def add(self, value: T) -> None:
        """Take the next one."""
        self._waiting.append((1, value))
        while len(self._waiting) > 1 and self._waiting[-1][0] == self._waiting[-2][0]:
            (leaves, left), (_, right) = self._waiting[-2:]
            self._waiting[-2:] = [(2 * leaves, self._merge(left, right))]

    def result(self) -> T:
        """All of them, at least one."""
        values = [value for _, value in self._waiting]
        whole = values.pop()
        while values:
            whole = self._merge(values.pop(), whole)
        return whole


class InOrder(Generic[T]):
    """Brings values that come in any order, each with its index from 0 on, into order. One that
    comes twice counts once."""

    def __init__(self, take: Callable[[T], None]) -> None:
        """`take` gets the values in order."""
        self._take = take
        self._early: dict[int, T] = {}
        self.next = 0
        """The index that is taken next."""

    def add(self, index: int, value: T) -> None:
        """Take one, as soon as all before it came."""
        if index >= self.next:
            self._early.setdefault(index, value)
        while self.next in self._early:
            self._take(self._early.pop(self.next))
            self.next += 1
