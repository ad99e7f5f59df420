"""Single samples and their spread: what a reviewer looks at beside the sums over all samples."""

from __future__ import annotations

from gate.storage.record import Count, Measured, Record, later

LISTED = 100
"""Samples of a kind that are kept one by one; all are counted."""
PER_OCTAVE = 4
"""Bins of a histogram from a number to its double: a value is recorded within a factor of
2^(1/4), 19 %."""
EDGES = (1.0, 1.1875, 1.40625, 1.6875)
"""1, 2^(1/4), 2^(2/4), 2^(3/4), cut to 5 bits of the mantissa, so that the bin of a float64 can be
read from its leading bits: within 0.6 %."""


class Histogram(Record):
    """Sizes of differences, counted in bins of equal ratio: exact counts, whatever the order.

    The bin at place `i` of `counts` holds sizes from 2^((first + i) / 4) up to, without it,
    2^((first + i + 1) / 4), with the edges as `EDGES` has them; sizes below 2^-1022 are in the bin
    that begins there.
    """

    zeros: Count
    first: int = 0
    counts: tuple[Count, ...] = ()
    nonfinite: Count = later(0)
    """NaN and infinite ones."""


class SideAnswer(Record):
    """What one side says of one sample."""

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
