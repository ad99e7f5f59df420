"""How far the confidence of answers moved, with its sign, over all samples and by class.

Formulas: docs/metrics.md and `gate.records.evidence.Confidence`.
"""

from __future__ import annotations

import math

import numpy as np

from gate.parity.statistics.answers import ClassAnswers
from gate.parity.statistics.worst import worse
from gate.records.output_parity import Confidence, ConfidenceOfClass

_BAND_EDGES = (0.01, 0.05, 0.10)


class ConfidenceStatistics:
    """Accumulates max p(c) - max p(r) of samples, which the reference puts into classes.

    merge is associative and commutative; update(a + b) == update(a).merge(update(b)), up to the
    rounding of float64 sums.
    """

    def __init__(self, classes: int) -> None:
        self.samples = np.zeros(classes, np.int64)
        """By the class that the reference gives."""
        self._moved = np.zeros(classes)
        self._largest = np.zeros(classes)
        self._signed = np.zeros(classes)
        self._reference = np.zeros(classes)
        self._candidate = np.zeros(classes)
        self._smallest = math.inf
        self._bands = np.zeros(4, np.int64)

    @np.errstate(all="ignore")
    def update(self, reference: ClassAnswers, candidate: ClassAnswers) -> None:
        """Add a batch of both sides, at least one row."""
        signed = candidate.confidence - reference.confidence
        moved = np.abs(signed)
        self._smallest = -worse(-self._smallest, -float(moved.min()))
        first, second, third = _BAND_EDGES
        # False for NaN, so NaN falls into the last band.
        within = [int((moved < first).sum()), int((moved < second).sum()),
                  int((moved <= third).sum()), len(moved)]  # fmt: skip
        self._bands += np.diff(within, prepend=0)
        classes = len(self.samples)
        self.samples += np.bincount(reference.top1, minlength=classes)
        for field, weights in (
            ("_moved", moved),
            ("_signed", signed),
            ("_reference", reference.confidence),
            ("_candidate", candidate.confidence),
        ):
            sums = np.bincount(reference.top1, weights=weights, minlength=classes)
            setattr(self, field, getattr(self, field) + sums)
        np.maximum.at(self._largest, reference.top1, moved)

    def merge(self, other: ConfidenceStatistics) -> ConfidenceStatistics:
        """Of both streams; both have the same number of classes."""
        merged = ConfidenceStatistics(len(self.samples))
        for field in ("samples", "_moved", "_signed", "_reference", "_candidate", "_bands"):
            setattr(merged, field, getattr(self, field) + getattr(other, field))
        merged._largest = np.maximum(self._largest, other._largest)
        merged._smallest = -worse(-self._smallest, -other._smallest)
        return merged

    def result(self) -> Confidence:
        """The record; NaN without samples."""
        count = int(self.samples.sum())
        n = count or math.nan
        below_1, to_5, to_10, over_10 = (float(band) / n for band in self._bands)
        return Confidence(
            mean=float(self._moved.sum()) / n,
            min=self._smallest if count else math.nan,
            max=float(self._largest.max()) if count else math.nan,
            bands=(below_1, to_5, to_10, over_10),
            per_class=tuple(map(self._of_class, np.flatnonzero(self.samples).tolist())),
        )

    def _of_class(self, label: int) -> ConfidenceOfClass:
        samples = int(self.samples[label])
        return ConfidenceOfClass(
            label=label,
            samples=samples,
            mean=float(self._moved[label] / samples),
            max=float(self._largest[label]),
            signed_mean=float(self._signed[label] / samples),
            reference_mean=float(self._reference[label] / samples),
            candidate_mean=float(self._candidate[label] / samples),
        )
