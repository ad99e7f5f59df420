"""Errors by column, channel and magnitude, in noise-floor units."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtri

from gate.records.instruments import EPSILON, UNDERFLOW, Side

Floats = NDArray[np.float64]


TRUTH, REFERENCE, CANDIDATE, DIFFERENCE = range(4)
"""Indices of the four kinds of numbers: r64, r32 - r64, c - r64, c - r32."""

_KINDS = 4

_WIDEST = float(np.finfo(np.float32).max)

_LARGE = 200
"""Exponent of the largest magnitude that is not scaled; fourth powers beyond it overflow."""

_CLIPPED = 2.0**230
"""Maximum error, so that the sum of 2^60 fourth powers does not overflow."""


_CHUNK = 1 << 22
"""Number of elements that are processed together."""


def chunks(array: NDArray[np.generic], *, single: bool = False) -> Iterator[slice]:
    """Yield slices of axis 0 whose float64 copies fit into memory; a `single` one for all."""
    if single:
        yield slice(None)
        return
    step = max(1, _CHUNK * len(array) // max(array.size, 1))
    yield from (slice(start, start + step) for start in range(0, len(array), step))


def representable(truth: NDArray[np.generic], reference: NDArray[np.generic]) -> Floats:
    """Return r64 with r32 in the place of finite numbers beyond float32, if r32 is within float32.

    `torch.finfo(x.dtype).min` is a different number in float64. An infinite r64 is not replaced:
    there the float64 model computes another function (`gate.reference.validity`).
    """
    r64, r32 = np.asarray(truth, np.float64), np.asarray(reference, np.float64)
    beyond = np.isfinite(r64) & (np.abs(r64) > _WIDEST) & (np.abs(r32) <= _WIDEST)
    return np.where(beyond, r32, r64) if beyond.any() else r64


@np.errstate(all="ignore")
def error_kinds(r64: Floats, r32: Floats, c: Floats) -> Floats:
    """Return the four kinds of absolute values, shape (4, ...), small enough for fourth powers.

    All kinds of an element beyond 2^200 are divided by the same power of two, which preserves the
    relative errors.
    """
    shift = np.minimum(_LARGE - np.frexp(r64)[1], 0)
    if shift.any():
        r64, r32, c = (np.ldexp(array, shift) for array in (r64, r32, c))
    return np.minimum(np.abs(np.stack([r64, r32 - r64, c - r64, c - r32])), _CLIPPED)


@dataclass(frozen=True)
class GroupedErrors:
    """Counts, sums of squares and peaks of the four kinds, one column for each group.

    merge is associative and commutative up to the rounding of float64 sums.
    """

    counts: Floats
    """Number of elements, shape (groups,)."""
    sums: Floats
    """Sums of squares, shape (4, groups)."""
    peaks: Floats
    """Largest absolute values, shape (4, groups)."""
    spread: Floats
    """Sums of squares of the contributions of independent draws to `sums`, shape (4, groups). The
    fewer draws contribute to an error, the larger it is relative to the square of the sum."""
    limit: Floats
    """Maximum number of independent draws, shape (groups,)."""

    @classmethod
    def empty(cls, groups: int) -> GroupedErrors:
        """Return errors without any element."""
        kinds = np.zeros((_KINDS, groups))
        return cls(np.zeros(groups), kinds, kinds, kinds, np.zeros(groups))

    @classmethod
    def from_values(cls, values: Floats, counted: NDArray[np.bool_]) -> GroupedErrors:
        """Return the errors for absolute values of shape (4, samples, repeats, groups).

        counted: mask of shape (samples, repeats, groups); other `values` are 0. A sample is one
        draw, because its errors have common causes.
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
        """Return the errors for absolute values of shape (4, elements). labels: the group of each
        element. Every element is a draw.
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
    def median(cls, tallies: Iterable[GroupedErrors]) -> GroupedErrors:
        """Return the element-wise median of several."""
        several = list(tallies)
        return cls(*(np.median([getattr(t, name) for t in several], axis=0) for name in _FIELDS))

    def merge(self, other: GroupedErrors) -> GroupedErrors:
        """Return the errors of both streams, which have the same groups."""
        return GroupedErrors(
            self.counts + other.counts,
            self.sums + other.sums,
            np.maximum(self.peaks, other.peaks),
            self.spread + other.spread,
            self.limit + other.limit,
        )

    def joined(self, stops: NDArray[np.int64]) -> GroupedErrors:
        """Return cumulative groups: for each of `stops`, the union of all groups before it."""
        sums = [
            np.concatenate([np.zeros((*a.shape[:-1], 1)), a.cumsum(axis=-1)], axis=-1)[..., stops]
            for a in (self.counts, self.sums, self.spread, self.limit)
        ]
        peaks = np.concatenate([np.zeros((_KINDS, 1)), self.peaks], axis=1)
        return GroupedErrors(
            sums[0], sums[1], np.maximum.accumulate(peaks, axis=1)[:, stops], sums[2], sums[3]
        )

    def rms(self, kind: int) -> Floats:
        """Return the root mean square, shape (groups,); 0 for an empty group."""
        return np.asarray(np.sqrt(self.sums[kind] / np.maximum(self.counts, 1.0)))

    def draws(self, kind: int) -> Floats:
        """Return the effective number of independent normal draws, shape (groups,).

        It is 3 (sum e^2)^2 / sum e^4, because for n normal draws sum e^4 is 3 (sum e^2)^2 / n.
        """
        with np.errstate(all="ignore"):
            ratio = 3.0 * np.square(self.sums[kind]) / self.spread[kind]
            ratio = np.where(np.isnan(ratio), np.inf, ratio)
        return np.asarray(np.clip(ratio, 1.0, np.maximum(self.limit, 1)))


_FIELDS = ("counts", "sums", "peaks", "spread", "limit")


_MIN_EXCESS = 1.5
"""Minimum ratio of a column's error to the worst group's for the column to be named."""

_CHANCE = 1e-4
"""Probability that the largest ratio of an output exceeds its scatter if all errors are normal."""

_MAX_SCATTER = 100.0


@dataclass(frozen=True)
class NoiseGroups:
    """Groups of one kind, with the errors of random rounding in the same groups."""

    axis: int
    """Axis of the output whose indices are the groups; 0 for another kind of groups."""
    name: list[str]
    """Name of each group; empty for the whole output."""
    tally: GroupedErrors
    rounding: GroupedErrors | None

    @property
    def largest(self) -> Floats:
        """Return the largest magnitude of the truth, shape (groups,)."""
        return np.asarray(self.tally.peaks[TRUTH])

    def rounding_rms(self) -> Floats:
        """Return the rms error of random rounding over the counted elements, shape (groups,)."""
        if self.rounding is None:
            return np.zeros_like(self.tally.counts)
        counts = np.maximum(self.tally.counts, 1.0)
        return np.asarray(np.sqrt(self.rounding.sums[CANDIDATE] / counts))

    def noise_floor(self, *, peaks: bool) -> Floats:
        """Return the noise floor, for which no runtime is at fault; NaN if an error is NaN."""
        return self._peak_floor if peaks else self._floor

    @cached_property
    def _peak_floor(self) -> Floats:
        rounding = self.rounding.peaks[CANDIDATE] if self.rounding else np.zeros(len(self.name))
        return self._at_least(self.tally.peaks[TRUTH], self.tally.peaks[REFERENCE], rounding)

    @cached_property
    def _floor(self) -> Floats:
        return self._at_least(self.tally.rms(TRUTH), self.tally.rms(REFERENCE), self.rounding_rms())

    @staticmethod
    def _at_least(truth: Floats, reference: Floats, rounding: Floats) -> Floats:
        minimum = np.maximum(EPSILON * truth, UNDERFLOW)
        return np.asarray(np.maximum(np.maximum(reference, rounding), minimum))

    def scatter(self, groups: int) -> Floats:
        """Return the factor by which chance may raise a ratio here, from the floor's draws."""
        return scatter(self._draws, groups)

    @cached_property
    def _draws(self) -> Floats:
        draws = self.tally.draws(REFERENCE)
        if self.rounding is not None:
            larger = self.rounding_rms() > self.tally.rms(REFERENCE)
            draws = np.where(larger, self.rounding.draws(CANDIDATE), draws)
        return draws

    def difference(self) -> float:
        """Return max|c - r32| over the whole output in units of floor and scatter."""
        return float(
            (self.tally.peaks[DIFFERENCE] / self.noise_floor(peaks=True) / self.scatter(1))[0]
        )

    def ratios(self, groups: int, *, peaks: bool) -> Floats:
        """Return the runtime's error in units of floor and scatter; 0 without an error."""
        error = self.tally.peaks[CANDIDATE] if peaks else self.tally.rms(CANDIDATE)
        with np.errstate(all="ignore"):
            ratio = error / self.noise_floor(peaks=peaks) / self.scatter(groups)
        return np.asarray(np.where(error == 0.0, 0.0, ratio))


def worst_of(
    groups: list[NoiseGroups], count: int, *, peaks: bool
) -> tuple[float, str | None, Side]:
    """Return the largest ratio of `groups`, the name of its group, and the closer side there.

    The first group is the whole output. count: number of groups in addition to the whole. A column
    is named if it is so much worse than the rest that it causes the ratio.
    """
    candidates = []
    for group in groups:
        if group.name:
            ratios = group.ratios(1 if group is groups[0] else count, peaks=peaks)
            index = int(ratios.argmax())  # the first NaN, if there is one
            raw = group.tally.rms(CANDIDATE)[index] / group.noise_floor(peaks=False)[index]
            candidates.append(_WorstGroup(float(ratios[index]), float(raw), group, index))
    worst = max(candidates, key=lambda each: (math.isnan(each.ratio), each.ratio))
    columns = [c for c in candidates if c.group.axis and c.raw >= _MIN_EXCESS * worst.raw]
    named = max(columns, key=lambda column: column.raw, default=worst)
    group, index = named.group, named.position
    side = _closer(group.tally.rms(REFERENCE)[index], group.tally.rms(CANDIDATE)[index])
    return worst.ratio, group.name[index] or None, side


def scatter(draws: Floats, groups: int) -> Floats:
    """Return the factor by which chance raises a ratio of two equal rms in the worst of the groups.

    The ratio of two mean squares of n normal errors follows Fisher's F(n, n). Here the floor in the
    denominator is the larger of two of them, which is approximated by F(n, 2n). The factor is the
    root of its quantile at 1 - 1e-4 / groups: 1.03 for 10 000 draws in one group, 1.25 for 320, 2.1
    for 32 in each of ten columns, 25 for 2. It is at most 100.
    """
    quantile = fdtri(draws, 2.0 * draws, 1.0 - _CHANCE / max(groups, 1))
    quantile = np.where(np.isnan(quantile), np.inf, quantile)
    return np.asarray(np.clip(np.sqrt(quantile), 1.0, _MAX_SCATTER))


class _WorstGroup(NamedTuple):
    """The worst of the groups of one kind."""

    ratio: float
    raw: float
    """The ratio without division by its scatter."""
    group: NoiseGroups
    position: int


def _closer(reference: float, candidate: float) -> Side:
    if reference == candidate:
        return "neither"
    return "candidate" if candidate < reference else "reference"
