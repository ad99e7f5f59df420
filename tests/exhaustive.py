"""Rows of tables that only some runs take, so that `make test` needs minutes.

`make exhaustive` runs every row: an hour. `make check` leaves out rows of the slowest tables. `make
test` leaves out further rows of all tables in SLOW_FOLDERS. The choice depends on nothing but the
order of the rows: a row that failed is run again. Of each law (a test of Hypothesis), `make test`
draws 20 examples, `make check` 50 and `make exhaustive` 200 (conftest.py).
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


EVERY = 4
"""`make test` runs the first, the last and every fourth row of a table in SLOW_FOLDERS."""

SLOW_FOLDERS = {
    "benchmarks", "commands", "data", "deploy", "export", "golden_vectors", "inferred_roles", "lint",
    "localize", "measure", "metrics", "mlflow_client", "multi_file", "onnx_file", "onnx_reference",
    "pipelines", "probes", "registry", "report", "runtimes", "service",
}  # fmt: skip
"""Each row measures a file, starts a process or writes to a server. 2 400 such rows took 290 s of CPU
time of 2 480 s of the whole suite (2026-11)."""


def mark_further_rows(items: Iterable[pytest.Item]) -> None:
    """Mark the rows that `make test` leaves out with `further`."""
    tables: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        folder = item.nodeid.removeprefix("tests/").partition("/")[0]
        if folder in SLOW_FOLDERS and not item.get_closest_marker("proof"):
            tables.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    for rows in tables.values():
        for place, item in enumerate(rows[:-1]):
            if place % EVERY:
                item.add_marker("further")


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
