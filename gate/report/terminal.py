"""Terminal output."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from gate.decision.check_result import CheckResult, Verdict
from gate.lint.lint import LintReport
from gate.records.export import LEVELS, LintFinding, LintLevel
from gate.records.localization import Explanation, LayerRow, Localization
from gate.storage.safe_text import make_printable, shorten
from gate.summary.render import (
    beginning,
    cells,
    format_bound_usage,
    format_number,
    render_check,
    short_name,
)
from gate.summary.summarize import COST_HEADINGS
from gate.summary.summary import Finding, RuntimeProof, Summary

if TYPE_CHECKING:
    from rich.console import Console


def build_table(
    headings: Iterable[str],
    rows: Iterable[Iterable[str | Text]] = (),
    *,
    right: Container[str] = (),
    title: str | None = None,
) -> Table:
    """Return a table of the rows. `right`: the headings of right-aligned columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        add_row(table, row)
    return table


def add_row(table: Table, cells: Iterable[str | Text], *, style: str = "") -> None:
    """Add a row. Strings are made printable and get this style; a `Text` is unchanged."""
    table.add_row(
        *(Text(make_printable(c), style=style) if isinstance(c, str) else c for c in cells)
    )


def print_sentences(console: Console, sentences: Iterable[str]) -> None:
    """Print each sentence on a separate line. They must be printable."""
    for sentence in sentences:
        console.print(Text(sentence))


_LINT_HEADINGS = ("line", "code", "level", "expression", "what happens", "write instead")

_LINT_STYLES: dict[LintLevel, str] = {"error": "bold red", "warning": "yellow", "note": "dim"}


def print_findings(report: LintReport, console: Console) -> None:
    """Print a table for each file, then suppressed findings, unread code and totals."""
    for path, findings in itertools.groupby(report.active, key=lambda finding: finding.path):
        table = build_table(_LINT_HEADINGS, title=path)
        for finding in findings:
            add_row(table, _lint_cells(finding), style=_LINT_STYLES[finding.level])
        console.print(table)
    print_sentences(console, lint_sentences(report))


def lint_sentences(report: LintReport) -> Iterator[str]:
    """Yield the lines on a lint report that its tables do not contain."""
    for finding in report.suppressed:
        expression = make_printable(finding.expression)
        yield f"silenced  {finding.code} at {finding.location}: {expression}"
    for unread in report.unread:
        yield f"not read  {make_printable(unread.name)}: {make_printable(unread.reason)}"
    for code in sorted({finding.code for finding in report.active}):
        yield f"see  docs/lint/{code}.md"
    counts = [sum(f.level == level for f in report.active) for level in LEVELS]
    counted = ", ".join(_counted(n, level) for n, level in zip(counts, LEVELS, strict=True))
    read = _counted(report.functions, "function")
    silenced = f"{len(report.suppressed)} silenced"
    yield f"{counted}; {silenced}; {read} read, as exported by {report.strategy}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _lint_cells(finding: LintFinding) -> tuple[str, ...]:
    module = f" (in {finding.module})" if finding.module else ""
    return (
        str(finding.line),
        finding.code,
        finding.level,
        f"{finding.expression}{module}",
        finding.message,
        finding.rewrite,
    )


_LOCALISATION_HEADINGS = (
    "layer",
    "type",
    "max diff",
    "mean diff",
    "noise ratio",
    "alone",
    "growth",
    "verdict",
)

_CELL = 40
"""Maximum number of characters of a detail in the table; longer ones follow it."""

_LOCALISATION_STYLES = {"source": "bold red", "propagated": "yellow", "unmapped": "dim", "ok": ""}


def localisation_sentences(explanation: Explanation) -> Iterator[str]:
    """Yield the lines on an explanation; none if no localization was needed."""
    if explanation.failure is not None:
        yield f"The first diverging layer is not known: {make_printable(explanation.failure)}"
    localization = explanation.localisation
    if localization is None:
        return
    if localization.first_divergence is not None:
        module = make_printable(localization.first_divergence) or "the model itself"
        of = f" of the part {localization.part}" if localization.part else ""
        of += f" on the input '{localization.probe}'" if localization.probe else ""
        yield f"First diverging layer{of}: {module} ({localization.runtime})."
    elif localization.part:
        yield f"First diverging part: {localization.part} ({localization.runtime})."
    yield make_printable(localization.cause)
    if localization.seam and localization.part:
        yield f"And the seam: {make_printable(localization.seam)}"
    if localization.remedy:
        yield f"Try: {make_printable(localization.remedy)}"


def print_layers(localization: Localization, console: Console) -> None:
    """Print the table of layers, then its interpretation."""
    table = build_table(_LOCALISATION_HEADINGS, right=_LOCALISATION_HEADINGS[2:-1])
    for row in localization.layers:
        add_row(table, _localisation_cells(row), style=_LOCALISATION_STYLES[row.verdict])
    if localization.layers:
        console.print(table)
    for row in localization.layers:
        if len(row.detail or "") > _CELL and row.module != localization.first_divergence:
            console.print(make_printable(f"{row.title}: {row.detail}"), style="none", markup=False)
    print_sentences(console, localisation_sentences(Explanation(localisation=localization)))


def _localisation_cells(row: LayerRow) -> tuple[str, ...]:
    numbers = (row.max_abs_diff, row.mean_abs_diff, row.noise_ratio, row.local_ratio,
               row.amplification)  # fmt: skip
    detail = row.detail if row.detail and len(row.detail) <= _CELL else None
    verdict = row.verdict if detail is None else f"{row.verdict}: {make_printable(detail)}"
    shown = map(format_number, numbers)
    return (make_printable(row.title), make_printable(row.kind), *shown, verdict)


STYLES = {
    Verdict.PASS: "bold green",
    Verdict.FAIL: "bold red",
    Verdict.ERROR: "bold magenta",
    Verdict.WAIVED: "yellow",
}

_STATES = {"passed": "green", "failed": "red", "not judged": "magenta", "waived": "yellow"}

_FINDINGS, _CHECKS, _CHANGES = 4, 3, 4
"""Maximum number of shown entries. `-v` shows all."""

_NARROW, _WIDE = 64, 100
"""Terminal widths below which lines are shortened, and from which they are complete."""

_LABEL = 7

_MAX_LENGTH = 90
"""Maximum number of characters of a check."""


@dataclass(frozen=True)
class _Line:
    """A line with a label. Continuation lines are indented below the text."""

    label: str
    text: str
    style: str = ""


def print_summary(summary: Summary, console: Console, *, verbose: bool = False) -> None:
    """Print the verdict with its cause, the runtimes, the findings and the next commands.

    `verbose`: also all checks and notes. The verdict is repeated at the end of an output that is
    longer than the screen.
    """
    verdict = _Line(
        summary.headline.verdict, f"{summary.headline.sentence}.", STYLES[summary.headline.verdict]
    )
    lines = [verdict, *_lines(summary, width=console.width, verbose=verbose)]
    _print(console, lines)
    if verbose:
        if summary.costs:
            rows = [row.cells() for row in summary.costs]
            console.print(build_table(COST_HEADINGS, rows, right=COST_HEADINGS[1:]))
        _print_checks(summary, console)
    _print_steps(summary, console)
    long = console.is_terminal and len(lines) + len(summary.steps) > console.height - 2
    if verbose or long:
        _print(console, [verdict])


def _lines(summary: Summary, *, width: int, verbose: bool) -> Iterator[_Line]:
    if summary.headline.remedy:
        yield _Line("try", summary.headline.remedy)
    yield from _runtimes(summary, width=width)
    shown = summary.findings if verbose else summary.findings[:_FINDINGS]
    for finding in shown:
        first = finding is summary.findings[0] and summary.headline.sentence == finding.sentence
        yield from _finding(finding, first=first, verbose=verbose)
    if len(shown) < len(summary.findings):
        yield _Line("", f"{len(summary.findings) - len(shown)} more findings: -v shows them", "dim")
    yield from _champion(summary)
    yield from (_Line("note", warning, STYLES[Verdict.WAIVED]) for warning in summary.warnings)
    if verbose or summary.headline.verdict is Verdict.PASS:
        yield from (_Line("note", note, "dim") for note in summary.notes)


def _runtimes(summary: Summary, *, width: int) -> Iterator[_Line]:
    """Yield a line for each runtime that was to be measured; the waived ones share a finding."""
    rows = [row for row in summary.proof if row.state not in ("waived", "not measured")]
    several = summary.has_several_outputs
    longest = max((len(row.runtime) for row in rows), default=0) if width >= _NARROW else 0
    for row in rows:
        facts = [row.runtime.ljust(longest), row.state, *_facts(row, width=width, several=several)]
        yield _Line("ran", "  ".join(facts), _STATES.get(row.state, ""))


def _facts(row: RuntimeProof, *, width: int, several: bool) -> Iterator[str]:
    if row.reason is not None:
        yield beginning(row.reason)
    if row.worst is not None:
        usage = format_bound_usage(row.worst, unit=False)
        if usage:
            yield f"{short_name(row.worst, several_outputs=several)} {usage}"
    if width >= _NARROW and row.agreement is not None:
        yield f"top-1 {100 * row.agreement:.4g} %"
    if width >= _WIDE and row.latency_ms is not None:
        yield f"{row.latency_ms:.3g} ms"


def _finding(finding: Finding, *, first: bool, verbose: bool) -> Iterator[_Line]:
    count, style = len(finding.checks), STYLES[finding.verdict]
    if finding.verdict is Verdict.WAIVED and not verbose:
        yield _Line("waived", finding.sentence, style)
        return
    checks = f"{count} checks" if count > 1 else "1 check"
    yield _Line(finding.verdict, f"{finding.title} ({checks})", style)
    if not first:
        yield _Line("", finding.sentence)
        if finding.remedy:
            yield _Line("", f"try: {finding.remedy}")
    shown = finding.checks if verbose else finding.checks[:_CHECKS]
    for check in shown:
        yield _Line("", _short(check), "dim")
    if count > len(shown):
        yield _Line("", f"{count - len(shown)} more: -v shows them", "dim")


def _short(check: CheckResult) -> str:
    """Return the result of a check, cut to one line."""
    text = format_bound_usage(check) or render_check(check)
    return f"{make_printable(check.title)}: {shorten(text, _MAX_LENGTH)}"


def _champion(summary: Summary) -> Iterator[_Line]:
    change = summary.change
    if change.version is None:
        return
    moved = [f"{row.name} {row.before} → {row.now}" for row in change.rows if row.changed]
    listed = "; ".join(moved[:_CHANGES]) or change.unmoved
    gap = ", " if change.absent else ": "
    yield _Line("before", f"champion is version {change.version}{gap}{listed}")
    if change.machines:
        yield _Line("", change.machines)


def _print(console: Console, lines: list[_Line]) -> None:
    """Print the lines with their labels. A repeated label is omitted."""
    before = None
    for line in lines:
        label = "" if line.label == before else line.label
        room = max(console.width - _LABEL, 16)
        for part in textwrap.wrap(line.text, room, break_on_hyphens=False) or [""]:
            console.print(Text(f"{label:<{_LABEL}}{part}", style=line.style), soft_wrap=True)
            label = ""
        before = line.label


def _print_steps(summary: Summary, console: Console) -> None:
    """Print commands unchanged, so that they can be pasted; only the terminal wraps them."""
    for step in summary.steps:
        console.print(
            Text(f"next   {step.label}:  {step.command or step.address or ''}"), soft_wrap=True
        )


def _print_checks(summary: Summary, console: Console) -> None:
    headings = ("runtime", "check", "observed", "allowed", "n", "verdict", "meaning")
    table = build_table(headings, right=("observed", "n"))
    before = ""
    for row in summary.check_rows:
        verdict = Text(row.check.verdict.value, style=STYLES[row.check.verdict])
        runtime = row.check.runtime or "measurement"
        meaning = row.meaning if row.check.bound is None else f"{row.meaning} {row.why}"
        add_row(table, (runtime, *cells(row.check), verdict, "" if meaning == before else meaning))
        before = meaning
    console.print(table)
