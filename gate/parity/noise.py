"""The noise floor: how far float32 rounding alone moves the outputs (DESIGN 4, `noise_ratio`).

The float64 twin stands for the truth. PyTorch's own float32 error against it is the unit in which
the runtime's error is told: a correct float32 export scores about 1 whatever the model's scale.
Where PyTorch happens to be more exact than it need be, random rounding gives the unit
(`gate.parity.rounding`).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gate.instruments import NoiseParity, Side, noise_floor
from gate.parity.statistics import Array

_LOWEST, _BINADES = -1074, 2100
"""Exponents of float64 (`frexp`), denormal numbers included; zero gets a place of its own."""
_ORDINARY = 10
"""An element is ordinary up to 2^10 times the lower quartile of all magnitudes but zero."""


class NoiseStatistics:
    """Accumulates errors against the float64 truth, by the binade of the truth.

    merge is associative and commutative; update(a + b) == update(a).merge(update(b)), up to the
    rounding of float64 sums.

    The binades are there because a few huge constants, such as a mask of -1e9, would else be the
    scale of everything: the ratio is taken over all elements and again over the ordinary ones.
    """

    def __init__(self) -> None:
        self._samples = 0
        self._counts = np.zeros(_BINADES, np.int64)
        self._sums = np.zeros((3, _BINADES))
        """Sums of squares by binade: of r64, of r32 - r64, of c - r64."""
        self._peaks = np.zeros((3, _BINADES))
        """The largest absolute values of the same."""
        self._broken = False

    def update(self, truth: Array, reference: Array, candidate: Array, *, samples: int) -> None:
        """Add a batch of float arrays of equal shape; `truth` is float64."""
        self._samples += samples
        r64 = truth.astype(np.float64).ravel()
        r32, c = reference.astype(np.float64).ravel(), candidate.astype(np.float64).ravel()
        judged = np.isfinite(r64) & np.isfinite(r32)
        self._broken = self._broken or not bool(np.isfinite(c[judged]).all())
        judged &= np.isfinite(c)
        with np.errstate(all="ignore"):
            values = np.stack([r64, r32 - r64, c - r64])[:, judged]
            places = _binades(values[0])
            self._counts += np.bincount(places, minlength=_BINADES)
            for kind, row in enumerate(np.abs(values)):
                self._sums[kind] += np.bincount(places, weights=row * row, minlength=_BINADES)
                np.maximum.at(self._peaks[kind], places, row)

    def merge(self, other: NoiseStatistics) -> NoiseStatistics:
        """Statistics of both streams."""
        merged = NoiseStatistics()
        merged._samples = self._samples + other._samples
        merged._counts = self._counts + other._counts
        merged._sums = self._sums + other._sums
        merged._peaks = np.maximum(self._peaks, other._peaks)
        merged._broken = self._broken or other._broken
        return merged

    def result(
        self, *, max_abs_diff: float = math.nan, rounding: NoiseStatistics | None = None
    ) -> NoiseParity:
        """The record. Without elements every number is NaN, which no bound lets pass.

        `max_abs_diff`: max|c - r32| over all samples, those without a truth too; where it is not
        known, `diff` is NaN. `rounding`: the same samples with a run under random rounding as the
        candidate.
        """
        sums, peaks = self._with(rounding)
        elements = int(self._counts.sum())
        truth, reference, candidate = (
            np.sqrt(self._sums.sum(axis=1) / elements) if elements else np.full(3, math.nan)
        )
        groups = [slice(None), slice(0, self._ordinary())]
        tossed = rounding.result().candidate_rms if rounding else None
        return NoiseParity(
            samples=self._samples,
            elements=elements,
            truth_rms=float(truth),
            reference_rms=float(reference),
            candidate_rms=float(candidate),
            rounding_rms=tossed,
            ratio=self._worst([self._rms(sums, group) for group in groups]),
            peak=self._worst([peaks[:, group].max(axis=1) for group in groups]),
            diff=self._worst([np.array([*peaks[:3].max(axis=1), max_abs_diff])]),
            closer=_closer(float(reference), float(candidate)),
        )

    def _with(
        self, rounding: NoiseStatistics | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Sums and peaks by binade of r64, r32 - r64, the error of random rounding, c - r64."""
        of = rounding or NoiseStatistics()
        return np.insert(self._sums, 2, of._sums[2], 0), np.insert(self._peaks, 2, of._peaks[2], 0)

    def _rms(self, sums: NDArray[np.float64], group: slice) -> NDArray[np.float64]:
        return np.asarray(np.sqrt(sums[:, group].sum(axis=1) / max(self._counts[group].sum(), 1)))

    def _ordinary(self) -> int:
        """One past the last binade of ordinary elements."""
        counts = np.concatenate([[0], self._counts[1:].cumsum()])
        if not counts[-1]:
            return _BINADES
        quartile = int(np.searchsorted(counts, math.ceil(counts[-1] / 4)))
        return min(quartile + _ORDINARY + 1, _BINADES)

    def _worst(self, groups: list[NDArray[np.float64]]) -> float:
        if not self._counts.sum():
            return math.nan
        if self._broken:
            return math.inf
        ratios = [_in_units(*group) for group in groups]
        return math.nan if any(map(math.isnan, ratios)) else max(ratios)


def _binades(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Zero's own place 0, then the exponents upwards."""
    exponents = np.frexp(values)[1].astype(np.int64)
    return np.where(values == 0.0, 0, exponents - _LOWEST + 2)


def _in_units(truth: float, reference: float, rounding: float, candidate: float) -> float:
    """`candidate` in units of the floor; 0 without any error."""
    if candidate == 0.0:
        return 0.0
    return float(candidate) / noise_floor(float(truth), float(reference), float(rounding))


def _closer(reference: float, candidate: float) -> Side:
    if reference == candidate:
        return "neither"
    return "candidate" if candidate < reference else "reference"
