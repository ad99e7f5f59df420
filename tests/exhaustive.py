"""What takes an hour by itself: `make exhaustive` runs all of it, `make check` some rows of each table.
And tables of which `make test` runs some rows, and `make check` all.

Which rows those are does not change from run to run, so that a red one is red again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

EXHAUSTIVE = bool(os.environ.get("GATE_EXHAUSTIVE"))
exhaustive = pytest.mark.skipif(
    not EXHAUSTIVE, reason="an exhaustive proof, which make exhaustive runs"
)


def some(table: dict[str, T], every: int) -> dict[str, T]:
    """The first row and every so-manieth after it; all rows of `make exhaustive`."""
    return table if EXHAUSTIVE else dict(list(table.items())[::every])


def further_as_proofs(rows: Iterable[Any], every: int) -> list[Any]:
    """For `parametrize`: the first row and every so-manieth after it as they are; the others are
    proofs. A row of one argument that is a tuple has to be a `pytest.param`."""
    return [
        row
        if place % every == 0
        else pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.proof)
        for place, row in enumerate(rows)
    ]
