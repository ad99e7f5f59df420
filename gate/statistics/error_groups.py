"""Errors by column, channel and magnitude, in noise-floor units."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtri

from gate.records.instruments import EPSILON, UNDERFLOW, Side

Floats = NDArray[np.float64]


TRUTH, REFERENCE, CANDIDATE, APART = range(4)
"""Kinds of numbers: r64, r32 - r64, c - r64, c - r32."""

_KINDS = 4

_WIDEST = float(np.finfo(np.float32).max)

_LARGE = 200
"""Exponent of the largest magnitude that is taken as it is: beyond it fourth powers overflow."""

_CLIPPED = 2.0**230
"""Errors count up to here: 2^60 of their fourth powers can be added."""


def representable(truth: NDArray[np.generic], reference: NDArray[np.generic]) -> Floats:
    """Return r64, with r32 where r64 is finite and beyond float32, and r32 is not.

    `torch.finfo(x.dtype).min` is a different number in float64. An infinite r64 stays: there the
    float64 model computes another function (`gate.reference.validity`).
    """
    r64, r32 = np.asarray(truth, np.float64), np.asarray(reference, np.float64)
    beyond = np.isfinite(r64) & (np.abs(r64) > _WIDEST) & (np.abs(r32) <= _WIDEST)
    return np.where(beyond, r32, r64) if beyond.any() else r64


@np.errstate(all="ignore")
def error_kinds(r64: Floats, r32: Floats, c: Floats) -> Floats:
    """Return the four kinds of absolute values, shape (4, ...), small enough for fourth powers.

    All kinds of an element beyond 2^200, which only float64 holds, are divided by the same power of
    two: its errors keep their share of the truth.
    """
    shift = np.minimum(_LARGE - np.frexp(r64)[1], 0)
    if shift.any():
        r64, r32, c = (np.ldexp(array, shift) for array in (r64, r32, c))
    return np.minimum(np.abs(np.stack([r64, r32 - r64, c - r64, c - r32])), _CLIPPED)


@dataclass(frozen=True)
class GroupedErrors:
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
    draws an error comes from, the larger this is relative to the square of its sum."""
    limit: Floats
    """Independent draws at most, shape (groups,)."""

    @classmethod
    def empty(cls, groups: int) -> GroupedErrors:
        """Return errors without any element."""
        kinds = np.zeros((_KINDS, groups))
        return cls(np.zeros(groups), kinds, kinds, kinds, np.zeros(groups))

    @classmethod
    def from_values(cls, values: Floats, counted: NDArray[np.bool_]) -> GroupedErrors:
        """Return the errors for absolute values of shape (4, samples, repeats, groups).

        `counted`, shape (samples, repeats, groups): `values` is zero where it is false. A sample is
        one draw, because its errors have common causes.
        """
        squares = np.square(values).sum(axis=2)
        return cls(
            counted.sum(axis=(0, 1)).astype(np.float64),
            squares.sum(axis=1),
            values.max(axis=(1, 2), initial=0.0),
            np.square(squares).sum(axis=1),
            counted.any(axis=1).sum(axis=0).astype(np.float64),
        )

    @classmethod
    def by_label(cls, values: Floats, labels: NDArray[np.int64], groups: int) -> GroupedErrors:
        """Return the errors for absolute values, shape (4, elements), by group of the element.

        Every element is a draw.
        """
        counts = np.bincount(labels, minlength=groups).astype(np.float64)
        squares = np.square(values)
        sums = [np.bincount(labels, weights=row, minlength=groups) for row in squares]
        fourth = [np.bincount(labels, weights=row * row, minlength=groups) for row in squares]
        peaks = np.zeros((_KINDS, groups))
        for kind, row in enumerate(values):
            np.maximum.at(peaks[kind], labels, row)
        return cls(counts, np.stack(sums), peaks, np.stack(fourth), counts)

    @classmethod
    def middle(cls, tallies: Iterable[GroupedErrors]) -> GroupedErrors:
        """The median of several, number by number."""
        several = list(tallies)
        return cls(*(np.median([getattr(t, name) for t in several], axis=0) for name in _FIELDS))

    def merge(self, other: GroupedErrors) -> GroupedErrors:
        """The tally of both streams, which have the same groups."""
        return GroupedErrors(
            self.counts + other.counts,
            self.sums + other.sums,
            np.maximum(self.peaks, other.peaks),
            self.spread + other.spread,
            self.limit + other.limit,
        )

    def joined(self, stops: NDArray[np.int64]) -> GroupedErrors:
        """One group for each of `stops`: all groups before it."""
        sums = [
            np.concatenate([np.zeros((*a.shape[:-1], 1)), a.cumsum(axis=-1)], axis=-1)[..., stops]
            for a in (self.counts, self.sums, self.spread, self.limit)
        ]
        peaks = np.concatenate([np.zeros((_KINDS, 1)), self.peaks], axis=1)
        return GroupedErrors(
            sums[0], sums[1], np.maximum.accumulate(peaks, axis=1)[:, stops], sums[2], sums[3]
        )

    def rms(self, kind: int) -> Floats:
        """Root of the mean square, shape (groups,); 0 of an empty group."""
        return np.asarray(np.sqrt(self.sums[kind] / np.maximum(self.counts, 1.0)))

    def draws(self, kind: int) -> Floats:
        """Return how many independent normal draws scatter as these errors do, shape (groups,).

        It is 3 (sum e^2)^2 / sum e^4, because of n of them sum e^4 is 3 (sum e^2)^2 / n.
        """
        with np.errstate(all="ignore"):
            ratio = 3.0 * np.square(self.sums[kind]) / self.spread[kind]
            ratio = np.where(np.isnan(ratio), np.inf, ratio)
        return np.asarray(np.clip(ratio, 1.0, np.maximum(self.limit, 1)))


_FIELDS = ("counts", "sums", "peaks", "spread", "limit")


_ALONE = 1.5
"""How many times as far as all together must a column be off to be the one that is named."""

_CHANCE = 1e-4
"""That the largest of all ratios of an output exceeds its scatter, were all errors normal."""

_MOST = 100.0


@dataclass(frozen=True)
class NoiseGroups:
    """Groups of one kind, with the errors of random rounding in the same groups."""

    axis: int
    """Whose indices are the groups, of an output with the samples on axis 0; 0: another kind."""
    name: list[str]
    """Of each group; empty for the whole output."""
    tally: GroupedErrors
    rounding: GroupedErrors | None

    def rms(self, kind: int) -> Floats:
        """Root of the mean square of one kind of error, shape (groups,)."""
        return self.tally.rms(kind)

    @property
    def largest(self) -> Floats:
        """The largest magnitude of the truth, shape (groups,)."""
        return np.asarray(self.tally.peaks[TRUTH])

    def rounding_rms(self) -> Floats:
        """The rms of random rounding, over the elements that count here."""
        if self.rounding is None:
            return np.zeros_like(self.tally.counts)
        counts = np.maximum(self.tally.counts, 1.0)
        return np.asarray(np.sqrt(self.rounding.sums[CANDIDATE] / counts))

    def noise_floor(self, *, peaks: bool) -> Floats:
        """Return the errors that are attributed to no runtime; NaN if one of them is."""
        return self._peak_floor if peaks else self._floor

    @cached_property
    def _peak_floor(self) -> Floats:
        tossed = self.rounding.peaks[CANDIDATE] if self.rounding else np.zeros(len(self.name))
        return self._at_least(self.tally.peaks[TRUTH], self.tally.peaks[REFERENCE], tossed)

    @cached_property
    def _floor(self) -> Floats:
        return self._at_least(self.rms(TRUTH), self.rms(REFERENCE), self.rounding_rms())

    @staticmethod
    def _at_least(truth: Floats, reference: Floats, tossed: Floats) -> Floats:
        least = np.maximum(EPSILON * truth, UNDERFLOW)
        return np.asarray(np.maximum(np.maximum(reference, tossed), least))

    def scatter(self, groups: int) -> Floats:
        """Return by what factor chance may raise a ratio here, by the error that is the floor."""
        return scatter(self._draws, groups)

    @cached_property
    def _draws(self) -> Floats:
        draws = self.tally.draws(REFERENCE)
        if self.rounding is not None:
            larger = self.rounding_rms() > self.rms(REFERENCE)
            draws = np.where(larger, self.rounding.draws(CANDIDATE), draws)
        return draws

    def apart(self) -> float:
        """max|c - r32| over the whole output, in units of the floor and of scatter."""
        return float((self.tally.peaks[APART] / self.noise_floor(peaks=True) / self.scatter(1))[0])

    def ratios(self, groups: int, *, peaks: bool) -> Floats:
        """The runtime's error in units of the floor and of scatter; 0 without any error."""
        error = self.tally.peaks[CANDIDATE] if peaks else self.rms(CANDIDATE)
        with np.errstate(all="ignore"):
            ratio = error / self.noise_floor(peaks=peaks) / self.scatter(groups)
        return np.asarray(np.where(error == 0.0, 0.0, ratio))


def worst_of(
    groups: list[NoiseGroups], count: int, *, peaks: bool
) -> tuple[float, str | None, Side]:
    """Return the largest ratio of `groups`, its position and the closer side there.

    The first group is the whole output. `count`: groups in addition to the whole. A column is named
    where it is so much worse than the rest that it alone makes the ratio.
    """
    places = []
    for group in groups:
        if group.name:
            ratios = group.ratios(1 if group is groups[0] else count, peaks=peaks)
            index = int(ratios.argmax())  # the first NaN, if there is one
            raw = group.rms(CANDIDATE)[index] / group.noise_floor(peaks=False)[index]
            places.append(_WorstGroup(float(ratios[index]), float(raw), group, index))
    worst = max(places, key=lambda place: (math.isnan(place.ratio), place.ratio))
    columns = [place for place in places if place.group.axis and place.raw >= _ALONE * worst.raw]
    named = max(columns, key=lambda place: place.raw, default=worst)
    group, index = named.group, named.place
    side = _closer(group.rms(REFERENCE)[index], group.rms(CANDIDATE)[index])
    return worst.ratio, group.name[index] or None, side


def scatter(draws: Floats, groups: int) -> Floats:
    """Return how far chance raises a ratio of two equal rms in the worst of `groups` groups.

    The ratio of two mean squares of n normal errors follows Fisher's F(n, n); here the floor in the
    denominator is the larger of two such, which is taken as F(n, 2n). The factor is its quantile at
    1 - 1e-4 / groups: 1.03 for 10 000 draws of one group, 1.25 for 320, 2.1 for 32 in each of ten
    columns, 25 for 2. At most 100, however few draws there are.
    """
    quantile = fdtri(draws, 2.0 * draws, 1.0 - _CHANCE / max(groups, 1))
    quantile = np.where(np.isnan(quantile), np.inf, quantile)
    return np.asarray(np.clip(np.sqrt(quantile), 1.0, _MOST))


class _WorstGroup(NamedTuple):
    """The worst of the groups of one kind."""

    ratio: float
    raw: float
    """The ratio as it is, not divided by its scatter."""
    group: NoiseGroups
    place: int


def _closer(reference: float, candidate: float) -> Side:
    if reference == candidate:
        return "neither"
    return "candidate" if candidate < reference else "reference"
