"""What one side answers to a batch: classes, probabilities, margins. Made once for all statistics
that ask for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gate.policy.operating_points import OperatingPoint
from gate.records.samples import SideAnswer

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class ClassReading:
    """How the numbers of an output of classes are read."""

    normalised: bool = False
    """They are probabilities as they are: no softmax is taken."""
    points: tuple[OperatingPoint, ...] = ()


LOGITS = ClassReading()


@dataclass(frozen=True)
class ClassAnswers:
    """Of one side, one row a sample."""

    values: Floats
    """As the output has them, shape (rows, classes >= 2)."""
    probabilities: Floats
    """Of the same shape; NaN where a row has NaN or +inf and a softmax is taken."""
    top1: NDArray[np.intp]
    """Of equals the lowest index."""
    confidence: Floats
    """The largest probability."""
    margin: Floats
    """Largest minus second largest value."""

    @classmethod
    def of(cls, values: Floats, *, normalised: bool = False) -> ClassAnswers:
        """The answers that these values are. `normalised`: no softmax is taken."""
        rows = np.arange(len(values))
        with np.errstate(all="ignore"):
            top1 = values.argmax(axis=1)
            others = values.copy()
            others[rows, top1] = -np.inf
            margin = values[rows, top1] - others.max(axis=1)
            probabilities = values if normalised else _softmax(values)
            confidence = probabilities.max(axis=1)
        return cls(values, probabilities, top1, confidence, margin)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.values)

    def rows(self, kept: Bools) -> ClassAnswers:
        """Those of a mask, shape (rows,)."""
        return ClassAnswers(
            self.values[kept],
            self.probabilities[kept],
            self.top1[kept],
            self.confidence[kept],
            self.margin[kept],
        )

    def of_row(self, row: int) -> SideAnswer:
        """One row, as it is recorded."""
        return SideAnswer(
            top1=int(self.top1[row]),
            probability=float(self.confidence[row]),
            margin=float(self.margin[row]),
        )


def _softmax(logits: Floats) -> Floats:
    powers: Floats = np.exp(logits - logits.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers
