"""Errors of one output, added up by group: by column, by channel, by magnitude."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TRUTH, REFERENCE, CANDIDATE, APART = range(4)
"""Kinds of numbers: r64, r32 - r64, c - r64, c - r32."""
_KINDS = 4


@dataclass(frozen=True)
class Tally:
    """Counts, sums of squares and peaks of the four kinds, one column a group.

    merge is associative and commutative up to the rounding of float64 sums.
    """

    counts: Floats
    """Elements that count, shape (groups,)."""
    sums: Floats
    """Sums of squares, shape (4, groups)."""
    peaks: Floats
    """The largest absolute values, shape (4, groups)."""
    spread: Floats
    """Sums of squares of what each independent draw adds to `sums`, shape (4, groups): the fewer
    draws an error comes from, the larger this is beside the square of its sum."""
    limit: Floats
    """Independent draws at most, shape (groups,)."""

    @classmethod
    def empty(cls, groups: int) -> Tally:
        """Nothing yet."""
        kinds = np.zeros((_KINDS, groups))
        return cls(np.zeros(groups), kinds, kinds, kinds, np.zeros(groups))

    @classmethod
    def by_place(cls, values: Floats, counted: NDArray[np.bool_]) -> Tally:
        """Of absolute values of shape (4, samples, repeats, groups); what is not `counted`, of
        shape (samples, repeats, groups), is zero in `values`. A sample is one draw, because its
        errors have common causes."""
        squares = np.square(values).sum(axis=2)
        return cls(
            counted.sum(axis=(0, 1)).astype(np.float64),
            squares.sum(axis=1),
            values.max(axis=(1, 2), initial=0.0),
            np.square(squares).sum(axis=1),
            counted.any(axis=1).sum(axis=0).astype(np.float64),
        )

    @classmethod
    def by_label(cls, values: Floats, labels: NDArray[np.int64], groups: int) -> Tally:
        """Of absolute values of shape (4, elements), with the group of each element; every element
        is a draw."""
        counts = np.bincount(labels, minlength=groups).astype(np.float64)
        squares = np.square(values)
        sums = [np.bincount(labels, weights=row, minlength=groups) for row in squares]
        fourth = [np.bincount(labels, weights=row * row, minlength=groups) for row in squares]
        peaks = np.zeros((_KINDS, groups))
        for kind, row in enumerate(values):
            np.maximum.at(peaks[kind], labels, row)
        return cls(counts, np.stack(sums), peaks, np.stack(fourth), counts)

    @classmethod
    def middle(cls, tallies: Iterable[Tally]) -> Tally:
        """The median of several, number by number."""
        several = list(tallies)
        return cls(*(np.median([getattr(t, name) for t in several], axis=0) for name in _FIELDS))

    def merge(self, other: Tally) -> Tally:
        """The tally of both streams, which have the same groups."""
        return Tally(
            self.counts + other.counts,
            self.sums + other.sums,
            np.maximum(self.peaks, other.peaks),
            self.spread + other.spread,
            self.limit + other.limit,
        )

    def joined(self, stops: NDArray[np.int64]) -> Tally:
        """One group for each of `stops`: all groups before it."""
        sums = [
            np.concatenate([np.zeros((*a.shape[:-1], 1)), a.cumsum(axis=-1)], axis=-1)[..., stops]
            for a in (self.counts, self.sums, self.spread, self.limit)
        ]
        peaks = np.concatenate([np.zeros((_KINDS, 1)), self.peaks], axis=1)
        return Tally(
            sums[0], sums[1], np.maximum.accumulate(peaks, axis=1)[:, stops], sums[2], sums[3]
        )

    def rms(self, kind: int) -> Floats:
        """Root of the mean square, shape (groups,); 0 of an empty group."""
        return np.asarray(np.sqrt(self.sums[kind] / np.maximum(self.counts, 1.0)))

    def draws(self, kind: int) -> Floats:
        """How many independent draws of a normal distribution scatter as these errors do, shape
        (groups,): 3 (sum e^2)^2 / sum e^4, because of n of them sum e^4 is 3 (sum e^2)^2 / n."""
        with np.errstate(all="ignore"):
            ratio = 3.0 * np.square(self.sums[kind]) / self.spread[kind]
        return np.asarray(np.clip(np.nan_to_num(ratio, nan=np.inf), 1.0, np.maximum(self.limit, 1)))


_FIELDS = ("counts", "sums", "peaks", "spread", "limit")
