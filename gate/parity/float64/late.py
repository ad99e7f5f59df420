"""Samples beyond those with a float64 truth: which are worst, in units of the floor of the first.

A floor of the first samples is no measure of the largest of all: `exp` of a normal variable gives
values a hundred times larger among enough samples, with errors as much larger. So the floor grows
with the magnitude, and the worst samples are computed again in float64
(`gate.parity.float64.second_look`). More correct samples make no verdict worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gate.parity.float64.noise import chunks
from gate.parity.statistics.groups import Groups
from gate.parity.statistics.output import Array, Span
from gate.parity.statistics.tally import Floats

_Number = TypeVar("_Number", bound=np.generic)

DOUBTFUL = 8.0
"""Units from which on a sample is computed again."""
KEPT = 256
"""Samples whose scores are kept; the next worst one stands for all others."""
_PLAIN = 1e-3
"""A difference, of the sample's largest value, that asks for a second look whatever the floor is:
one sample among the first whose rounding is huge makes a floor that hides everything."""
_MOST_PLAIN = 16


class LateErrors:
    """The worst samples of one output of floats, by their largest error in units of the floor.

    merge is associative; update(a + b) == update(a).merge(update(b)), until a sample is settled.
    """

    def __init__(self, floors: Sequence[Groups], *, axis: int | None = 0) -> None:
        """`floors`: of the samples that have a truth. `axis`: of the samples; None where they have
        none, so that a batch is scored as one."""
        self._floors = floors
        self.axis = axis
        self._scores: dict[int, float] = {}
        self._other = 0.0
        """The largest score of a sample that is not kept."""
        self._plain: dict[int, float] = {}
        """Differences beyond `_PLAIN`, the largest ones."""

    def update(self, reference: Array, candidate: Array, span: Span) -> None:
        """Add a batch of two float arrays of equal shape. What is not finite on one side is left
        to the check `finite`."""
        reference, candidate = np.atleast_1d(reference, candidate)
        for rows in chunks(reference, whole=self.axis != 0):
            apart = _apart(reference[rows], candidate[rows])
            with np.errstate(all="ignore"):
                scores = by_floor(apart, reference[rows], self._floors)
            start = span.start + (rows.start or 0)
            worst = _largest(self._by_sample(scores))
            self._scores.update(enumerate(worst.tolist(), start))
            if self.axis is not None:
                self._keep_plain(self._by_sample(apart), self._by_sample(reference[rows]), start)
        self._keep()

    def merge(self, other: LateErrors) -> LateErrors:
        """Of both streams, `other` of later samples, in units of the same floor."""
        merged = LateErrors(self._floors, axis=self.axis)
        merged._scores = {**self._scores, **other._scores}
        merged._plain = {**self._plain, **other._plain}
        merged._other = max(self._other, other._other)
        merged._keep()
        return merged

    def __getstate__(self) -> dict[str, object]:
        """Without the floors, which whoever takes it has already."""
        return {name: value for name, value in vars(self).items() if name != "_floors"}

    def judged_by(self, floors: Sequence[Groups]) -> None:
        """Give it its floors again."""
        self._floors = floors

    def _keep(self) -> None:
        """The worst ones; of equals the first."""
        if len(self._scores) > KEPT:
            ranked = sorted(self._scores, key=lambda place: (-self._scores[place], place))
            self._other = max(self._other, self._scores[ranked[KEPT]])
            self._scores = {place: self._scores[place] for place in ranked[:KEPT]}
        if len(self._plain) > _MOST_PLAIN:
            ranked = sorted(self._plain, key=lambda place: (-self._plain[place], place))
            self._plain = {place: self._plain[place] for place in ranked[:_MOST_PLAIN]}

    def _keep_plain(self, apart: Floats, reference: Array, start: int) -> None:
        with np.errstate(all="ignore"):
            size = np.where(np.isfinite(reference), np.abs(reference), 0.0)
            shares = _largest(apart) / _largest(size)
        for row in np.flatnonzero(np.isfinite(shares) & (shares > _PLAIN)).tolist():
            self._plain[start + row] = float(shares[row])

    def _by_sample(self, values: NDArray[_Number]) -> NDArray[_Number]:
        return values[None] if self.axis is None else np.moveaxis(values, self.axis, 0)

    @property
    def doubtful(self) -> list[int]:
        """The samples that should be computed again, the worst first."""
        ranked = sorted(self._scores, key=lambda place: (-self._scores[place], place))
        worst = [place for place in ranked if self._scores[place] > DOUBTFUL]
        return list(dict.fromkeys([*worst, *sorted(self._plain)]))

    def settle(self, sample: int, *, by_own: float, by_first: float) -> None:
        """Take what a second look at a sample gave for its score, in units of what rounding makes
        of it. Where it is not plainly off, the floor of the first samples may be the larger one."""
        if sample in self._plain:
            self._scores[sample] = by_own
        elif sample in self._scores:
            self._scores[sample] = min(by_own, by_first)

    @property
    def worst(self) -> float:
        """The largest score of all samples; 0 without any."""
        return max(self._other, *self._scores.values(), 0.0)


def _apart(reference: Array, candidate: Array) -> Floats:
    """|c - r| in float64; 0 where it is not finite."""
    with np.errstate(all="ignore"):
        apart = np.abs(np.subtract(candidate, reference, dtype=np.float64))
    return np.where(np.isfinite(apart), apart, 0.0)


def _largest(values: Floats) -> Floats:
    """Of each row of axis 0; 0 of an empty one."""
    return np.asarray(values.reshape(len(values), -1).max(axis=1, initial=0.0), np.float64)


def by_floor(errors: Floats, values: Array, floors: Sequence[Groups]) -> Floats:
    """Each error in units of the smallest floor of its groups, all of one shape.

    A floor grows with what is larger than all that had it: with the value itself, and with the
    sample, as most of its columns did.
    """
    whole, *columns = floors
    magnitudes = np.abs(values.astype(np.float64))
    smallest = _grown(whole.floor(peaks=True)[0], magnitudes / whole.largest[0])
    for group in columns:
        if values.ndim <= group.axis or values.shape[group.axis] != len(group.name):
            continue
        # A column that was zero in all samples with a truth has no floor of its own.
        empty = group.largest == 0.0
        shape = [1] * values.ndim
        shape[group.axis] = -1
        floor = np.where(empty, whole.floor(peaks=True)[0], group.floor(peaks=True)).reshape(shape)
        growth = magnitudes / np.where(empty, whole.largest[0], group.largest).reshape(shape)
        others = tuple(axis for axis in range(1, values.ndim) if axis != group.axis)
        typical = np.median(growth.max(axis=others, keepdims=True), axis=group.axis, keepdims=True)
        smallest = np.minimum(smallest, _grown(floor, np.maximum(growth, typical)))
    return np.asarray(errors / smallest)


def _grown(floor: Floats, growth: Floats) -> Floats:
    return np.asarray(floor * np.maximum(np.nan_to_num(growth, nan=1.0, posinf=1.0), 1.0))
