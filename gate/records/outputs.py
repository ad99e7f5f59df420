"""Statistics of one output and its worst samples."""

from __future__ import annotations

import math
from collections.abc import Iterable

from gate.records.instruments import NoiseParity, StabilityParity
from gate.storage.record import Count, Measured, Record, added_field

LISTED = 100
"""Samples of a kind that are kept one by one; all are counted."""

PER_OCTAVE = 4
"""Bins of a histogram from a number to its double: a value is recorded within a factor of
2^(1/4), 19 %."""

EDGES = (1.0, 1.1875, 1.40625, 1.6875)
"""1, 2^(1/4), 2^(2/4), 2^(3/4), cut to 5 bits of the mantissa, so that the bin of a float64 can be
read from its leading bits: within 0.6 %."""


def largest(numbers: Iterable[float]) -> float | None:
    """Return the largest number, NaN if one is NaN, or None if there are none."""
    values = list(numbers)
    return math.nan if any(map(math.isnan, values)) else max(values, default=None)


class Histogram(Record):
    """Sizes of differences, counted in bins of equal ratio: exact counts, whatever the order.

    The bin at place `i` of `counts` holds sizes from 2^((first + i) / 4) up to, without it,
    2^((first + i + 1) / 4), with the edges as `EDGES` has them; sizes below 2^-1022 are in the bin
    that begins there.
    """

    zeros: Count
    first: int = 0
    counts: tuple[Count, ...] = ()
    nonfinite: Count = added_field(0)
    """NaN and infinite ones."""


class SideAnswer(Record):
    """The answer of one side to one sample."""

    top1: Count
    """Index of the class; of equals the lowest."""
    probability: Measured
    """Its softmax; of the role `probabilities` the value itself."""
    margin: Measured
    """Largest minus second largest value of the output."""


class WorstSample(Record):
    """A sample with one of the largest differences."""

    sample: Count
    max_abs_diff: Measured
    label: Count | None = None
    """The class that is right, where there are labels."""
    reference: SideAnswer | None = None
    """None: no output of classes."""
    candidate: SideAnswer | None = None


class Crossing(Record):
    """Samples whose confidence is at or above an operating point on one side only."""

    threshold: Measured
    label: Count | None = None
    """The predicted class that this point is for; None: all."""
    samples: Count
    """How many were compared: all with an answer; of a point for a class, those that one of both
    sides puts into it. Without near-ties that cross."""
    reference_above: Count
    candidate_above: Count
    crossed: Count
    """Above on one side only, or above on both with another class, or NaN."""
    crossing: tuple[Count, ...] = ()
    """The first hundred of them, by sample."""


# Notation, as in docs/metrics.md: `r` is the output of the PyTorch model in float32 on CPU (the
# reference), `c` the runtime's output, both taken as float64; a sample is one row of axis 0.


class Disagreement(Record):
    """A sample on which argmax differs. `margin` = largest minus second largest reference logit."""

    sample: Count
    reference: Count
    candidate: Count
    margin: Measured


class ConfidenceOfClass(Record):
    """abs(max softmax(c) - max softmax(r)) over the samples that the reference puts in a class."""

    label: Count
    samples: Count
    mean: Measured
    max: Measured
    signed_mean: Measured | None = added_field(None)
    """Mean of max softmax(c) - max softmax(r), with its sign. None: of before it was measured."""
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
    """Top-1 on labels, both sides. `drop` = reference - candidate."""

    reference: Measured
    candidate: Measured
    drop: Measured


class ClassParity(Record):
    """Parity of logits of shape (batch, classes)."""

    classes: Count
    predicted_classes: Count
    """Number of different classes that the reference predicts."""
    top1_agreement: Measured
    """Of the samples without a tie."""
    top1_disagreements: Count
    top1_ties: Count = added_field(0)
    """Samples whose largest elements are equal up to rounding, and whose argmax differs: neither
    agreement nor disagreement."""
    unsure: Count = added_field(0)
    """Samples with a float64 truth whose argmax PyTorch's own rounding to float32 changes."""
    sure: Count = added_field(0)
    """The others of them."""
    top5_agreement: Measured
    """Share of samples with equal sets of the min(5, classes) largest logits."""
    disagreeing: tuple[Disagreement, ...]
    """The first hundred, by sample."""
    l2_probabilities_mean: Measured
    l2_probabilities_max: Measured
    confidence: Confidence
    accuracy: Accuracy | None = None
    nan_rows: Count = added_field(0)
    """Samples with NaN on both sides in the same places: in none of the numbers above."""
    normalised: bool = added_field(False)
    """The values are probabilities as they are, by the role `probabilities`: no softmax was taken.
    Records without it took one of them, too."""
    crossings: tuple[Crossing, ...] = added_field(())
    """One for each operating point of the policy."""


class RowParity(Record):
    """Each sample's row of floats as one vector, and as probabilities as they are, without a
    softmax. The worst over the samples; rows with NaN in the same places on both sides left out."""

    cosine_distance: Measured
    """1 - cos(r, c)."""
    confidence_diff: Measured
    """abs(max(c) - max(r))."""
    bands: tuple[Measured, Measured, Measured, Measured]
    """Shares of samples by that, as in `Confidence`."""
    sum_diff: Measured
    """abs(sum(c) - sum(r))."""
    sum_error: Measured
    """abs(sum(r) - 1)."""


class OutputParity(Record):
    """Parity of one output between the reference and one runtime, over `samples` samples.

    Without elements, and without finite ones where only those count, a number is 0: `elements` and
    `nonfinite_reference` show that nothing was measured. Older records have NaN there.
    """

    name: str
    dtype: str
    samples: Count
    elements: Count
    nonfinite_reference: Count
    """Elements of r that are NaN or infinite."""
    nonfinite_mismatched: Count
    """Elements that are NaN on one side only, or infinite on one side only, or with other sign:
    their difference is infinite. Records without `nonfinite_same` count NaN on both sides here."""
    nonfinite_same: Count = added_field(0)
    """Elements that are NaN on both sides; their difference counts as 0. Whether that is parity,
    the policy says."""
    near_ties: Count = added_field(0)
    """Elements of integers and bools that differ, and that rounding alone moves to what the runtime
    says: they are in none of the numbers here."""
    unequal: Count | None = added_field(None)
    """Elements of integers and bools that differ. None: floats, or of before it was counted."""
    reference_constant: bool
    """True if all samples have the same reference output."""
    reference_abs_max: Measured
    """Over the finite elements of r."""
    reference_std: Measured
    """Standard deviation over the finite elements of r (population)."""
    max_abs_diff: Measured
    max_abs_diff_sample: Count | None
    mean_abs_diff: Measured
    scaled_diff: Measured
    """max_abs_diff / reference_std; of integers and bools max_abs_diff itself, because a class or
    token next to the right one is wrong however many there are."""
    l2_mean: Measured
    l2_max: Measured
    classification: ClassParity | None = None
    rows: RowParity | None = added_field(None)
    """None: no floats of 2 to 65 536 elements a sample, or of before it was measured."""
    noise: NoiseParity | None = added_field(None)
    """None: not measured, for the reason `Evidence.noise_unmeasured`, or no floats."""
    stability: StabilityParity | None = added_field(None)
    differences: Histogram | None = added_field(None)
    """Of abs(c - r) over all elements. None: of before it was measured."""
    worst: tuple[WorstSample, ...] = added_field(())
    """Up to eight samples, the largest difference first."""
