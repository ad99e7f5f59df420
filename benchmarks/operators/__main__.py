"""Measure ONNX Runtime's operators against float64 in units of the gate's error models.

Exit code 0 if no operator exceeds its error model; 1 otherwise; 2 if no operator matches the name.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.operators.case import Case
from benchmarks.operators.composites import composite_cases
from benchmarks.operators.functions import function_cases
from benchmarks.operators.measuring import Row, find_worst, measure
from benchmarks.operators.sums import image_cases, long_sum_cases, product_cases, sum_cases
from gate.reference.error_models import COMPOSITES, DEFAULT, MODELS
from gate.storage import files


def cases(only: str = "*") -> Iterator[Case]:
    """Yield the cases of all operators whose aten name matches."""
    all_cases = chain(
        function_cases(),
        sum_cases(),
        long_sum_cases(),
        product_cases(),
        image_cases(),
        composite_cases(),
    )
    return (case for case in all_cases if fnmatch(case.operator, only))


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, and return the exit code."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    rows = [row for case in cases(options.only) for row in measure(case)]
    if not rows:
        print(f"no operator matches {options.only!r}; names are those of aten", file=sys.stderr)
        return 2
    Console(width=None if sys.stdout.isatty() else 150).print(_table(rows))
    if options.json:
        files.write_text(options.json, json.dumps([row.plain() for row in rows], indent=1) + "\n")
    return 1 if any(row.exceeds for row in rows) else 0


def format_error_model(operator: str) -> str:
    """Return the error model of an operator in short: `5 |y| + 3 + 1 |x| + n reduced`."""
    if operator in COMPOSITES:
        return "its parts"
    model = MODELS.get(operator, DEFAULT)
    parts = [f"{model.relative:g} |y|"]
    parts += [f"{model.absolute:g}"] if model.absolute else []
    parts += [f"{model.scaled:g} |x|"] if model.scaled else []
    parts += [f"n {model.terms}"] if model.terms else []
    return " + ".join(parts)


def _table(rows: list[Row]) -> Table:
    columns = ("operator", "bound (2^-24)", "cases", "rms / floor", "error / bound")
    table = Table(*columns, "ONNX", "where", "runtime", "PyTorch")
    for operator, row in find_worst(rows).items():
        operator_rows = [operator_row for operator_row in rows if operator_row.operator == operator]
        largest = max(
            (
                operator_row.largest
                for operator_row in operator_rows
                if operator_row.largest is not None
            ),
            default=None,
        )
        table.add_row(
            operator, format_error_model(operator), str(len(operator_rows)),
            f"{row.share:.2f}{' !' if row.exceeds else ''}",
            "" if largest is None else f"{largest:.2f}",
            row.onnx, row.label + (", optimized" if row.optimized else ""),
            f"{row.runtime:.3g}", f"{row.own:.3g}",
        )  # fmt: skip
    return table


def _parser() -> argparse.ArgumentParser:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser("python -m benchmarks.operators", description=description)
    parser.add_argument("--only", metavar="GLOB", default="*", help="aten names, such as 'conv*'")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every case with its numbers")
    return parser


if __name__ == "__main__":
    sys.exit(main())
