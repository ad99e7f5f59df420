"""The noise floor: how far float32 rounding alone moves the outputs.

Formulas: docs/metrics.md, `noise_ratio`.

The float64 reference stands for the truth. PyTorch's own float32 error against it is the unit in
which the runtime's error is told: a correct float32 export scores about 1 whatever the model's
scale. Where PyTorch happens to be more exact than it need be, random rounding gives the unit
(`gate.parity.rounding.rounding`). Every column has a unit of its own: sums of money say nothing
about the probability beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from gate.parity.statistics.groups import Groups, worst_of
from gate.parity.statistics.output import Array
from gate.parity.statistics.tally import CANDIDATE, REFERENCE, TRUTH, Floats, Tally
from gate.records.instruments import NoiseParity

_LOWEST, _BINADES = -160, 320
"""Exponents (`frexp`) between which binades are told apart; zero has a place of its own below."""
_CHUNK = 1 << 22
"""Elements that are looked at together."""
_ORDINARY = 10
"""An element is ordinary up to 2^10 times a low quantile of all magnitudes but zero."""
_SHORT = 64
"""Indices of an axis between axis 1 and the last one: anchors, corners, the parts of a box."""
_QUANTILES = (1 / 256, 1 / 64, 1 / 16, 1 / 4)
"""Several, because a mask may fill most of an output."""


class NoiseStatistics:
    """Accumulates errors against the float64 truth, by the binade of the truth and by column.

    merge is associative and commutative; update(a + b) == update(a).merge(update(b)), up to the
    rounding of float64 sums.

    A ratio is taken over all elements, over those up to a few magnitudes, so that huge masks hide
    nothing, and with `columns` over each index of the last axis and of axis 1. Elements that are
    the same number on all sides have no error and give no scale. A ratio of few errors scatters;
    each is divided by what chance alone makes of it (`gate.parity.statistics.groups`).
    """

    def __init__(self, *, columns: bool = False) -> None:
        """`columns`: by index of the last axis and of axis 1, too; axis 0 need not be the samples,
        but an output without it has none."""
        self._samples = 0
        self._elements = 0
        self._broken = False
        self._binades = Tally.empty(_BINADES + 1)
        self._columns: dict[int, Tally | None] | None = None if columns else {}
        """By axis; None: nothing was added yet, or that axis has no constant length."""

    def update(self, truth: Array, reference: Array, candidate: Array, *, samples: int) -> None:
        """Add a batch of float arrays of equal shape; `truth` is float64."""
        self._samples += samples
        batched = bool(truth.ndim) and len(truth) == samples
        truth, reference, candidate = np.atleast_1d(truth, reference, candidate)
        for rows in chunks(truth, whole=not batched):
            self._add(truth[rows], reference[rows], candidate[rows], batched=batched)

    def _add(self, truth: Array, reference: Array, candidate: Array, *, batched: bool) -> None:
        r64, r32, c = (np.asarray(a, np.float64) for a in (truth, reference, candidate))
        judged = np.isfinite(r64) & np.isfinite(r32)
        self._broken = self._broken or not bool(np.isfinite(c[judged]).all())
        judged &= np.isfinite(c)
        self._elements += int(judged.sum())
        with np.errstate(all="ignore"):
            counted = judged & ~((r64 == r32) & (r32 == c))
            values = np.abs(np.stack([r64, r32 - r64, c - r64, c - r32]))
        values[:, ~counted] = 0.0
        flat = values[:, counted]
        self._binades = self._binades.merge(
            Tally.by_label(flat, _binades(flat[TRUTH]), _BINADES + 1)
        )
        self._update_columns(values, counted, batched=batched)

    def merge(self, other: NoiseStatistics) -> NoiseStatistics:
        """Statistics of both streams."""
        merged = NoiseStatistics()
        merged._samples = self._samples + other._samples
        merged._elements = self._elements + other._elements
        merged._broken = self._broken or other._broken
        merged._binades = self._binades.merge(other._binades)
        if self._columns is None or other._columns is None:
            merged._columns = self._columns if other._columns is None else other._columns
        else:
            merged._columns = {
                axis: _merged(self._columns.get(axis), other._columns.get(axis))
                for axis in {*self._columns, *other._columns}
            }
        return merged

    @classmethod
    def middle(cls, draws: Sequence[NoiseStatistics]) -> NoiseStatistics:
        """The median of several about the same samples, so that what is rare widens nothing."""
        middle = cls()
        middle._samples, middle._elements = draws[0]._samples, draws[0]._elements
        middle._binades = Tally.middle(draw._binades for draw in draws)
        kept: dict[int, Tally | None] = {}
        for axis in draws[0]._columns or {}:
            tallies = [(draw._columns or {}).get(axis) for draw in draws]
            whole = [tally for tally in tallies if tally is not None]
            kept[axis] = Tally.middle(whole) if len(whole) == len(tallies) else None
        middle._columns = kept
        return middle

    def result(
        self, *, diff: float | None = None, rounding: NoiseStatistics | None = None
    ) -> NoiseParity:
        """The record. Without elements every number is NaN, which no bound lets pass.

        `diff`: what late samples show (`gate.parity.float64.late`), in the same units. `rounding`:
        the same samples with a run under random rounding as the candidate.
        """
        if not self._elements:
            return _nothing(self._samples)
        groups = list(self._groups(rounding))
        whole = groups[0]
        count = sum(len(group.name) for group in groups[1:])
        ratio, place, side = worst_of(groups, count, peaks=False)
        peak, _, _ = worst_of(groups, count, peaks=True)
        apart = whole.apart() if diff is None else diff
        if self._broken:
            ratio = peak = math.inf
        return NoiseParity(
            samples=self._samples,
            elements=self._elements,
            truth_rms=float(whole.rms(TRUTH)[0]),
            reference_rms=float(whole.rms(REFERENCE)[0]),
            candidate_rms=float(whole.rms(CANDIDATE)[0]),
            rounding_rms=None if whole.rounding is None else float(whole.tossed()[0]),
            scatter=float(whole.scatter(1)[0]),
            group=place,
            floor_peak=float(whole.floor(peaks=True)[0]),
            ratio=ratio,
            peak=peak,
            diff=math.inf if self._broken else apart,
            closer=side,
        )

    def floors(self, rounding: NoiseStatistics | None = None) -> list[Groups]:
        """The whole output, and each axis that is grouped; empty without elements."""
        return list(self._groups(rounding, ordinary=False)) if self._elements else []

    def _update_columns(self, values: Floats, counted: NDArray[np.bool_], *, batched: bool) -> None:
        if not values.size:
            return
        if self._columns == {} or (not batched and values.ndim < 3):
            self._columns = {}
            return
        axes = _axes(values.shape[1:])
        if self._columns is None:
            self._columns = {
                axis: Tally.empty(values.shape[axis + 1]) for axis in axes if values.shape[axis + 1]
            }
        for axis, tally in self._columns.items():
            arranged = np.stack([_arranged(kind, axis) for kind in values])
            part = Tally.by_place(arranged, np.asarray(_arranged(counted, axis), np.bool_))
            self._columns[axis] = _merged(tally, part)

    def _groups(
        self, rounding: NoiseStatistics | None, *, ordinary: bool = True
    ) -> Iterator[Groups]:
        """The whole first."""
        tossed = rounding._binades if rounding else None
        stops = np.array([_BINADES + 1])
        yield Groups(0, [""], self._binades.joined(stops), tossed and tossed.joined(stops))
        if ordinary:
            stops = self._ordinary()
            names = [f"values up to {2.0 ** (stop + _LOWEST - 1):.2g}" for stop in stops]
            yield Groups(0, names, self._binades.joined(stops), tossed and tossed.joined(stops))
        last = max(self._columns or {}, default=0)
        for axis, tally in (self._columns or {}).items():
            if tally is not None:
                also = (rounding._columns or {}).get(axis) if rounding else None
                word = {1: "channel", last: "column"}.get(axis, f"axis {axis}, index")
                names = [f"{word} {place}" for place in range(len(tally.counts))]
                yield Groups(axis, names, tally, also)

    def _ordinary(self) -> NDArray[np.int64]:
        """One past the last binade of ordinary elements, for each quantile."""
        counts = np.concatenate([[0.0], self._binades.counts[1:].cumsum()])
        if not counts[-1]:
            return np.array([], np.int64)
        quantiles = np.searchsorted(counts, np.ceil(counts[-1] * np.array(_QUANTILES)))
        return np.unique(np.minimum(quantiles + _ORDINARY + 1, _BINADES + 1))


def _nothing(samples: int) -> NoiseParity:
    nan = math.nan
    return NoiseParity(
        samples=samples,
        elements=0,
        truth_rms=nan,
        reference_rms=nan,
        candidate_rms=nan,
        ratio=nan,
        peak=nan,
        diff=nan,
        closer="neither",
    )


def _merged(one: Tally | None, other: Tally | None) -> Tally | None:
    if one is None or other is None or len(one.counts) != len(other.counts):
        return None
    return one.merge(other)


def chunks(array: NDArray[np.generic], *, whole: bool = False) -> Iterator[slice]:
    """Slices of axis 0, of so many rows that a few copies in float64 fit; all of it if `whole`."""
    if whole:
        yield slice(None)
        return
    step = max(1, _CHUNK * len(array) // max(array.size, 1))
    yield from (slice(start, start + step) for start in range(0, len(array), step))


def _axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes whose indices are judged one by one: the last, axis 1, and short ones between."""
    rank = len(shape)
    short = [axis for axis in range(2, rank - 1) if shape[axis] <= _SHORT]
    return tuple(dict.fromkeys([rank - 1, 1, *short])) if rank > 1 else ()


def _arranged(array: NDArray[np.generic], axis: int) -> NDArray[np.generic]:
    """As (samples, repeats, length of `axis`)."""
    moved = np.moveaxis(array, axis, -1)
    return moved.reshape(len(array), -1, moved.shape[-1])


def _binades(magnitudes: Floats) -> NDArray[np.int64]:
    """Zero's own place 0, then the exponents upwards."""
    exponents = np.clip(np.frexp(magnitudes)[1].astype(np.int64) - _LOWEST, 1, _BINADES)
    return np.where(magnitudes == 0.0, 0, exponents)
