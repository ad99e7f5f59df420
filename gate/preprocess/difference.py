"""Streaming differences of a consumer's tensors from the reference's, in steps (grey levels)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gate.preprocess.spec import PreprocessSpec
from gate.preprocess.tensor import Tensor, channels_last
from gate.records.preprocessing import ChannelDifference, TensorSummary

FIRST = 16
"""Values that are shown of the first picture."""
DIGITS = 3
"""Of a step: below that lies the rounding of float32 normalisation."""


class Range:
    """Smallest, largest and mean value over all tensors, and the first values of the first."""

    def __init__(self) -> None:
        self._min, self._max, self._sum, self._count = math.inf, -math.inf, 0.0, 0
        self._first: tuple[float, ...] = ()

    def update(self, tensor: Tensor) -> None:
        """Take in one picture's tensor. NaN stays visible in all three."""
        values = np.asarray(tensor, dtype=np.float64)
        if not self._count:
            self._first = tuple(float(value) for value in values.ravel()[:FIRST])
        self._min = float(np.minimum(self._min, values.min()))
        self._max = float(np.maximum(self._max, values.max()))
        self._sum += float(values.sum())
        self._count += values.size

    def compute(self) -> TensorSummary:
        """The record; NaN where there was nothing."""
        if not self._count:
            return TensorSummary(min=math.nan, max=math.nan, mean=math.nan)
        mean = self._sum / self._count
        return TensorSummary(min=self._min, max=self._max, mean=mean, first=self._first)


class TensorDifference:
    """abs(tensor - reference) over all pictures; non-finite values are counted, not averaged."""

    def __init__(self, spec: PreprocessSpec) -> None:
        self._spec = spec
        self._steps = np.array(spec.steps)
        self._max = np.zeros(3)
        self._sum = np.zeros(3)
        self._output_max = 0.0
        self._output_sum = 0.0
        self._over = 0
        self.elements = 0
        self.nonfinite = 0

    def update(self, tensor: Tensor, reference: Tensor) -> float:
        """Take in one picture of equal shape and dtype; gives its mean difference in steps."""
        off = np.abs(channels_last(tensor, self._spec) - channels_last(reference, self._spec))
        finite = np.isfinite(off)
        self.nonfinite += int(off.size - finite.sum())
        off = np.where(finite, off, 0.0)
        in_steps = off * self._steps
        self._max = np.maximum(self._max, in_steps.max(axis=(0, 1)))
        self._sum += in_steps.sum(axis=(0, 1))
        self._output_max = max(self._output_max, float(off.max()))
        self._output_sum += float(off.sum())
        self._over += int((np.round(in_steps, DIGITS) > 1.0).sum())
        self.elements += off.size
        return math.inf if not finite.all() else float(in_steps.mean())

    @property
    def max(self) -> float:
        """Largest difference in steps, to a thousandth."""
        return round(float(self._max.max()), DIGITS)

    @property
    def mean(self) -> float:
        """Mean difference in steps."""
        return float(self._sum.sum()) / self.elements

    @property
    def over_one_step(self) -> float:
        """Share of values that are more than a step off."""
        return self._over / self.elements

    @property
    def output(self) -> tuple[float, float]:
        """Largest and mean difference in the tensor's own units."""
        return self._output_max, self._output_sum / self.elements

    @property
    def channels(self) -> tuple[ChannelDifference, ...]:
        """Largest and mean difference of each channel, in the order of the spec's."""
        means: Sequence[float] = (self._sum / (self.elements / 3)).tolist()
        largest: Sequence[float] = np.round(self._max, DIGITS).tolist()
        return tuple(
            ChannelDifference(max=high, mean=mean)
            for high, mean in zip(largest, means, strict=True)
        )
