"""What takes an hour by itself: `make exhaustive` runs all of it, `make check` some rows of each table.
And tables of which `make test` runs some rows, and `make check` all.

Which rows those are does not change from run to run, so that a red one is red again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

EXHAUSTIVE = bool(os.environ.get("GATE_EXHAUSTIVE"))
exhaustive = pytest.mark.skipif(
    not EXHAUSTIVE, reason="an exhaustive proof, which make exhaustive runs"
)


FURTHER = 8
"""Of a table's rows that are proofs, `make check` runs the first and every so-manieth after it."""


def leave_out(items: Iterable[pytest.Item]) -> None:
    """Leaves to `make exhaustive` what the mark `rows` and FURTHER say. A test all of whose rows are
    proofs keeps them: such a table is one to choose from by hand."""
    rows: Counter[tuple[Path, str]] = Counter()
    for item in items:
        call, chosen = getattr(item, "callspec", None), item.get_closest_marker("rows")
        if call is None or not (chosen or any(mark.name == "proof" for mark in call.marks)):
            continue
        every = chosen.args[0] if chosen else FURTHER
        rows[test := (item.path, item.nodeid.partition("[")[0])] += 1
        if (rows[test] - 1) % every:
            item.add_marker("proof")
            item.add_marker(exhaustive)


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
