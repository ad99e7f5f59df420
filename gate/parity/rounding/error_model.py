"""How far an honest float32 implementation of one operator may be off."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ROUNDING = 0.4247
"""The rms of many roundings, in units: the error is spread evenly over half a unit in the last
place, which is 1 / m units for a mantissa m, and mantissas lie log-uniformly in [1, 2): the root of
(1/3) (1 - 1/4) / (2 ln 2)."""

Terms = Literal[
    "reduced",
    "squares",
    "exponentials",
    "factors",
    "contracted",
    "window",
    "prefix",
    "prefix factors",
    "prefix exponentials",
    "normalized",
    "centred",
    "transform",
]
"""How n terms are counted and what their accumulation makes of the result
(`gate.parity.rounding.sums`)."""


@dataclass(frozen=True)
class ErrorModel:
    """A result y of an argument x may be off by the sum of these parts, in units of 2^-24."""

    relative: float = 1.0
    """Times |y|, spread evenly."""
    absolute: float = 0.0
    """Of 1: the largest error of an approximation that errs absolutely."""
    scaled: float = 0.0
    """Times |x|: the same where the argument is multiplied with such an approximation."""
    terms: Terms | None = None
    """The random walk of accumulating n terms comes on top."""
    range: tuple[float, float] = (-math.inf, math.inf)
    """No implementation leaves it."""
    saturates: bool = False
    """Implementations end beside the ends of the range."""
    overshoot: float = 0.0
    """By so many units the ends of the range are missed outwards, wherever they are reached."""
    below_zero: bool = False
    """The absolute part is there for negative results only; the others are computed otherwise."""
    onnx: str = ""
    """What the exporters make of it; empty: there is no counterpart."""
    source: str = ""
    """The documentation or the measurement that the numbers come from."""

    @property
    def approximated(self) -> bool:
        """True if there is a part that does not shrink with the result."""
        return self.absolute > 0.0 or self.scaled > 0.0

    @property
    def bounded(self) -> bool:
        """True if there is a range."""
        return self.range != (-math.inf, math.inf)
