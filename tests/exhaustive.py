"""What takes an hour by itself: `make exhaustive` runs all of it, `make check` some rows of each table.

Which rows those are does not change from run to run, so that a red one is red again.
"""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

T = TypeVar("T")

EXHAUSTIVE = bool(os.environ.get("GATE_EXHAUSTIVE"))
exhaustive = pytest.mark.skipif(
    not EXHAUSTIVE, reason="an exhaustive proof, which make exhaustive runs"
)


def some(table: dict[str, T], every: int) -> dict[str, T]:
    """The first row and every so-manieth after it; all rows of `make exhaustive`."""
    return table if EXHAUSTIVE else dict(list(table.items())[::every])
