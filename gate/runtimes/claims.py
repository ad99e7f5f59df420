"""What a runtime says of its own time and memory, as plain numbers.

It may say anything: NumPy's numbers, words, nothing. What is none is as if it had said nothing: its
answers are judged, not its words about itself.
"""

from __future__ import annotations

import math
import numbers


def count_of(value: object) -> int | None:
    """Bytes; None for what is no whole number from 0 on."""
    number = _number(value)
    return int(number) if number is not None and number >= 0 and number == int(number) else None


def seconds_of(value: object) -> float | None:
    """None for what is no time above 0."""
    number = _number(value)
    return number if number is not None and number > 0 else None


def _number(value: object) -> float | None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
