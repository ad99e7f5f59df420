"""The summary as Markdown, to go into docs/cuda.md as it is; every line of a dry run says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.cuda.summary import Row, Summary

_MANY = 40
"""Names in a list; more are counted."""


def markdown(summary: Summary) -> str:
    """The whole page."""
    lines = [
        *_machine(summary),
        *_matrix(summary),
        *_corpus(summary),
        *_tests(summary),
        *_distribution(summary),
        *_proposal(summary),
        *_missing(summary),
    ]
    return "\n".join(_marked(line, summary.device.mark) for line in lines) + "\n"


def _machine(summary: Summary) -> Iterator[str]:
    found = summary.identity["device"]
    yield "# What was measured"
    yield ""
    names = ("provider", "gpu", "driver", "cuda", "cudnn", "cpu")
    rows = [(name, found.get(name) or "none") for name in names]
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    yield from _table(("machine", ""), [*rows, ("versions", versions)])


def _matrix(summary: Summary) -> Iterator[str]:
    yield "## The matrix"
    yield ""
    columns = ("model", "setting", "runtime", "max_abs_diff", "noise_ratio", "peak", "diff",
               "top-1", "nodes", "fallback", "median ms", "built-in bounds")  # fmt: skip
    yield from _table(columns, [_matrix_cells(row) for row in summary.matrix()])


def _matrix_cells(row: Row) -> list[str]:
    nodes = ", ".join(
        f"{count} {name.removesuffix('ExecutionProvider')}" for name, count in row["nodes"].items()
    )
    return [
        row["model"],
        row["setting"],
        row["runtime"],
        *(_number(row[name]) for name in ("max_abs_diff", "noise_ratio", "noise_peak",
                                           "noise_diff", "top1_agreement")),
        nodes or "-",
        _number(row["fallback_nodes"]),
        _number(row["median_ms"]),
        "pass" if row["passes"] else f"{row['status']}: {row['why_not']}",
    ]  # fmt: skip


def _corpus(summary: Summary) -> Iterator[str]:
    yield "## The corpus, by the built-in bounds"
    yield ""
    rows = [
        [row["runtime"], *(str(len(row[name]) if isinstance(row[name], list) else row[name])
         for name in ("correct", "correct_refused", "faults", "faults_passing", "not_exported",
                      "failed"))]
        for row in summary.corpus()
    ]  # fmt: skip
    columns = ("runtime", "correct files", "of them refused", "faults", "of them passing",
               "not exported", "failed")  # fmt: skip
    yield from _table(columns, rows)
    refused = {name for row in summary.corpus() for name in row["correct_refused"]}
    yield from _names("Correct files that a runtime refuses", sorted(refused))
    yield from _names("Faults that no runtime on CUDA refuses", summary.escaped())


def _tests(summary: Summary) -> Iterator[str]:
    row = summary.tests_row()
    if row is None:
        return
    yield "## Tests marked `gpu`"
    yield ""
    why = f" ({row['why']})" if row["why"] else ""
    counts = ", ".join(f"{row[name]} {name}" for name in ("passed", "failed", "skipped"))
    yield f"{counts}{why}"
    yield ""
    yield from _names("Not passed", [f"{name} - {why}" for name, why in row["reasons"].items()])


def _distribution(summary: Summary) -> Iterator[str]:
    stands = summary.proposal.stands
    yield "## Correct files with TF32 off, on CUDA"
    yield ""
    columns = ("metric", "values", "median", "95 %", "most", "of", "built-in",
               "proposed" if stands else "not a proposal")  # fmt: skip
    rows = [
        [one.metric, str(one.values), *map(_number, (one.median, one.high, one.most)), one.of,
         *map(_number, (one.built_in, one.bound))]
        for one in summary.proposal.spreads
    ]  # fmt: skip
    yield from _table(columns, rows)


def _proposal(summary: Summary) -> Iterator[str]:
    proposal = summary.proposal
    yield "## Proposed bounds"
    yield ""
    if proposal.stands:
        yield "Each the larger of the CPU's bound and margin × most, rounded up to two digits:"
        yield ""
        yield from (f"    {name}={bound:g}," for name, bound in proposal.bounds.items())
        yield ""
    else:
        yield f"not a proposal: {'; '.join(proposal.objections)}"
        yield ""
    yield from _names("With these, faults that no runtime on CUDA refuses", proposal.faults_passing)
    yield from _names("With these, correct files refused", proposal.correct_refused)
    yield from _names("With these, cells with TF32 that pass", proposal.tf32_passing)


def _missing(summary: Summary) -> Iterator[str]:
    failed = [f"{one.cell.name} - {one.kept.reason}" for one in summary.failed]
    yield from _names("Failed", failed)
    yield from _names("Left out for want of time", [cell.name for cell in summary.left_out])


def _names(title: str, names: Sequence[str]) -> Iterator[str]:
    yield f"{title}: {len(names) or 'none'}"
    yield ""
    yield from (f"- {name}" for name in names[:_MANY])
    if len(names) > _MANY:
        yield f"- and {len(names) - _MANY} more, which the JSON names"
    if names:
        yield ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
    yield ""


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}"


def _marked(line: str, mark: str) -> str:
    """With the mark in a first column, or behind the words."""
    if not mark or not line:
        return line
    if line.startswith("|---"):
        return f"|---{line}"
    return f"| {mark} {line}" if line.startswith("|") else f"{line} [{mark}]"
