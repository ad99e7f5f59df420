"""The floor of each group of elements, and the runtime's error in units of it and of scatter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import fdtri

from gate.parity.statistics.tally import APART, CANDIDATE, REFERENCE, TRUTH, Floats, Tally
from gate.records.instruments import EPSILON, UNDERFLOW, Side

_ALONE = 1.5
"""How many times as far as all together must a column be off to be the one that is named."""
_CHANCE = 1e-4
"""That the largest of all ratios of an output exceeds its scatter, were all errors normal."""
_MOST = 100.0


@dataclass(frozen=True)
class Groups:
    """Groups of one kind, with the errors of random rounding in the same groups."""

    axis: int
    """Whose indices are the groups, of an output with the samples on axis 0; 0: another kind."""
    name: list[str]
    """Of each group; empty for the whole output."""
    tally: Tally
    rounding: Tally | None

    def rms(self, kind: int) -> Floats:
        """Root of the mean square of one kind of error, shape (groups,)."""
        return self.tally.rms(kind)

    @property
    def largest(self) -> Floats:
        """The largest magnitude of the truth, shape (groups,)."""
        return np.asarray(self.tally.peaks[TRUTH])

    def tossed(self) -> Floats:
        """The rms of random rounding, over the elements that count here."""
        if self.rounding is None:
            return np.zeros_like(self.tally.counts)
        counts = np.maximum(self.tally.counts, 1.0)
        return np.asarray(np.sqrt(self.rounding.sums[CANDIDATE] / counts))

    def floor(self, *, peaks: bool) -> Floats:
        """The errors that no runtime is blamed for; NaN if one of them is."""
        if peaks:
            tossed = self.rounding.peaks[CANDIDATE] if self.rounding else np.zeros(len(self.name))
            truth, reference = self.tally.peaks[TRUTH], self.tally.peaks[REFERENCE]
        else:
            truth, reference, tossed = self.rms(TRUTH), self.rms(REFERENCE), self.tossed()
        least = np.maximum(EPSILON * truth, UNDERFLOW)
        return np.asarray(np.maximum(np.maximum(reference, tossed), least))

    def scatter(self, groups: int) -> Floats:
        """What chance makes of a ratio here, by the error that is the floor."""
        draws = self.tally.draws(REFERENCE)
        if self.rounding is not None:
            larger = self.tossed() > self.rms(REFERENCE)
            draws = np.where(larger, self.rounding.draws(CANDIDATE), draws)
        return scatter(draws, groups)

    def apart(self) -> float:
        """max|c - r32| over the whole output, in units of the floor and of scatter."""
        return float((self.tally.peaks[APART] / self.floor(peaks=True) / self.scatter(1))[0])

    def ratios(self, groups: int, *, peaks: bool) -> Floats:
        """The runtime's error in units of the floor and of scatter; 0 without any error."""
        error = self.tally.peaks[CANDIDATE] if peaks else self.rms(CANDIDATE)
        with np.errstate(all="ignore"):
            ratio = error / self.floor(peaks=peaks) / self.scatter(groups)
        return np.asarray(np.where(error == 0.0, 0.0, ratio))


def worst_of(groups: list[Groups], count: int, *, peaks: bool) -> tuple[float, str | None, Side]:
    """The largest ratio of `groups`, the whole output first; where it is, and who is closer there.

    `count`: groups beside the whole. A column is named where it is so much worse than the rest that
    it alone makes the ratio.
    """
    places = []
    for group in groups:
        if group.name:
            ratios = group.ratios(1 if group is groups[0] else count, peaks=peaks)
            index = int(ratios.argmax())  # the first NaN, if there is one
            raw = group.rms(CANDIDATE)[index] / group.floor(peaks=False)[index]
            places.append(_Place(float(ratios[index]), float(raw), group, index))
    worst = max(places, key=lambda place: (math.isnan(place.ratio), place.ratio))
    columns = [place for place in places if place.group.axis and place.raw >= _ALONE * worst.raw]
    named = max(columns, key=lambda place: place.raw, default=worst)
    group, index = named.group, named.place
    side = _closer(group.rms(REFERENCE)[index], group.rms(CANDIDATE)[index])
    return worst.ratio, group.name[index] or None, side


def scatter(draws: Floats, groups: int) -> Floats:
    """By what factor a ratio of two rms of equal size exceeds 1 in the worst of `groups` groups.

    The ratio of two mean squares of n normal errors follows Fisher's F(n, n); here the floor below
    it is the larger of two such, which is taken as F(n, 2n). It is its quantile at
    1 - 1e-4 / groups: 1.03 for 10 000 draws of one group, 1.25 for 320, 2.1 for 32 in each of ten
    columns, 25 for 2. At most 100, whatever few draws there are.
    """
    quantile = fdtri(draws, 2.0 * draws, 1.0 - _CHANCE / max(groups, 1))
    return np.asarray(np.clip(np.sqrt(np.nan_to_num(quantile, nan=np.inf)), 1.0, _MOST))


class _Place(NamedTuple):
    """The worst of the groups of one kind."""

    ratio: float
    raw: float
    """The ratio as it is, not divided by its scatter."""
    group: Groups
    place: int


def _closer(reference: float, candidate: float) -> Side:
    if reference == candidate:
        return "neither"
    return "candidate" if candidate < reference else "reference"
