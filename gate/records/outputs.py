"""Statistics of one output and its worst samples."""

from __future__ import annotations

import math
from collections.abc import Iterable

from gate.records.instruments import NoiseParity, StabilityParity
from gate.storage.record import Count, Measured, Record, added_field

LISTED = 100
"""Maximum number of samples of a kind that are listed individually; all are counted."""

PER_OCTAVE = 4
"""Histogram bins per factor of 2, for a resolution of 2^(1/4), 19 %."""

EDGES = (1.0, 1.1875, 1.40625, 1.6875)
"""1, 2^(1/4), 2^(2/4), 2^(3/4), truncated to 5 bits of the mantissa (within 0.6 %), so that the bin
of a float64 follows from its leading bits."""


def largest(numbers: Iterable[float]) -> float | None:
    """Return the largest number, NaN if one is NaN, or None if there are none."""
    values = list(numbers)
    return math.nan if any(map(math.isnan, values)) else max(values, default=None)


class Histogram(Record):
    """A logarithmic histogram of absolute differences, independent of the order of the samples.

    `counts[i]` is the number of values in [2^((first + i) / 4), 2^((first + i + 1) / 4)), with the
    rounded edges `EDGES`. Values below 2^-1022 are in the bin that begins there.
    """

    zeros: Count
    first: int = 0
    counts: tuple[Count, ...] = ()
    nonfinite: Count = added_field(0)
    """Number of NaN and infinite values."""


class SideAnswer(Record):
    """The prediction of one side for one sample."""

    top1: Count
    """Index of the predicted class; for ties the lowest index."""
    probability: Measured
    """Softmax of that class; for the role `probabilities` the value itself."""
    margin: Measured
    """Largest minus second largest value of the output."""


class WorstSample(Record):
    """A sample with one of the largest differences."""

    sample: Count
    max_abs_diff: Measured
    label: Count | None = None
    """True class; None without labels."""
    reference: SideAnswer | None = None
    """None: not a classification output."""
    candidate: SideAnswer | None = None


class Crossing(Record):
    """Samples whose confidence is at or above an operating point on one side only."""

    threshold: Measured
    label: Count | None = None
    """Predicted class to which this point applies; None: all classes."""
    samples: Count
    """Number of compared samples: all with a prediction; for a class, those that one of the sides
    assigns to it. Near-ties that cross are excluded."""
    reference_above: Count
    candidate_above: Count
    crossed: Count
    """Number of samples above on one side only, above on both with different classes, or NaN."""
    crossing: tuple[Count, ...] = ()
    """Indices of the first 100 of these samples."""


# Notation, as in docs/metrics.md: `r` is the output of the PyTorch model in float32 on CPU (the
# reference), `c` the runtime's output, both taken as float64; a sample is one row of axis 0.


class Disagreement(Record):
    """A sample on which argmax differs. `margin` = largest minus second largest reference logit."""

    sample: Count
    reference: Count
    candidate: Count
    margin: Measured


class ConfidenceOfClass(Record):
    """abs(max softmax(c) - max softmax(r)) for samples that the reference assigns to a class."""

    label: Count
    samples: Count
    mean: Measured
    max: Measured
    signed_mean: Measured | None = added_field(None)
    """Mean of max softmax(c) - max softmax(r). None: an older record."""
    reference_mean: Measured | None = added_field(None)
    """Mean of max softmax(r)."""
    candidate_mean: Measured | None = added_field(None)
    """Mean of max softmax(c)."""


class Confidence(Record):
    """abs(max softmax(c) - max softmax(r)) per sample, summarized.

    `bands` are shares of samples: below 0.01, 0.01 to 0.05, 0.05 to 0.10, above 0.10 or NaN.
    """

    mean: Measured
    min: Measured
    max: Measured
    bands: tuple[Measured, Measured, Measured, Measured]
    per_class: tuple[ConfidenceOfClass, ...]


class Accuracy(Record):
    """Top-1 accuracy of both sides. `drop` = reference - candidate."""

    reference: Measured
    candidate: Measured
    drop: Measured


class ClassParity(Record):
    """Parity of logits of shape (batch, classes)."""

    classes: Count
    predicted_classes: Count
    """Number of different classes that the reference predicts."""
    top1_agreement: Measured
    """Share of equal predictions among the samples without a tie."""
    top1_disagreements: Count
    top1_ties: Count = added_field(0)
    """Number of samples whose argmax differs although the largest elements are equal up to
    rounding. They count neither as agreement nor as disagreement."""
    unsure: Count = added_field(0)
    """Number of samples whose argmax differs between PyTorch in float32 and in float64."""
    sure: Count = added_field(0)
    """Number of samples whose argmax is equal in float32 and float64."""
    top5_agreement: Measured
    """Share of samples with equal sets of the min(5, classes) largest logits."""
    disagreeing: tuple[Disagreement, ...]
    """The first 100 samples that disagree."""
    l2_probabilities_mean: Measured
    l2_probabilities_max: Measured
    confidence: Confidence
    accuracy: Accuracy | None = None
    nan_rows: Count = added_field(0)
    """Number of samples with NaN in the same positions on both sides, which are excluded above."""
    normalised: bool = added_field(False)
    """True if the values already are probabilities (role `probabilities`), so that no softmax was
    applied. Older records always applied it."""
    crossings: tuple[Crossing, ...] = added_field(())
    """One for each operating point of the policy."""


class RowParity(Record):
    """Differences of each sample's row of floats as a vector and as probabilities without softmax.

    The numbers are the worst over the samples. Rows with NaN in the same positions on both sides
    are excluded."""

    cosine_distance: Measured
    """1 - cos(r, c)."""
    confidence_diff: Measured
    """abs(max(c) - max(r))."""
    bands: tuple[Measured, Measured, Measured, Measured]
    """Shares of samples by `confidence_diff`, as in `Confidence`."""
    sum_diff: Measured
    """abs(sum(c) - sum(r))."""
    sum_error: Measured
    """abs(sum(r) - 1)."""


class OutputParity(Record):
    """Parity of one output between the reference and one runtime, over `samples` samples.

    If no elements count, the numbers are 0: `elements` and `nonfinite_reference` show that nothing
    was measured. Older records have NaN instead.
    """

    name: str
    dtype: str
    samples: Count
    elements: Count
    nonfinite_reference: Count
    """Number of NaN or infinite elements of r."""
    nonfinite_mismatched: Count
    """Number of elements that are NaN or infinite on one side only, or infinite with another sign.
    Their difference is infinite. Records without `nonfinite_same` also count NaN on both sides."""
    nonfinite_same: Count = added_field(0)
    """Number of elements that are NaN on both sides. Their difference is 0; the policy defines
    whether they are parity."""
    near_ties: Count = added_field(0)
    """Number of integers and bools that differ, but that rounding alone may change to the runtime's
    value. They are excluded from all numbers here."""
    unequal: Count | None = added_field(None)
    """Number of integers and bools that differ. None: floats, or an older record."""
    reference_constant: bool
    """True if all samples have the same reference output."""
    reference_abs_max: Measured
    """Maximum of |r| over its finite elements."""
    reference_std: Measured
    """Population standard deviation of the finite elements of r."""
    max_abs_diff: Measured
    max_abs_diff_sample: Count | None
    mean_abs_diff: Measured
    scaled_diff: Measured
    """max_abs_diff / reference_std; for integers and bools max_abs_diff, because a neighboring
    class or token is wrong whatever their number."""
    l2_mean: Measured
    l2_max: Measured
    classification: ClassParity | None = None
    rows: RowParity | None = added_field(None)
    """None: not floats with 2 to 65 536 elements per sample, or an older record."""
    noise: NoiseParity | None = added_field(None)
    """None: not floats, or not measured because of `Evidence.noise_unmeasured`."""
    stability: StabilityParity | None = added_field(None)
    differences: Histogram | None = added_field(None)
    """Histogram of abs(c - r) over all elements. None: an older record."""
    worst: tuple[WorstSample, ...] = added_field(())
    """Up to eight samples, in descending order of difference."""
