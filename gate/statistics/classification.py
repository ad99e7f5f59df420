"""Agreement, confidence, accuracy, operating points, worst samples."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gate.policy.sections import OperatingPoint
from gate.records.outputs import (
    LISTED,
    Accuracy,
    ClassParity,
    Confidence,
    ConfidenceOfClass,
    Crossing,
    Disagreement,
    SideAnswer,
    WorstSample,
)
from gate.statistics.accumulators import KEPT, distances, worse

Floats = NDArray[np.float64]

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class ClassReading:
    """The interpretation of the values of a classification output."""

    normalised: bool = False
    """True if the values are probabilities, so that no softmax is applied."""
    points: tuple[OperatingPoint, ...] = ()


LOGITS = ClassReading()


@dataclass(frozen=True)
class ClassAnswers:
    """The predictions of one side, one row for each sample."""

    values: Floats
    """Values of the output, shape (rows, classes >= 2)."""
    probabilities: Floats
    """Probabilities of the same shape; equal infinite logits share theirs. 0 in `unknown` rows."""
    top1: NDArray[np.intp]
    """Predicted class; the lowest index of equal values."""
    confidence: Floats
    """Largest probability."""
    margin: Floats
    """Largest minus second largest value; 0 for equal infinities and unknown rows."""
    unknown: Bools
    """Mask of the rows without a prediction: with NaN or an infinite probability."""

    @classmethod
    def from_values(cls, values: Floats, *, normalised: bool = False) -> ClassAnswers:
        """Return the answers of these values. `normalised`: they are probabilities, so no
        softmax."""
        rows = np.arange(len(values))
        with np.errstate(all="ignore"):
            top1 = values.argmax(axis=1)
            rest = values.copy()
            rest[rows, top1] = -np.inf
            margin = np.nan_to_num(values[rows, top1] - rest.max(axis=1), posinf=np.inf)
            probabilities = values if normalised else _softmax(values)
            unknown = np.asarray(~np.isfinite(probabilities).all(axis=1))
            if unknown.any():
                probabilities = np.where(unknown[:, None], 0.0, probabilities)
            confidence = probabilities.max(axis=1)
        return cls(values, probabilities, top1, confidence, margin, unknown)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.values)

    def rows(self, mask: Bools) -> ClassAnswers:
        """Return the rows of a mask of shape (rows,)."""
        return ClassAnswers(**{name: array[mask] for name, array in vars(self).items()})

    def row_answer(self, row: int) -> SideAnswer:
        """Return one row in the form of the record."""
        return SideAnswer(
            top1=int(self.top1[row]),
            probability=float(self.confidence[row]),
            margin=float(self.margin[row]),
        )


def _softmax(logits: Floats) -> Floats:
    largest = logits.max(axis=1, keepdims=True)
    # Equal infinities have the difference 0, like other equal logits.
    powers: Floats = np.exp(np.where(logits == largest, 0.0, logits - largest))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers


# Formulas: docs/metrics.md and `gate.records.outputs.Confidence`.


_BAND_EDGES = (0.01, 0.05, 0.10)


def count_by_band(changes: Floats) -> NDArray[np.int64]:
    """Return how many changes of a confidence are below 0.01, below 0.05, up to 0.10, and above."""
    first, second, third = _BAND_EDGES
    within = [int((changes < first).sum()), int((changes < second).sum()),
              int((changes <= third).sum()), len(changes)]  # fmt: skip
    return np.diff(within, prepend=0)


class ConfidenceStatistics:
    """Accumulates max p(c) - max p(r) over samples, by the class that the reference predicts.

    merge is associative and commutative; update(a + b) == update(a).merge(update(b)), up to the
    rounding of float64 sums.
    """

    def __init__(self, classes: int) -> None:
        self.samples = np.zeros(classes, np.int64)
        """Number of samples by the class that the reference predicts."""
        self._changes = np.zeros(classes)
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
        changes = np.where(reference.unknown | candidate.unknown, np.inf, np.abs(signed))
        self._smallest = -worse(-self._smallest, -float(changes.min()))
        self._bands += count_by_band(changes)
        classes = len(self.samples)
        self.samples += np.bincount(reference.top1, minlength=classes)
        for field, weights in (
            ("_changes", changes),
            ("_signed", signed),
            ("_reference", reference.confidence),
            ("_candidate", candidate.confidence),
        ):
            sums = np.bincount(reference.top1, weights=weights, minlength=classes)
            setattr(self, field, getattr(self, field) + sums)
        np.maximum.at(self._largest, reference.top1, changes)

    def merge(self, other: ConfidenceStatistics) -> ConfidenceStatistics:
        """Return the statistics of both streams, which have the same number of classes."""
        merged = ConfidenceStatistics(len(self.samples))
        for field in ("samples", "_changes", "_signed", "_reference", "_candidate", "_bands"):
            setattr(merged, field, getattr(self, field) + getattr(other, field))
        merged._largest = np.maximum(self._largest, other._largest)
        merged._smallest = -worse(-self._smallest, -other._smallest)
        return merged

    def result(self) -> Confidence:
        """Return the record; every number is 0 without samples."""
        count = int(self.samples.sum())
        n = max(count, 1)
        below_1, to_5, to_10, over_10 = (float(band) / n for band in self._bands)
        return Confidence(
            mean=float(self._changes.sum()) / n,
            min=self._smallest if count else 0.0,
            max=float(self._largest.max()),
            bands=(below_1, to_5, to_10, over_10),
            per_class=tuple(map(self._of_class, np.flatnonzero(self.samples).tolist())),
        )

    def _of_class(self, label: int) -> ConfidenceOfClass:
        samples = int(self.samples[label])
        return ConfidenceOfClass(
            label=label,
            samples=samples,
            mean=float(self._changes[label] / samples),
            max=float(self._largest[label]),
            signed_mean=float(self._signed[label] / samples),
            reference_mean=float(self._reference[label] / samples),
            candidate_mean=float(self._candidate[label] / samples),
        )


# Formulas: docs/metrics.md and `gate.records.outputs.Crossing`.


class CrossingStatistics:
    """Counts the samples that are above an operating point on one side only.

    merge is associative and commutative; update(a + b) == update(a).merge(update(b)). A sample
    without a prediction on a side crosses. Crossings that are caused only by a near-tie of two
    classes (`ties` of `result`) are excluded from all counts, like in the agreement.
    """

    def __init__(self, point: OperatingPoint) -> None:
        self.point = point
        self._counts = np.zeros(4, np.int64)
        """Numbers of samples: compared, above in the reference, above in the candidate, crossed."""
        self._listed: list[SampleCrossing] = []
        self._class_changes: list[SampleCrossing] = []
        """Crossings with different classes, which include the near-ties."""

    def update(
        self, reference: ClassAnswers, candidate: ClassAnswers, indices: NDArray[np.intp]
    ) -> None:
        """Add a batch of both sides. indices: those of its samples."""
        threshold, label = self.point
        sides = (reference, candidate)
        with np.errstate(invalid="ignore"):
            above_r, above_c = (side.confidence >= threshold for side in sides)
        compared: Bools = np.ones(len(indices), np.bool_)
        if label is not None:
            in_r, in_c = (side.top1 == label for side in sides)
            above_r, above_c, compared = above_r & in_r, above_c & in_c, in_r | in_c
        is_other_class = reference.top1 != candidate.top1
        unknown = reference.unknown | candidate.unknown
        crossed = compared & (unknown | (above_r != above_c) | (above_r & above_c & is_other_class))
        self._counts += [int(mask.sum()) for mask in (compared, above_r, above_c, crossed)]
        if crossed.any():
            part = CrossingStatistics(self.point)
            rows = np.flatnonzero(crossed)
            part._listed = _entries(rows[: 2 * LISTED], indices, above_r, above_c)
            part._class_changes = _entries(
                rows[is_other_class[rows]][:LISTED], indices, above_r, above_c
            )
            self._take(part)

    def merge(self, other: CrossingStatistics) -> CrossingStatistics:
        """Return the statistics of both streams, at the same point."""
        merged = CrossingStatistics(self.point)
        merged._counts = self._counts + other._counts
        merged._take(self)
        merged._take(other)
        return merged

    def result(self, ties: Collection[int] = ()) -> Crossing:
        """Return the record. ties: near-ties among the first 100 samples with different classes."""
        excused = [entry for entry in self._class_changes if entry.sample in ties]
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
        # Keep twice as many as are listed, because ties are removed at the end.
        self._listed = sorted(self._listed + part._listed)[: 2 * LISTED]
        self._class_changes = sorted(self._class_changes + part._class_changes)[:LISTED]


class SampleCrossing(NamedTuple):
    """A sample that crossed a threshold on one side only."""

    sample: int
    reference: bool
    """True if the reference is above the threshold."""
    candidate: bool


def _entries(
    rows: NDArray[np.intp], indices: NDArray[np.intp], above_r: Bools, above_c: Bools
) -> list[SampleCrossing]:
    columns = (array[rows].tolist() for array in (indices, above_r, above_c))
    return [SampleCrossing(*entry) for entry in zip(*columns, strict=True)]


# Formulas: docs/metrics.md and `gate.records.outputs.ClassParity`.


class ClassStatistics:
    """Accumulates the differences between two float64 logit arrays, shape (batch, classes >= 2).

    merge is associative; update(a + b) == update(a).merge(update(b)), up to the rounding of
    float64 sums.

    On each side the lowest index wins a tie. A tie that is broken differently is a disagreement
    with margin 0, unless `accept_tie` finds that rounding breaks it. A sample with NaN on one side
    only never agrees. A sample with NaN in the same positions on both sides is only counted.
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
        points = (p for p in reading.points if p.label is None or p.label < classes)
        self._crossings = [CrossingStatistics(point) for point in points]
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
        indices = np.arange(start, start + len(reference))
        skipped = _unknown_on_each_side(reference, candidate)
        if skipped.any():
            self._nan_rows += int(skipped.sum())
            reference, candidate = reference.rows(~skipped), candidate.rows(~skipped)
            indices = indices[~skipped]
            labels = None if labels is None else labels[~skipped]
        if not len(reference):
            return
        self.samples += len(reference)
        r, c = reference.values, candidate.values
        comparable = ~(reference.unknown | candidate.unknown)
        with np.errstate(all="ignore"):
            agree = comparable & (reference.top1 == candidate.top1)
            self._update_agreement(reference, candidate.top1, agree=agree, indices=indices)
            self._top5_agreements += int((comparable & _same_top(r, c, min(5, self.classes))).sum())
            squares = np.square(candidate.probabilities - reference.probabilities)
            norms = np.where(comparable, np.sqrt(squares.sum(axis=1)), np.inf)
        self._l2_sum += float(norms.sum())
        self._l2_max = worse(self._l2_max, float(norms.max()))
        self._confidence.update(reference, candidate)
        for crossings in self._crossings:
            crossings.update(reference, candidate, indices)
        if labels is not None:
            self._labelled += len(labels)
            self._right_reference += int(((reference.top1 == labels) & ~reference.unknown).sum())
            self._right_candidate += int(((candidate.top1 == labels) & ~candidate.unknown).sum())

    def merge(self, other: ClassStatistics) -> ClassStatistics:
        """Return the statistics of both streams, which have the same number of classes."""
        merged = ClassStatistics(self.classes, self._reading)
        for field in ("samples", "_nan_rows", "_disagreements", "_unsure", "_sure",
                      "_top5_agreements", "_l2_sum", "_labelled", "_right_reference",
                      "_right_candidate"):  # fmt: skip
            setattr(merged, field, getattr(self, field) + getattr(other, field))
        merged._listed = _classification_first(self._listed + other._listed)
        merged._ties = self._ties | other._ties
        merged._l2_max = worse(self._l2_max, other._l2_max)
        merged._confidence = self._confidence.merge(other._confidence)
        merged._crossings = [
            a.merge(b) for a, b in zip(self._crossings, other._crossings, strict=True)
        ]
        return merged

    def result(self) -> ClassParity:
        """Return the record; shares and means are 0 without samples."""
        n = max(self.samples, 1)
        decided = self.samples - len(self._ties)
        disagreements = self._disagreements - len(self._ties)
        return ClassParity(
            classes=self.classes,
            predicted_classes=int(np.count_nonzero(self._confidence.samples)),
            top1_agreement=(decided - disagreements) / max(decided, 1),
            top1_disagreements=disagreements,
            top1_ties=len(self._ties),
            unsure=self._unsure,
            sure=self._sure,
            top5_agreement=self._top5_agreements / n,
            disagreeing=tuple(self._listed),
            l2_probabilities_mean=self._l2_sum / n,
            l2_probabilities_max=self._l2_max,
            confidence=self._confidence.result(),
            accuracy=self._accuracy(),
            nan_rows=self._nan_rows,
            normalised=self._reading.normalised,
            crossings=tuple(crossings.result(self._ties) for crossings in self._crossings),
        )

    @property
    def doubtful(self) -> list[int]:
        """Return the first 100 samples whose predictions differ."""
        return [disagreement.sample for disagreement in self._listed]

    def accept_tie(self, sample: int, truth: Floats, floor: Floats) -> None:
        """Count a sample as a tie if its predictions differ only by rounding.

        This is the case if the float64 values of both classes differ by less than the errors of two
        correct implementations. truth, floor: shape (1, classes).
        """
        disagreement = next(
            disagreement for disagreement in self._listed if disagreement.sample == sample
        )
        classes = [disagreement.reference, disagreement.candidate]
        margin = float(distances(*truth[0, classes, None])[0])
        if margin <= 2.0 * float(floor[0, classes].max()):
            self._ties.add(sample)

    def update_truth(self, truth: NDArray[np.intp], reference: NDArray[np.intp]) -> None:
        """Add the predictions for a batch in float64 and float32, both of shape (batch,)."""
        same = int((truth == reference).sum())
        self._sure += same
        self._unsure += len(truth) - same

    def _accuracy(self) -> Accuracy | None:
        """Return the accuracy of both sides; None unless every sample has a label."""
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
        indices: NDArray[np.intp],
    ) -> None:
        rows = np.flatnonzero(~agree)
        self._disagreements += len(rows)
        if not len(rows):
            return
        new = [
            Disagreement(
                sample=int(indices[row]),
                reference=int(reference.top1[row]),
                candidate=int(candidate_top1[row]),
                margin=float(reference.margin[row]),
            )
            for row in rows[:LISTED]
        ]
        self._listed = _classification_first(self._listed + new)


def _unknown_on_each_side(r: ClassAnswers, c: ClassAnswers) -> Bools:
    """Return the mask of rows that are unknown on both sides, with NaN in the same positions."""
    same = (np.isnan(r.values) == np.isnan(c.values)).all(axis=1)
    unknown: Bools = r.unknown & c.unknown & same
    return unknown


def _same_top(r: Floats, c: Floats, k: int) -> Bools:
    """Return, for each row, whether the sets of the k largest are equal, shape (batch,)."""
    if k == r.shape[1]:
        return np.ones(len(r), np.bool_)
    same: Bools = (_top(r, k) == _top(c, k)).all(axis=1)
    return same


def _top(logits: Floats, k: int) -> Bools:
    """Return the mask of the k largest values of each row; the lowest indices of equal values.

    It takes linear time, without a sort."""
    index = logits.shape[1] - k
    smallest = np.partition(logits, index, axis=1)[:, index, None]
    above = logits > smallest
    ties = logits == smallest
    room = k - above.sum(axis=1, keepdims=True)
    mask: Bools = above | (ties & (ties.cumsum(axis=1) <= room))
    return mask


def _classification_first(listed: list[Disagreement]) -> list[Disagreement]:
    return sorted(listed, key=lambda disagreement: disagreement.sample)[:LISTED]


class WorstSamples:
    """The samples with the largest numbers of a stream, with the predictions of both sides.

    NaN counts as largest, the first of equal numbers wins, and zeros are ignored. merge is
    associative and commutative; update(a + b) == update(a).merge(update(b)).
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
        """Add values of shape (rows,), which begin with sample `start`.

        answers: predictions of both sides for a classification output."""
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
                reference=answers[0].row_answer(row) if answers else None,
                candidate=answers[1].row_answer(row) if answers else None,
            )
            for row in rows[order[:KEPT]].tolist()
        ]
        self._kept = _worst_first(self._kept + new)

    def merge(self, other: WorstSamples) -> WorstSamples:
        """Return the worst samples of both streams."""
        merged = WorstSamples()
        merged._kept = _worst_first(self._kept + other._kept)
        return merged

    def result(self, *, classes: bool) -> tuple[WorstSample, ...]:
        """Return the records. classes: False if the output is not a classification after all."""
        if classes:
            return tuple(self._kept)
        bare = {"reference": None, "candidate": None, "label": None}
        return tuple(sample.model_copy(update=bare) for sample in self._kept)


def _worst_first(samples: list[WorstSample]) -> list[WorstSample]:
    return sorted(samples, key=_sort_key)[:KEPT]


def _sort_key(sample: WorstSample) -> tuple[bool, float, int]:
    unknown = math.isnan(sample.max_abs_diff)
    return (not unknown, 0.0 if unknown else -sample.max_abs_diff, sample.sample)
