"""What a runtime may say of itself, and what is taken of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gate.runtimes.runtime import count_of, seconds_of

NONE: list[Any] = [None, -1, math.nan, math.inf, -math.inf, "0.1", True, [1], 1j, 10**400]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (15, 15),
        (0, 0),
        (1.5e8, 150_000_000),
        (np.int64(15), 15),
        (np.float32(2.0), 2),
        (1.5, None),
        (np.float64("nan"), None),
        (np.array(3), None),
        *((said, None) for said in NONE),
    ],
)
def test_bytes_are_whole_numbers(said: Any, expected: int | None) -> None:
    found = count_of(said)
    assert found == expected
    assert found is None or type(found) is int


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (0.25, 0.25),
        (1, 1.0),
        (np.float32(0.5), 0.5),
        (np.int8(2), 2.0),
        (0.0, None),
        *((said, None) for said in NONE),
    ],
)
def test_times_are_above_nothing(said: Any, expected: float | None) -> None:
    found = seconds_of(said)
    assert found == expected
    assert found is None or type(found) is float
