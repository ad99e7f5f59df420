"""Parity of logits, shape (batch, classes): agreement, probabilities, confidence, accuracy.

Formulas: docs/metrics.md and `gate.records.evidence.ClassParity`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gate.parity.statistics.answers import LOGITS, ClassAnswers, ClassReading
from gate.parity.statistics.confidence import ConfidenceStatistics
from gate.parity.statistics.crossings import CrossingStatistics
from gate.parity.statistics.worst import worse
from gate.policy.operating_points import OperatingPoint
from gate.records.output_parity import Accuracy, ClassParity, Disagreement
from gate.records.samples import LISTED

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

__all__ = ["ClassStatistics"]


class ClassStatistics:
    """Accumulates the differences between two float64 logit arrays, shape (batch, classes >= 2).

    merge is associative; update(a + b) == update(a).merge(update(b)), up to the rounding of
    float64 sums.

    A tie goes to the lowest index on each side, so a tie that is broken otherwise counts as a
    disagreement with margin 0, unless `look` finds that rounding breaks it. A sample with NaN on
    one side agrees in nothing; one with NaN on both sides in the same places has no answer to
    compare, and is only counted.
    """

    def __init__(self, classes: int, reading: ClassReading = LOGITS) -> None:
        self.classes = classes
        self._reading = reading
        self.samples = 0
        self._nan_rows = 0
        self._disagreements = 0
        self._ties: set[int] = set()
        self._unsure = self._sure = 0
        self._top5_agreements = 0
        self._listed: list[Disagreement] = []
        self._l2_sum = 0.0
        self._l2_max = 0.0
        self._confidence = ConfidenceStatistics(classes)
        self._crossings = [CrossingStatistics(point) for point in self._points]
        self._labelled = 0
        self._right_reference = 0
        self._right_candidate = 0

    def update(
        self,
        reference: ClassAnswers,
        candidate: ClassAnswers,
        *,
        start: int,
        labels: NDArray[np.int64] | None = None,
    ) -> None:
        """Add a batch whose first row is sample `start`; labels have shape (batch,)."""
        places = np.arange(start, start + len(reference))
        alike = _nan_alike(reference.values, candidate.values)
        if alike.any():
            self._nan_rows += int(alike.sum())
            reference, candidate = reference.rows(~alike), candidate.rows(~alike)
            places = places[~alike]
            labels = None if labels is None else labels[~alike]
        if not len(reference):
            return
        self.samples += len(reference)
        r, c = reference.values, candidate.values
        nan_r, nan_c = np.isnan(r).any(axis=1), np.isnan(c).any(axis=1)
        with np.errstate(all="ignore"):
            comparable = ~(nan_r | nan_c)
            agree = comparable & (reference.top1 == candidate.top1)
            self._update_agreement(reference, candidate.top1, agree=agree, places=places)
            self._top5_agreements += int((comparable & _same_top(r, c, min(5, self.classes))).sum())
            apart = np.square(candidate.probabilities - reference.probabilities)
            norms = np.sqrt(apart.sum(axis=1))
        self._l2_sum += float(norms.sum())
        self._l2_max = worse(self._l2_max, float(norms.max()))
        self._confidence.update(reference, candidate)
        for crossings in self._crossings:
            crossings.update(reference, candidate, places)
        if labels is not None:
            self._labelled += len(labels)
            self._right_reference += int(((reference.top1 == labels) & ~nan_r).sum())
            self._right_candidate += int(((candidate.top1 == labels) & ~nan_c).sum())

    def merge(self, other: ClassStatistics) -> ClassStatistics:
        """Statistics of both streams; both have the same number of classes."""
        merged = ClassStatistics(self.classes, self._reading)
        for field in ("samples", "_nan_rows", "_disagreements", "_unsure", "_sure",
                      "_top5_agreements", "_l2_sum", "_labelled", "_right_reference",
                      "_right_candidate"):  # fmt: skip
            setattr(merged, field, getattr(self, field) + getattr(other, field))
        merged._listed = _first(self._listed + other._listed)
        merged._ties = self._ties | other._ties
        merged._l2_max = worse(self._l2_max, other._l2_max)
        merged._confidence = self._confidence.merge(other._confidence)
        merged._crossings = [
            own.merge(others) for own, others in zip(self._crossings, other._crossings, strict=True)
        ]
        return merged

    def result(self) -> ClassParity:
        """The record; shares and means are NaN without samples."""
        n = self.samples or math.nan
        decided = self.samples - len(self._ties)
        disagreements = self._disagreements - len(self._ties)
        return ClassParity(
            classes=self.classes,
            predicted_classes=int(np.count_nonzero(self._confidence.samples)),
            top1_agreement=(decided - disagreements) / (decided or math.nan),
            top1_disagreements=disagreements,
            top1_ties=len(self._ties),
            unsure=self._unsure,
            sure=self._sure,
            top5_agreement=self._top5_agreements / n,
            disagreeing=tuple(self._listed),
            l2_probabilities_mean=self._l2_sum / n,
            l2_probabilities_max=self._l2_max if self.samples else math.nan,
            confidence=self._confidence.result(),
            accuracy=self._accuracy(),
            nan_rows=self._nan_rows,
            normalised=self._reading.normalised,
            crossings=tuple(crossings.result(self._ties) for crossings in self._crossings),
        )

    @property
    def _points(self) -> list[OperatingPoint]:
        """The operating points of which it has the class."""
        return [p for p in self._reading.points if p.label is None or p.label < self.classes]

    @property
    def doubtful(self) -> list[int]:
        """Samples whose answers differ, the first hundred."""
        return [disagreement.sample for disagreement in self._listed]

    def look(self, sample: int, truth: Floats, floor: Floats) -> None:
        """Count a sample apart if its answers differ by no more than rounding: the truth of both
        classes, shape (1, classes), is nearer than the errors of two honest implementations."""
        disagreement = next(
            disagreement for disagreement in self._listed if disagreement.sample == sample
        )
        margin = abs(float(truth[0, disagreement.reference] - truth[0, disagreement.candidate]))
        if margin <= 2.0 * float(floor[0, [disagreement.reference, disagreement.candidate]].max()):
            self._ties.add(sample)

    def update_truth(self, truth: NDArray[np.intp], reference: NDArray[np.intp]) -> None:
        """Add the answers to a batch in float64 and float32, both of shape (batch,)."""
        same = int((truth == reference).sum())
        self._sure += same
        self._unsure += len(truth) - same

    def _accuracy(self) -> Accuracy | None:
        """None unless every sample has a label."""
        if not self.samples or self._labelled != self.samples:
            return None
        return Accuracy(
            reference=self._right_reference / self.samples,
            candidate=self._right_candidate / self.samples,
            drop=(self._right_reference - self._right_candidate) / self.samples,
        )

    def _update_agreement(
        self,
        reference: ClassAnswers,
        candidate_top1: NDArray[np.intp],
        *,
        agree: Bools,
        places: NDArray[np.intp],
    ) -> None:
        rows = np.flatnonzero(~agree)
        self._disagreements += len(rows)
        if not len(rows):
            return
        new = [
            Disagreement(
                sample=int(places[row]),
                reference=int(reference.top1[row]),
                candidate=int(candidate_top1[row]),
                margin=float(reference.margin[row]),
            )
            for row in rows[:LISTED]
        ]
        self._listed = _first(self._listed + new)


def _nan_alike(r: Floats, c: Floats) -> Bools:
    """Rows with NaN, and in the same places on both sides; shape (batch,)."""
    nan_r, nan_c = np.isnan(r), np.isnan(c)
    alike: Bools = nan_r.any(axis=1) & (nan_r == nan_c).all(axis=1)
    return alike


def _same_top(r: Floats, c: Floats, k: int) -> Bools:
    """For each row, whether the sets of the k largest are equal, shape (batch,)."""
    if k == r.shape[1]:
        return np.ones(len(r), np.bool_)
    same: Bools = (_top(r, k) == _top(c, k)).all(axis=1)
    return same


def _top(logits: Floats, k: int) -> Bools:
    """Mask of the k largest of each row; of equals the lowest indices. Linear, without a sort."""
    place = logits.shape[1] - k
    smallest = np.partition(logits, place, axis=1)[:, place, None]
    above = logits > smallest
    ties = logits == smallest
    room = k - above.sum(axis=1, keepdims=True)
    mask: Bools = above | (ties & (ties.cumsum(axis=1) <= room))
    return mask


def _first(listed: list[Disagreement]) -> list[Disagreement]:
    return sorted(listed, key=lambda disagreement: disagreement.sample)[:LISTED]
