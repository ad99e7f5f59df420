"""Parity of logits, shape (batch, classes): agreement, probabilities, confidence, accuracy.

Formulas: docs/metrics.md and `gate.records.evidence.ClassParity`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gate.parity.statistics.worst import worse
from gate.records.evidence import Accuracy, ClassParity, Confidence, ConfidenceOfClass, Disagreement

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LISTED = 100
"""Disagreements that are kept one by one; all are counted."""

_BAND_EDGES = (0.01, 0.05, 0.10)


class ClassStatistics:
    """Accumulates the differences between two float64 logit arrays, shape (batch, classes >= 2).

    merge is associative; update(a + b) == update(a).merge(update(b)), up to the rounding of
    float64 sums.

    A tie goes to the lowest index on each side, so a tie that is broken otherwise counts as a
    disagreement with margin 0, unless `look` finds that rounding breaks it. A sample with NaN on
    one side agrees in nothing; one with NaN on both sides in the same places has no answer to
    compare, and is only counted.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.samples = 0
        self._nan_rows = 0
        self._disagreements = 0
        self._ties: set[int] = set()
        self._unsure = self._sure = 0
        self._top5_agreements = 0
        self._listed: list[Disagreement] = []
        self._l2_sum = 0.0
        self._l2_max = 0.0
        self._confidence_min = math.inf
        self._bands = np.zeros(4, np.int64)
        self._class_samples = np.zeros(classes, np.int64)
        self._class_sum = np.zeros(classes)
        self._class_max = np.zeros(classes)
        self._labelled = 0
        self._right_reference = 0
        self._right_candidate = 0

    def update(
        self, r: Floats, c: Floats, *, start: int, labels: NDArray[np.int64] | None = None
    ) -> None:
        """Add a batch whose first row is sample `start`; labels have shape (batch,)."""
        places = np.arange(start, start + len(r))
        alike = _nan_alike(r, c)
        if alike.any():
            self._nan_rows += int(alike.sum())
            r, c, places = r[~alike], c[~alike], places[~alike]
            labels = None if labels is None else labels[~alike]
        if not len(r):
            return
        self.samples += len(r)
        with np.errstate(all="ignore"):
            comparable = ~(np.isnan(r).any(axis=1) | np.isnan(c).any(axis=1))
            top_r, top_c = r.argmax(axis=1), c.argmax(axis=1)
            self._update_agreement(
                r, (top_r, top_c), agree=comparable & (top_r == top_c), places=places
            )
            self._top5_agreements += int((comparable & _same_top(r, c, min(5, self.classes))).sum())
            self._update_probabilities(r, c, top_r)
        if labels is not None:
            self._labelled += len(labels)
            self._right_reference += int(((top_r == labels) & ~np.isnan(r).any(axis=1)).sum())
            self._right_candidate += int(((top_c == labels) & ~np.isnan(c).any(axis=1)).sum())

    def merge(self, other: ClassStatistics) -> ClassStatistics:
        """Statistics of both streams; both have the same number of classes."""
        merged = ClassStatistics(self.classes)
        for field in ("samples", "_nan_rows", "_disagreements", "_unsure", "_sure",
                      "_top5_agreements", "_l2_sum", "_bands", "_class_samples", "_class_sum",
                      "_labelled", "_right_reference", "_right_candidate"):  # fmt: skip
            setattr(merged, field, getattr(self, field) + getattr(other, field))
        merged._listed = _first(self._listed + other._listed)
        merged._ties = self._ties | other._ties
        merged._l2_max = worse(self._l2_max, other._l2_max)
        merged._confidence_min = -worse(-self._confidence_min, -other._confidence_min)
        merged._class_max = np.maximum(self._class_max, other._class_max)
        return merged

    def result(self) -> ClassParity:
        """The record; shares and means are NaN without samples."""
        n = self.samples or math.nan
        decided = self.samples - len(self._ties)
        disagreements = self._disagreements - len(self._ties)
        return ClassParity(
            classes=self.classes,
            predicted_classes=int(np.count_nonzero(self._class_samples)),
            top1_agreement=(decided - disagreements) / (decided or math.nan),
            top1_disagreements=disagreements,
            top1_ties=len(self._ties),
            unsure=self._unsure,
            sure=self._sure,
            top5_agreement=self._top5_agreements / n,
            disagreeing=tuple(self._listed),
            l2_probabilities_mean=self._l2_sum / n,
            l2_probabilities_max=self._l2_max if self.samples else math.nan,
            confidence=self._confidence(n),
            accuracy=self._accuracy(),
            nan_rows=self._nan_rows,
        )

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

    def _confidence(self, n: float) -> Confidence:
        below_1, to_5, to_10, over_10 = (float(count) / n for count in self._bands)
        return Confidence(
            mean=float(self._class_sum.sum()) / n,
            min=self._confidence_min if self.samples else math.nan,
            max=float(self._class_max.max()) if self.samples else math.nan,
            bands=(below_1, to_5, to_10, over_10),
            per_class=tuple(
                ConfidenceOfClass(
                    label=int(label),
                    samples=int(self._class_samples[label]),
                    mean=float(self._class_sum[label] / self._class_samples[label]),
                    max=float(self._class_max[label]),
                )
                for label in np.flatnonzero(self._class_samples)
            ),
        )

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
        r: Floats,
        tops: tuple[NDArray[np.intp], NDArray[np.intp]],
        *,
        agree: Bools,
        places: NDArray[np.intp],
    ) -> None:
        rows = np.flatnonzero(~agree)
        self._disagreements += len(rows)
        rows = rows[:LISTED]
        if not len(rows):
            return
        best = np.partition(r[rows], self.classes - 2, axis=1)[:, -2:]
        margins = best[:, 1] - best[:, 0]
        new = [
            Disagreement(
                sample=int(places[row]),
                reference=int(tops[0][row]),
                candidate=int(tops[1][row]),
                margin=float(margin),
            )
            for row, margin in zip(rows, margins, strict=True)
        ]
        self._listed = _first(self._listed + new)

    def _update_probabilities(self, r: Floats, c: Floats, label: NDArray[np.intp]) -> None:
        p_r, p_c = _softmax(r), _softmax(c)
        norms = np.sqrt(np.square(p_c - p_r).sum(axis=1))
        self._l2_sum += float(norms.sum())
        self._l2_max = worse(self._l2_max, float(norms.max()))
        moved = np.abs(p_c.max(axis=1) - p_r.max(axis=1))
        self._confidence_min = -worse(-self._confidence_min, -float(moved.min()))
        first, second, third = _BAND_EDGES
        inner = [int((moved < first).sum()), int((moved < second).sum())]
        within = int((moved <= third).sum())  # false for NaN, so NaN falls into the last band
        self._bands += [inner[0], inner[1] - inner[0], within - inner[1], len(moved) - within]
        self._class_samples += np.bincount(label, minlength=self.classes)
        self._class_sum += np.bincount(label, weights=moved, minlength=self.classes)
        np.maximum.at(self._class_max, label, moved)


def _nan_alike(r: Floats, c: Floats) -> Bools:
    """Rows with NaN, and in the same places on both sides; shape (batch,)."""
    nan_r, nan_c = np.isnan(r), np.isnan(c)
    alike: Bools = nan_r.any(axis=1) & (nan_r == nan_c).all(axis=1)
    return alike


def _softmax(logits: Floats) -> Floats:
    """Softmax over axis 1; NaN for rows with NaN or +inf."""
    powers: Floats = np.exp(logits - logits.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers


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
