"""Measure models and the corpus on a CUDA device, and propose the bounds on CUDA.

    .venv/bin/python -m benchmarks.cuda                 # on a machine with a device
    .venv/bin/python -m benchmarks.cuda --dry-run       # on the CPU, to test the procedure

Measurements are written to files, so that an interrupted run continues. Exit code 1: something
failed or was left out; 2: no device. docs/cuda.md explains the results. Tests of the same device:
`.venv/bin/python -m pytest -m gpu`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.corpus.outcome import to_json
from benchmarks.cuda.judged import Cell, Proposal, faults_passing, judge, propose
from benchmarks.cuda.measuring import Measurements, plan
from benchmarks.cuda.settings import Device
from gate.commands.progress import progress_bar
from gate.storage import files

Table = list[dict[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    """Measure, write `cuda.json` and `cuda.md`, and return the exit code."""
    options = _parser().parse_args(arguments)
    device = Device(dry=options.dry_run)
    if (reason := device.absent_reason()) is not None:
        print(f"{reason} Nothing was measured. To test the procedure on the CPU: "
              "python -m benchmarks.cuda --dry-run", file=sys.stderr)  # fmt: skip
        return 2
    jobs = plan(options.only, quick=options.quick)
    if not jobs:
        print(f"nothing matches {options.only}; names look like tf32/digits", file=sys.stderr)
        return 2
    device.prepare()
    folder = options.output or Path("build") / ("cuda-dry-run" if device.dry else "cuda")
    measurements = Measurements(folder, device)
    names = [name for job in jobs for name in job.names]
    count = itertools.count(1)
    with progress_bar("cuda", total=len(names)) as advance:
        measurements.measure(
            jobs,
            deadline=time.monotonic() + options.limit_minutes * 60,
            workers=options.jobs,
            report_done=lambda _: advance(next(count), len(names)),
        )
    results = {name: measurements.read(name) for name in names}
    measured = [result for result in results.values() if result is not None]
    left_out = [name for name, result in results.items() if result is None]
    cells = [cell for result in measured for cell in judge(result, device)]
    failed = [f"{cell.name}: {cell.reason}" for cell in cells if cell.status == "failed"]
    proposal = propose(measured, device)
    tables: dict[str, Table] = {
        "matrix": [
            matrix_row(cell, device) for cell in cells if not cell.measured.setting.in_corpus
        ],
        "corpus": [*corpus_rows(cells, device)],
        "distribution": [asdict(spread) for spread in proposal.spreads],
    }
    lists = {
        "objections to the proposal": proposal.objections,
        "faults that no runtime on CUDA rejects": faults_passing(cells),
        "faults that pass by the proposal": proposal.faults_passing,
        "correct files that fail by the proposal": proposal.correct_refused,
        "cells with TF32 that pass by the proposal": proposal.tf32_passing,
        "failed": failed,
        "left out for lack of time": left_out,
    }
    document = {"machine": measurements.machine, **tables, "proposal": proposal.bounds, **lists}
    files.write_text(folder / "cuda.json", json.dumps(to_json(document), indent=1) + "\n")
    files.write_text(
        folder / "cuda.md", "\n".join(format_page(measurements.machine, tables, proposal, lists))
    )
    print(f"{len(measured)} of {len(names)} measured, {len(failed)} failed; "
          f"written: {folder / 'cuda.json'} and {folder / 'cuda.md'}")  # fmt: skip
    return 1 if failed or left_out else 0


def matrix_row(cell: Cell, device: Device) -> dict[str, Any]:
    """Return the numbers of one cell of the matrix; a number that was not measured is None."""
    runtime, numbers = cell.runtime, cell.numbers or {}
    outputs = runtime.outputs if runtime else ()
    classes = [output.classification for output in outputs if output.classification]
    metrics = ("noise_ratio", "noise_peak", "noise_diff", "repeatability_ratio",
               "batch_invariance_ratio", "probe_noise_ratio")  # fmt: skip
    return {
        "model": cell.measured.subject,
        "setting": cell.measured.setting.name,
        "runtime": device.name(cell.role),
        "max_abs_diff": max((output.max_abs_diff for output in outputs), default=None),
        **{name: numbers.get(name) for name in metrics},
        "top1_agreement": min(
            (classification.top1_agreement for classification in classes), default=None
        ),
        "nodes": dict(runtime.nodes_per_provider) if runtime else {},
        "fallback_nodes": len(runtime.fallback_nodes) if runtime else None,
        "median_ms": runtime.latency.median_ms if runtime and runtime.latency else None,
        "verdict": "pass" if cell.passes else f"{cell.status}: {cell.explanation}",
    }


def corpus_rows(cells: Sequence[Cell], device: Device) -> Iterator[dict[str, Any]]:
    """Yield for each runtime how many files of the corpus it judges correctly."""
    cells = [cell for cell in cells if cell.measured.setting.in_corpus]
    for role in dict.fromkeys(cell.role for cell in cells):
        role_cells = [cell for cell in cells if cell.role == role]
        judged_cells = [cell for cell in role_cells if cell.passes or cell.refused]
        yield {
            "runtime": device.name(role),
            "correct": sum(not cell.faulty for cell in judged_cells),
            "correct_refused": [
                c.measured.subject for c in judged_cells if c.refused and not c.faulty
            ],
            "faults": sum(cell.faulty for cell in judged_cells),
            "faults_passing": [c.measured.subject for c in judged_cells if c.passes and c.faulty],
            "not_exported": sum(cell.status == "not exported" for cell in role_cells),
            "failed": sum(cell.status == "failed" for cell in role_cells),
        }


def format_page(
    machine: dict[str, Any],
    tables: dict[str, Table],
    proposal: Proposal,
    lists: dict[str, Sequence[str]],
) -> Iterator[str]:
    """Yield the lines of `cuda.md`."""
    yield "# Measured in a dry run on the CPU" if machine["dry_run"] else "# Measured on CUDA"
    yield f"\n{', '.join(f'{name} {value}' for name, value in machine.items())}\n"
    for title, rows in tables.items():
        yield f"## {title}\n"
        if rows:
            yield f"| {' | '.join(rows[0])} |"
            yield f"|{'---|' * len(rows[0])}"
        for table_row in rows:
            yield f"| {' | '.join(map(_cell, table_row.values()))} |"
        yield ""
    yield "## bounds by the formula\n"
    yield from (f"    {name}={bound:g}," for name, bound in proposal.bounds.items())
    for title, names in lists.items():
        yield f"\n{title}: {len(names)}\n"
        yield from (f"- {name}" for name in names)


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.3g}"
        case list():
            return str(len(value))
        case dict():
            return ", ".join(f"{number} {name}" for name, number in value.items())
    return str(value).replace("|", "/")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.cuda", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--dry-run", action="store_true", help="the CPU in the device's place")
    parser.add_argument("--only", action="append", default=[], metavar="GLOB",
                        help="names, such as 'tf32/*' or 'corpus/*'; may be repeated")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one model, a few files of the corpus")
    parser.add_argument("--limit-minutes", type=float, default=20.0, metavar="N",
                        help="the least important is left out then (20)")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), metavar="N",
                        help="processes that share the corpus (half of the cores)")  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="build/cuda[-dry-run]")
    return parser


if __name__ == "__main__":
    sys.exit(main())
