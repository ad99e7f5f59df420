"""Compare records that may differ by the rounding of float64 sums."""

from __future__ import annotations

from typing import Any

import pytest


def assert_close(left: Any, right: Any) -> None:
    """Assert that two dumped records are equal: floats to a relative 1e-9, NaN equals NaN."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_close(left[key], right[key])
    elif isinstance(left, tuple):
        assert len(left) == len(right)
        for left_item, right_item in zip(left, right, strict=True):
            assert_close(left_item, right_item)
    elif isinstance(left, float):
        assert left == pytest.approx(right, rel=1e-9, abs=1e-15, nan_ok=True)
    else:
        assert left == right
