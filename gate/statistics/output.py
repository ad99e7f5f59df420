"""Accumulated statistics of one output of one runtime."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gate.records.outputs import OutputParity
from gate.statistics.accumulators import (
    ElementMoments,
    MagnitudeHistogram,
    Variation,
    WorstValue,
    distances,
    worse,
)
from gate.statistics.classification import (
    LOGITS,
    ClassAnswers,
    ClassReading,
    ClassStatistics,
    WorstSamples,
)
from gate.statistics.sample_table import LARGEST, RowStatistics, SampleRows

if TYPE_CHECKING:
    from gate.storage.arrays import OutputArray


Array = NDArray[np.generic]


MAX_KEPT = 100_000
"""Largest number of kept elements; if more differ, none of them counts as a near-tie."""


class IntegerMismatches:
    """Accumulates the elements at which two integer or bool outputs differ.

    merge is associative and commutative.
    """

    def __init__(self) -> None:
        self._kept: dict[int, dict[int, tuple[float, object]]] = {}
        """By sample and flat index in it: |c - r|, and the candidate's value."""
        self._count = 0
        self._excused: list[float] = []
        """|c - r| of each near-tie."""
        self._widths: set[int] = set()
        """Numbers of elements per sample; more than one number if batches differ in shape."""
        self._overflown = False

    def update(
        self, diff: NDArray[np.float64], candidate: NDArray[np.generic], *, start: int
    ) -> None:
        """Add |c - r| and c, shape (samples, elements), whose first row is sample `start`."""
        self._widths.add(diff.shape[1])
        rows, columns = np.nonzero(diff)
        self._count += len(rows)
        if self._count > MAX_KEPT:
            self._overflown = True
            return
        sizes, values = diff[rows, columns].tolist(), candidate[rows, columns].tolist()
        for row, column, size, value in zip(
            rows.tolist(), columns.tolist(), sizes, values, strict=True
        ):
            self._kept.setdefault(start + row, {})[column] = size, value

    def merge(self, other: IntegerMismatches) -> IntegerMismatches:
        """Return the mismatches of both streams."""
        merged = IntegerMismatches()
        merged._kept = {
            s: dict(elements) for s, elements in (*self._kept.items(), *other._kept.items())
        }
        merged._count = self._count + other._count
        merged._excused = self._excused + other._excused
        merged._widths = self._widths | other._widths
        merged._overflown = self._overflown or other._overflown or merged._count > MAX_KEPT
        if merged._overflown:
            merged._kept = {}
        return merged

    @property
    def doubtful(self) -> list[int]:
        """Samples that differ; empty if too many elements differ to be near-ties."""
        return [] if self._overflown else sorted(self._kept)

    def accept_ties(self, sample: int, alternative: Array) -> None:
        """Excuse the elements of a sample in which the candidate equals `alternative`.

        `alternative` is the float64 truth, or a run with random rounding.
        """
        elements = self._kept.get(sample, {})
        if not elements or {alternative.size} != self._widths:
            return
        flat = alternative.reshape(-1)
        ties = [index for index, (_, value) in elements.items() if flat[index].item() == value]
        self._excused += [elements.pop(index)[0] for index in ties]
        if not elements:
            del self._kept[sample]

    def unexplained(self, sample: int) -> int:
        """Return the number of elements of a sample that are not excused."""
        return len(self._kept.get(sample, ()))

    @property
    def excused(self) -> int:
        """Number of near-ties."""
        return len(self.excused_sizes)

    @property
    def excused_sizes(self) -> list[float]:
        """|c - r| of each near-tie."""
        return [] if self._overflown else self._excused

    @property
    def largest(self) -> dict[int, float]:
        """By sample, the largest |c - r| without excused elements."""
        return {
            sample: max(size for size, _ in elements.values())
            for sample, elements in self._kept.items()
        }

    def remaining(self) -> tuple[WorstValue, float, tuple[float, float]]:
        """Return the statistics of the elements that are not excused.

        Returns the worst |c - r|, the sum of |c - r|, and the sum and the maximum of the samples'
        Euclidean norms.
        """
        worst, total = WorstValue(0.0, 0), 0.0
        norms = []
        for sample, elements in self._kept.items():
            sizes = [size for size, _ in elements.values()]
            worst = worst.merge(WorstValue(max(sizes), sample))
            total += sum(sizes)
            norms.append(math.sqrt(sum(size * size for size in sizes)))
        return worst, total, (sum(norms), max(norms, default=0.0))


# Formulas: docs/metrics.md and `gate.records.outputs.OutputParity`.


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Span:
    """The samples of one batch: index of the first, their number, labels of shape (count,)."""

    start: int
    count: int
    labels: NDArray[np.int64] | None = None


class OutputStatistics:
    """Accumulates the differences of one output.

    merge is associative; update(a + b) == update(a).merge(update(b)) up to the rounding of float64
    sums. Merging with an empty accumulator changes nothing.

    An output whose axis 0 is not the batch is compared as a whole: each batch is one row of the L2
    norms, its difference is recorded for the batch's first sample, and all samples of the batch
    count as measured.
    """

    def __init__(self, name: str, dtype: str, reading: ClassReading = LOGITS) -> None:
        self.name = name
        self.dtype = dtype
        self._reading = reading
        self._samples = 0
        self._elements = 0
        self._nonfinite_reference = 0
        self._nonfinite_mismatched = 0
        self._nonfinite_same = 0
        self._unequal = 0
        self._variation = Variation()
        self._finite = ElementMoments()
        self._abs_max = 0.0
        self._worst = WorstValue()
        self._worst_samples = WorstSamples()
        self._sizes = MagnitudeHistogram()
        self._sample_rows = SampleRows()
        self._sum_diff = 0.0
        self._rows = 0
        self._l2_sum = 0.0
        self._l2_max = 0.0
        self._vectors = RowStatistics()
        self.logits: ClassStatistics | None = None
        self.mismatches = IntegerMismatches()
        """Mismatches of integer and bool outputs."""
        self._not_logits = False

    def disable_class_metrics(self) -> None:
        """Do not treat the output as logits, whatever its shape in the batches."""
        self._not_logits = True

    def update(self, reference: OutputArray, candidate: OutputArray, span: Span) -> None:
        """Add one batch: two arrays of equal shape and dtype (bool, int or float)."""
        self._samples += span.count
        batched = reference.ndim > 0 and reference.shape[0] == span.count
        rows = span.count if batched else 1
        if self._variation.same:
            self._variation = self._variation.merge(
                Variation.from_rows(reference.reshape(rows, -1))
            )
        if not reference.size:
            self._not_logits = True
            return
        with np.errstate(all="ignore"):
            r = reference.reshape(rows, -1).astype(np.float64)
            c = candidate.reshape(rows, -1).astype(np.float64)
            self._update_reference(r)
            diff = self._differences(r, c)
            self._finite.update(r, r != c)
            if reference.dtype.kind in "biu":
                unequal = (reference != candidate).reshape(rows, -1)
                self._unequal += int(unequal.sum())
                diff = np.where(unequal, np.maximum(diff, 1.0), diff)
                self.mismatches.update(diff, candidate.reshape(rows, -1), start=span.start)
            largest = self._update_differences(diff, span)
        vectors = batched and reference.dtype.kind == "f" and r.shape[1] >= 2
        if vectors and r.shape[1] <= LARGEST:
            self._vectors.update(r, c)
        answers = None
        if vectors and reference.ndim == 2:
            answers = self._update_logits(r, c, span)
        else:
            self._not_logits = True
        self._worst_samples.update(largest, start=span.start, answers=answers, labels=span.labels)
        if batched:
            self._sample_rows.update(largest, start=span.start, answers=answers, labels=span.labels)

    def merge(self, other: OutputStatistics) -> OutputStatistics:
        """Return the statistics of both streams; `other` covers other samples of the same
        output."""
        merged = OutputStatistics(self.name, self.dtype, self._reading)
        for field in ("_samples", "_elements", "_nonfinite_reference", "_nonfinite_mismatched",
                      "_nonfinite_same", "_unequal", "_sum_diff", "_rows", "_l2_sum"):  # fmt: skip
            setattr(merged, field, getattr(self, field) + getattr(other, field))
        for field in ("_variation", "_finite", "_worst", "_worst_samples", "_sizes",
                      "_sample_rows", "_vectors", "mismatches"):  # fmt: skip
            setattr(merged, field, getattr(self, field).merge(getattr(other, field)))
        merged._abs_max = max(self._abs_max, other._abs_max)
        merged._l2_max = worse(self._l2_max, other._l2_max)
        merged._not_logits = self._not_logits or other._not_logits
        merged.logits = self.logits or other.logits
        if self.logits and other.logits:
            if self.logits.classes == other.logits.classes:
                merged.logits = self.logits.merge(other.logits)
            else:
                merged._not_logits = True
        return merged

    def result(self) -> OutputParity:
        """Return the record. Without elements every number is 0, and so is `elements`."""
        std, worst, total = self._finite.std, self._worst, self._sum_diff
        norms = (self._l2_sum, self._l2_max)
        excused, samples, sizes = self.mismatches.excused, self._worst_samples, self._sizes
        if excused:
            worst, total, norms = self.mismatches.remaining()
            sizes = sizes.without(self.mismatches.excused_sizes)
            samples = WorstSamples()
            for sample, size in self.mismatches.largest.items():
                samples.update(np.array([size]), start=sample)
        scale = std if np.dtype(self.dtype).kind == "f" else 1.0
        return OutputParity(
            name=self.name,
            dtype=self.dtype,
            samples=self._samples,
            elements=self._elements,
            nonfinite_reference=self._nonfinite_reference,
            nonfinite_mismatched=self._nonfinite_mismatched,
            nonfinite_same=self._nonfinite_same,
            unequal=self._unequal - excused if np.dtype(self.dtype).kind in "biu" else None,
            near_ties=excused,
            reference_constant=self._variation.constant(self._samples),
            reference_abs_max=self._abs_max,
            reference_std=std,
            max_abs_diff=worst.value,
            max_abs_diff_sample=worst.sample,
            mean_abs_diff=total / max(self._elements, 1),
            scaled_diff=_scaled(worst.value, self._abs_max if math.isinf(scale) else scale),
            l2_mean=norms[0] / max(self._rows, 1),
            l2_max=norms[1],
            classification=self.logits.result() if self.logits and self.has_classes else None,
            rows=self._vectors.result(),
            differences=sizes.result(),
            worst=samples.result(classes=self.has_classes),
        )

    def drain_rows(self) -> NDArray[np.void]:
        """Return one row per sample since the last call; none if axis 0 is not the batch."""
        rows, self._sample_rows = self._sample_rows.result(), SampleRows()
        return rows

    @property
    def has_classes(self) -> bool:
        """Return whether the output holds class scores."""
        return self.logits is not None and not self._not_logits

    def _update_reference(self, r: Floats) -> None:
        self._elements += r.size
        finite = np.isfinite(r)
        values = r if finite.all() else r[finite]
        self._nonfinite_reference += r.size - values.size
        if values.size:
            self._abs_max = max(self._abs_max, float(np.abs(values).max()))

    def _differences(self, r: Floats, c: Floats) -> Floats:
        """Return `distances`; count values that are NaN or infinite on one side, and NaN on
        both."""
        diff = distances(r, c)
        finite = np.isfinite(r) & np.isfinite(c)
        if not finite.all():
            self._nonfinite_same += int((np.isnan(r) & np.isnan(c)).sum())
            self._nonfinite_mismatched += int((~finite & (diff != 0.0)).sum())
        return diff

    def _update_differences(self, diff: Floats, span: Span) -> Floats:
        """Add the absolute differences of a batch; return the largest of each row."""
        largest: Floats = diff.max(axis=1)
        self._worst = self._worst.merge(WorstValue.from_values(largest, start=span.start))
        self._sizes.update(diff)
        self._sum_diff += float(diff.sum())
        norms = np.sqrt(np.einsum("ij,ij->i", diff, diff))
        overflown = np.isinf(norms) & np.isfinite(largest)
        if overflown.any():
            scale = largest[overflown]
            parts = diff[overflown] / scale[:, None]
            norms[overflown] = scale * np.sqrt(np.einsum("ij,ij->i", parts, parts))
        self._rows += len(norms)
        self._l2_sum += float(norms.sum())
        self._l2_max = worse(self._l2_max, float(norms.max()))
        return largest

    def _update_logits(
        self, r: Floats, c: Floats, span: Span
    ) -> tuple[ClassAnswers, ClassAnswers] | None:
        """Add the class answers of a batch and return them; None if the output has no classes."""
        if self.logits is None:
            self.logits = ClassStatistics(r.shape[1], self._reading)
        if self.logits.classes != r.shape[1]:
            self._not_logits = True
            return None
        reference, candidate = (
            ClassAnswers.from_values(side, normalised=self._reading.normalised) for side in (r, c)
        )
        self.logits.update(reference, candidate, start=span.start, labels=span.labels)
        return reference, candidate


def _scaled(largest: float, scale: float) -> float:
    """Return largest / scale. For a constant reference: 0 if nothing differs, else infinity."""
    if scale > 0.0:
        return largest / scale
    return 0.0 if largest == 0.0 else math.inf
