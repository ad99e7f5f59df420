"""Terminal output."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from gate.decision.check_result import Verdict
from gate.lint.lint import LintReport
from gate.records.export import LEVELS, LintLevel
from gate.records.localization import Explanation, Localization
from gate.storage.safe_text import make_printable, shorten
from gate.summary.render import (
    LAYER_HEADINGS,
    allowed,
    beginning,
    count,
    format_bound_usage,
    layer_cells,
    observed,
    result_of,
    short_name,
)
from gate.summary.summary import COST_HEADINGS, Finding, Summary

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
            module = f" (in {finding.module})" if finding.module else ""
            expression = f"{finding.expression}{module}"
            cells = (str(finding.line), finding.code, finding.level, expression, finding.message,
                     finding.rewrite)  # fmt: skip
            add_row(table, cells, style=_LINT_STYLES[finding.level])
        console.print(table)
    print_sentences(console, _lint_sentences(report))


def _lint_sentences(report: LintReport) -> Iterator[str]:
    """Yield the lines on a lint report that its tables do not contain."""
    for finding in report.suppressed:
        expression = make_printable(finding.expression)
        yield f"silenced  {finding.code} at {finding.location}: {expression}"
    for unread in report.unread:
        yield f"not read  {make_printable(unread.name)}: {make_printable(unread.reason)}"
    for code in sorted({finding.code for finding in report.active}):
        yield f"see  docs/lint/{code}.md"
    counts = [count(sum(f.level == level for f in report.active), level) for level in LEVELS]
    read = count(report.functions, "function")
    silenced = f"{len(report.suppressed)} silenced"
    yield f"{', '.join(counts)}; {silenced}; {read} read, as exported by {report.strategy}"


_CELL = 40
"""Maximum number of characters of a detail in the table; longer ones follow it."""

_LAYER_STYLES = {"source": "bold red", "propagated": "yellow", "unmapped": "dim", "ok": ""}


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
    table = build_table(LAYER_HEADINGS, right=LAYER_HEADINGS[2:-1])
    long = []
    for row in localization.layers:
        detail = row.detail if row.detail and len(row.detail) <= _CELL else None
        if row.detail and not detail and row.module != localization.first_divergence:
            long.append(make_printable(f"{row.title}: {row.detail}"))
        add_row(table, layer_cells(row, detail=detail), style=_LAYER_STYLES[row.verdict])
    if localization.layers:
        console.print(table)
    explanation = Explanation(localisation=localization)
    print_sentences(console, [*long, *localisation_sentences(explanation)])


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


_Line = tuple[str, str, str]
"""Label, text and style. Continuation lines are indented below the text."""


def print_summary(
    summary: Summary, console: Console, *, verbose: bool = False, more: str = "-v shows them"
) -> None:
    """Print the verdict with its cause, the runtimes, the findings and the next commands.

    `verbose`: also all checks and notes. `more`: how to see the entries that are left out. The
    verdict is repeated at the end of an output that is longer than the screen.
    """
    headline = summary.headline
    verdict = (headline.verdict, f"{headline.sentence}.", STYLES[headline.verdict])
    lines = [verdict, *_lines(summary, width=console.width, verbose=verbose, more=more)]
    _print(console, lines)
    if verbose:
        if summary.costs:
            rows = [row.cells for row in summary.costs]
            console.print(build_table(COST_HEADINGS, rows, right=COST_HEADINGS[1:]))
        _print_checks(summary, console)
    for step in summary.steps:  # unchanged, to be pasted: only the terminal wraps commands
        command = step.command or step.address or ""
        console.print(Text(f"next   {step.label}:  {command}"), soft_wrap=True)
    long = console.is_terminal and len(lines) + len(summary.steps) > console.height - 2
    if verbose or long:
        _print(console, [verdict])


def _lines(summary: Summary, *, width: int, verbose: bool, more: str) -> Iterator[_Line]:
    headline, change = summary.headline, summary.change
    if headline.remedy:
        yield "try", headline.remedy, ""
    yield from _runtimes(summary, width=width)
    shown = summary.findings if verbose else summary.findings[:_FINDINGS]
    for number, finding in enumerate(shown):
        first = number == 0 and headline.sentence == finding.sentence
        yield from _finding(finding, first=first, verbose=verbose, more=more)
    if len(shown) < len(summary.findings):
        yield "", f"{len(summary.findings) - len(shown)} more findings: {more}", "dim"
    if change.version is not None:
        moved = [f"{row.name} {row.before} → {row.now}" for row in change.changed_rows]
        listed = "; ".join(moved[:_CHANGES]) or change.unmoved
        gap = ", " if change.absent else ": "
        yield "before", f"champion is version {change.version}{gap}{listed}", ""
        if change.machines:
            yield "", change.machines, ""
    yield from (("note", warning, STYLES[Verdict.WAIVED]) for warning in summary.warnings)
    if verbose or headline.verdict is Verdict.PASS:
        yield from (("note", note, "dim") for note in summary.notes)


def _runtimes(summary: Summary, *, width: int) -> Iterator[_Line]:
    """Yield a line for each runtime that was to be measured; the waived ones share a finding."""
    rows = [row for row in summary.proof if row.state not in ("waived", "not measured")]
    longest = max((len(row.runtime) for row in rows), default=0) if width >= _NARROW else 0
    for row in rows:
        facts = [row.runtime.ljust(longest), row.state]
        if row.reason is not None:
            facts.append(beginning(row.reason))
        if row.worst is not None and (usage := format_bound_usage(row.worst, unit=False)):
            name = short_name(row.worst, several_outputs=summary.has_several_outputs)
            facts.append(f"{name} {usage}")
        if width >= _NARROW and row.top1:
            facts.append(f"top-1 {row.top1}")
        if width >= _WIDE and row.latency:
            facts.append(row.latency)
        yield "ran", "  ".join(facts), _STATES.get(row.state, "")


def _finding(finding: Finding, *, first: bool, verbose: bool, more: str) -> Iterator[_Line]:
    style = STYLES[finding.verdict]
    if finding.verdict is Verdict.WAIVED and not verbose:
        yield "waived", finding.sentence, style
        return
    yield finding.verdict, f"{finding.title} ({count(len(finding.checks), 'check')})", style
    if not first:
        yield "", finding.sentence, ""
        if finding.remedy:
            yield "", f"try: {finding.remedy}", ""
    shown = finding.checks if verbose else finding.checks[:_CHECKS]
    for check in shown:
        result = shorten(result_of(check), _MAX_LENGTH)
        yield "", f"{make_printable(check.title)}: {result}", "dim"
    if len(finding.checks) > len(shown):
        yield "", f"{len(finding.checks) - len(shown)} more: {more}", "dim"


def _print(console: Console, lines: list[_Line]) -> None:
    """Print the lines with their labels. A repeated label is omitted."""
    before = None
    for name, text, style in lines:
        label = "" if name == before else name
        room = max(console.width - _LABEL, 16)
        for part in textwrap.wrap(text, room, break_on_hyphens=False) or [""]:
            console.print(Text(f"{label:<{_LABEL}}{part}", style=style), soft_wrap=True)
            label = ""
        before = name


def _print_checks(summary: Summary, console: Console) -> None:
    headings = ("runtime", "check", "observed", "allowed", "n", "verdict", "meaning")
    table = build_table(headings, right=("observed", "n"))
    before = ""
    for row in summary.check_rows:
        check = row.check
        meaning = row.meaning if check.bound is None else f"{row.meaning} {row.why}"
        name = short_name(check, several_outputs=True)
        samples = "" if check.samples is None else str(check.samples)
        verdict = Text(check.verdict.value, style=STYLES[check.verdict])
        shown = "" if meaning == before else meaning
        add_row(table, (check.runtime or "measurement", name, observed(check), allowed(check),
                        samples, verdict, shown))  # fmt: skip
        before = meaning
    console.print(table)
