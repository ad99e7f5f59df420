"""Samples that are above an operating point on one side only.

Formulas: docs/metrics.md and `gate.records.samples.Crossing`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gate.parity.statistics.answers import Bools, ClassAnswers
from gate.policy.operating_points import OperatingPoint
from gate.records.samples import LISTED, Crossing


class CrossingStatistics:
    """Counts, at one operating point, samples on which somebody acts by one side only.

    merge is associative and commutative; update(a + b) == update(a).merge(update(b)).

    A sample whose confidence is NaN on a side crosses. What crosses for a near-tie of two classes
    alone is left out of all counts, as it is in agreement: `ties` of the result says which.
    """

    def __init__(self, point: OperatingPoint) -> None:
        self.point = point
        self._counts = np.zeros(4, np.int64)
        """Compared, above in the reference, above in the candidate, crossed."""
        self._listed: list[Crossed] = []
        self._torn: list[Crossed] = []
        """Those with another class; near-ties are among the first of them."""

    def update(
        self, reference: ClassAnswers, candidate: ClassAnswers, places: NDArray[np.intp]
    ) -> None:
        """Add a batch of both sides; `places`: the indices of its samples."""
        threshold, label = self.point
        sides = (reference, candidate)
        with np.errstate(invalid="ignore"):
            above_r, above_c = (side.confidence >= threshold for side in sides)
        compared: Bools = np.ones(len(places), np.bool_)
        if label is not None:
            in_r, in_c = (side.top1 == label for side in sides)
            above_r, above_c, compared = above_r & in_r, above_c & in_c, in_r | in_c
        other = reference.top1 != candidate.top1
        unknown = np.isnan(reference.confidence) | np.isnan(candidate.confidence)
        crossed = compared & (unknown | (above_r != above_c) | (above_r & above_c & other))
        self._counts += [int(mask.sum()) for mask in (compared, above_r, above_c, crossed)]
        if crossed.any():
            part = CrossingStatistics(self.point)
            rows = np.flatnonzero(crossed)
            part._listed = _entries(rows[: 2 * LISTED], places, above_r, above_c)
            part._torn = _entries(rows[other[rows]][:LISTED], places, above_r, above_c)
            self._take(part)

    def merge(self, other: CrossingStatistics) -> CrossingStatistics:
        """Of both streams, at the same point."""
        merged = CrossingStatistics(self.point)
        merged._counts = self._counts + other._counts
        merged._take(self)
        merged._take(other)
        return merged

    def result(self, ties: Collection[int] = ()) -> Crossing:
        """The record. `ties`: near-ties, of the first hundred samples with another class."""
        excused = [entry for entry in self._torn if entry.sample in ties]
        less = [len(excused), sum(e.reference for e in excused),
                sum(e.candidate for e in excused), len(excused)]  # fmt: skip
        compared, above_r, above_c, crossed = (int(n) for n in self._counts - less)
        return Crossing(
            threshold=self.point.threshold,
            label=self.point.label,
            samples=compared,
            reference_above=above_r,
            candidate_above=above_c,
            crossed=crossed,
            crossing=tuple(e.sample for e in self._listed if e.sample not in ties)[:LISTED],
        )

    def _take(self, part: CrossingStatistics) -> None:
        # Twice as many as are shown, because ties are taken from them at the end.
        self._listed = sorted(self._listed + part._listed)[: 2 * LISTED]
        self._torn = sorted(self._torn + part._torn)[:LISTED]


class Crossed(NamedTuple):
    """A sample that crossed."""

    sample: int
    reference: bool
    """Above in the reference."""
    candidate: bool


def _entries(
    rows: NDArray[np.intp], places: NDArray[np.intp], above_r: Bools, above_c: Bools
) -> list[Crossed]:
    columns = (array[rows].tolist() for array in (places, above_r, above_c))
    return [Crossed(*entry) for entry in zip(*columns, strict=True)]
