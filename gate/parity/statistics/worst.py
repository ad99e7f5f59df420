"""The worst number of a stream, and its worst samples: NaN is worse than everything."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gate.parity.statistics.answers import ClassAnswers
from gate.records.samples import WorstSample

KEPT = 8
"""Worst samples of an output."""


def worse(left: float, right: float) -> float:
    """The larger number; NaN if either is NaN, so that NaN is never hidden."""
    return math.nan if math.isnan(left) or math.isnan(right) else max(left, right)


@dataclass(frozen=True, slots=True)
class Worst:
    """The worst of the numbers of a stream, and its sample: of equals, the first.

    merge is associative and commutative.
    """

    value: float = math.nan
    sample: int | None = None

    @classmethod
    def of(cls, values: NDArray[np.float64], *, start: int) -> Worst:
        """Worst of values, shape (rows > 0,), whose first belongs to sample `start`."""
        index = int(values.argmax())  # the first NaN, if there is one
        return cls(float(values[index]), start + index)

    def merge(self, other: Worst) -> Worst:
        """The worse of the two."""
        return max(self, other, key=Worst._badness)

    def _badness(self) -> tuple[bool, bool, float, int]:
        found, nan = self.sample is not None, math.isnan(self.value)
        return (found, nan, 0.0 if nan else self.value, -(self.sample or 0))


class WorstSamples:
    """The samples with the largest numbers of a stream, each with what both sides answer: NaN
    before everything, of equals the first. Zeros are no worst samples.

    merge is associative and commutative; update(a + b) == update(a).merge(update(b)).
    """

    def __init__(self) -> None:
        self._kept: list[WorstSample] = []

    def update(
        self,
        values: NDArray[np.float64],
        *,
        start: int,
        answers: tuple[ClassAnswers, ClassAnswers] | None = None,
        labels: NDArray[np.int64] | None = None,
    ) -> None:
        """Add values, shape (rows,), whose first belongs to sample `start`. `answers`: of both
        sides, if they are of classes."""
        unknown = np.isnan(values)
        least = self._kept[-1].max_abs_diff if len(self._kept) == KEPT else 0.0
        rows = np.flatnonzero(unknown | (values >= least) & (values > 0.0))
        if not len(rows):
            return
        order = np.lexsort((rows, -values[rows], ~unknown[rows]))
        new = [
            WorstSample(
                sample=start + row,
                max_abs_diff=float(values[row]),
                label=None if labels is None else int(labels[row]),
                reference=answers[0].of_row(row) if answers else None,
                candidate=answers[1].of_row(row) if answers else None,
            )
            for row in rows[order[:KEPT]].tolist()
        ]
        self._kept = _first(self._kept + new)

    def merge(self, other: WorstSamples) -> WorstSamples:
        """Of both streams."""
        merged = WorstSamples()
        merged._kept = _first(self._kept + other._kept)
        return merged

    def result(self, *, classes: bool) -> tuple[WorstSample, ...]:
        """The records. `classes`: false where the answers turned out to be none."""
        if classes:
            return tuple(self._kept)
        bare = {"reference": None, "candidate": None, "label": None}
        return tuple(sample.model_copy(update=bare) for sample in self._kept)


def _first(samples: list[WorstSample]) -> list[WorstSample]:
    return sorted(samples, key=_place)[:KEPT]


def _place(sample: WorstSample) -> tuple[bool, float, int]:
    unknown = math.isnan(sample.max_abs_diff)
    return (not unknown, 0.0 if unknown else -sample.max_abs_diff, sample.sample)
