"""How far the tensors of one layer are from the model's values: all elements, and in noise."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gate.localisation.values import sketch
from gate.parity.float64.noise import NoiseStatistics
from gate.parity.statistics.output import Array
from gate.records.instruments import NoiseParity


class Deviation:
    """One tensor against one value, over all samples.

    Differences count every element. Noise counts the elements of the sketches, on the first batch,
    on which the float64 reference ran.
    """

    def __init__(self) -> None:
        self.mismatch: str | None = None
        """The first shapes that are not equal, or why there is no tensor."""
        self.failure: str | None = None
        """What the runtime raised in the tensor's place."""
        self.largest = 0.0
        """max|c - r|; infinite where only one of them is finite."""
        self._sum = 0.0
        self._elements = 0
        self._noise = NoiseStatistics()
        self._compared = False
        self._exact = False
        self.finite = False
        """True if the model has any finite number here."""
        self._scale = 0.0
        self._scale_in_float64 = 0.0

    def update(self, value: Array, tensor: Array) -> None:
        """Add a batch."""
        self.finite = self.finite or bool(np.isfinite(value).any())
        if value.shape != tensor.shape:
            self.mismatch = self.mismatch or f"{tensor.shape} in the file, {value.shape} in PyTorch"
            return
        self._compared = True
        self._exact = value.dtype.kind != "f"
        self._scale = max(self._scale, _magnitude(value))
        apart = _apart(value, tensor)
        self.largest = max(self.largest, float(apart.max(initial=0.0)))
        self._sum += float(apart.sum())
        self._elements += apart.size

    def fail(self, failure: str) -> None:
        """There is no tensor, because the runtime can't compute it."""
        self.failure = failure
        self.mismatch = "no tensor: the runtime fails"

    def update_noise(self, value: Array, tensor: Array, truth: Array | None) -> None:
        """Add the first batch again, with the sketch of what the float64 reference computed.
        Without one the value itself is the truth, and the unit is the rounding of one float32
        operation."""
        if value.shape == tensor.shape and value.dtype.kind == "f":
            sketched = sketch(value)
            true = sketched.astype(np.float64) if truth is None else truth
            self._scale_in_float64 = max(self._scale_in_float64, _magnitude(value))
            self._noise.update(
                true, sketched, sketch(tensor), samples=len(value) if value.ndim else 1
            )

    @property
    def equal(self) -> bool:
        """True if all elements are equal, NaN to NaN."""
        return self._compared and self.mismatch is None and self.largest == 0.0

    @property
    def mean(self) -> float:
        """mean|c - r|; NaN where nothing could be compared."""
        return self._sum / self._elements if self._elements else math.nan

    @property
    def ratio(self) -> float:
        """`noise_ratio`; of integers and bools 0 or infinite."""
        return self._measured(self._record().ratio)

    @property
    def peak(self) -> float:
        """`noise_diff` over all samples; where values are larger than those that the float64
        reference computed, they may be off by more."""
        grown = self._scale / self._scale_in_float64 if self._scale_in_float64 else 1.0
        floor = self._record().floor_peak
        return self._measured(self.largest / grown / floor if floor else math.nan)

    @property
    def relative(self) -> float:
        """rms(c - r64) / rms(r64)."""
        noise = self._record()
        return noise.candidate_rms / noise.truth_rms if noise.truth_rms else math.nan

    def _record(self) -> NoiseParity:
        return self._noise.result()

    def _measured(self, number: float) -> float:
        if self.mismatch is not None or math.isinf(self.largest):
            return math.inf
        if self._exact:
            return 0.0 if self.equal else math.inf
        return 0.0 if self.equal and math.isnan(number) else number  # no finite number, no noise


def _apart(value: Array, tensor: Array) -> NDArray[np.float64]:
    """|tensor - value|; infinite where only one of them is finite, 0 where both are the same NaN
    or infinity."""
    with np.errstate(all="ignore"):
        apart = np.asarray(np.subtract(tensor, value, dtype=np.float64))  # of scalars no array
        np.abs(apart, out=apart)
        if not np.isfinite(apart).all():
            alike = (tensor == value) | (_is_nan(tensor) & _is_nan(value))
            apart = np.where(alike, 0.0, np.where(np.isfinite(apart), apart, math.inf))
    return apart


def _is_nan(array: Array) -> NDArray[np.bool_]:
    nan: NDArray[np.bool_] = np.isnan(array)
    return nan


def _magnitude(value: Array) -> float:
    """max|value| over its finite elements."""
    with np.errstate(all="ignore"):
        largest = max(float(value.max(initial=0)), -float(value.min(initial=0)))
        if not math.isfinite(largest):
            finite = value[np.isfinite(value)].astype(np.float64)
            largest = float(np.abs(finite).max(initial=0.0))
    return largest
