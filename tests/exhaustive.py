"""Select the rows of parametrized tests, so that `make test` takes minutes.

`make exhaustive` runs every row in about an hour. `make check` omits rows of the slowest tables.
`make test` omits more rows of all tables in SLOW_FOLDERS. The selection depends only on the order of
the rows, so that a failed row is run again. Hypothesis draws 12 examples in `make test`, 30 in `make
check` and 200 in `make exhaustive` (conftest.py).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

EXHAUSTIVE = bool(os.environ.get("GATE_EXHAUSTIVE"))
exhaustive = pytest.mark.skipif(
    not EXHAUSTIVE, reason="an exhaustive proof, which make exhaustive runs"
)


PROOF_STRIDE = 12
"""`make check` runs every N-th row of a table of proofs, starting with the first."""


FURTHER_STRIDE = 6
"""`make test` runs every sixth row of a table in SLOW_FOLDERS, starting with the first."""

SLOW_FOLDERS = {
    "benchmarks", "commands", "data", "deploy", "distributed", "export", "frozen",
    "golden_vectors", "inferred_roles", "ledger", "lint", "localize", "measure", "mend", "metrics",
    "mlflow_client", "model", "multi_file", "onnx_file", "onnx_reference", "pipelines", "preprocess",
    "probes", "registry", "report", "runtimes", "sandbox", "service", "state",
}  # fmt: skip
"""Folders whose rows measure a file, start a process or write to a server. 2 400 such rows took 290 s
of the suite's 2 480 s of CPU time (2026-11)."""


def mark_further_rows(items: Iterable[pytest.Item]) -> None:
    """Mark the rows that `make test` omits as `further`."""
    tables: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        folder = item.nodeid.removeprefix("tests/").partition("/")[0]
        if folder in SLOW_FOLDERS and not item.get_closest_marker("proof"):
            tables.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    for rows in tables.values():
        for index, item in enumerate(rows):
            if index % FURTHER_STRIDE:
                item.add_marker("further")


def skip_rows(items: Iterable[pytest.Item]) -> None:
    """Skip rows by the mark `rows` and by FURTHER, unless `make exhaustive` runs.

    If a whole test is a proof, all its rows run.
    """
    rows: Counter[tuple[Path, str]] = Counter()
    for item in items:
        call, chosen = getattr(item, "callspec", None), item.get_closest_marker("rows")
        if call is None or not (chosen or any(mark.name == "proof" for mark in call.marks)):
            continue
        every = chosen.args[0] if chosen else PROOF_STRIDE
        rows[test := (item.path, item.nodeid.partition("[")[0])] += 1
        if (rows[test] - 1) % every:
            item.add_marker("proof")
            item.add_marker(exhaustive)


def select_rows(table: dict[str, T], every: int) -> dict[str, T]:
    """Return every N-th row starting with the first; in `make exhaustive`, all rows."""
    return table if EXHAUSTIVE else dict(list(table.items())[::every])


def for_each(rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Run a quick test for all rows as one test; the note of a failure names the row.

    Each row of `parametrize` takes 10 ms of CPU time in addition to its test.
    """
    rows = list(rows)

    def joined(test: Callable[..., None]) -> Callable[[], None]:
        def run() -> None:
            assert rows
            for row in rows:
                try:
                    test(row)
                except BaseException as error:
                    error.add_note(f"row: {row}")
                    raise

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return run

    return joined


def further_as_proofs(rows: Iterable[Any], every: int) -> list[Any]:
    """Return rows for `parametrize`: all but every N-th row, starting with the first, become proofs.

    A row with a single tuple argument must be a `pytest.param`.
    """
    return [
        row
        if index % every == 0
        else pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.proof)
        for index, row in enumerate(rows)
    ]
