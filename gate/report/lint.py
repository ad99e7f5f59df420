"""Findings in a model's source on a terminal: by file, with what to write instead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gate.lint import LintReport
from gate.records.lint import LEVELS, LintFinding, LintLevel
from gate.report.table import add_row, table
from gate.story.wording import printable

if TYPE_CHECKING:
    from rich.console import Console

_HEADINGS = ("line", "code", "level", "expression", "what happens", "write instead")
_STYLES: dict[LintLevel, str] = {"error": "bold red", "warning": "yellow", "note": "dim"}


def print_findings(report: LintReport, console: Console) -> None:
    """One table a file; what is silenced and what could not be read; the sum last."""
    from rich.text import Text

    for path, findings in itertools.groupby(report.active, key=lambda finding: finding.path):
        shown = table(_HEADINGS, title=path)
        for finding in findings:
            add_row(shown, _cells(finding), style=_STYLES[finding.level])
        console.print(shown)
    for sentence in sentences(report):
        console.print(Text(sentence))


def sentences(report: LintReport) -> Iterator[str]:
    """What the tables do not say."""
    for finding in report.suppressed:
        yield f"silenced  {finding.code} at {finding.place}: {printable(finding.expression)}"
    for unread in report.unread:
        yield f"not read  {printable(unread.name)}: {printable(unread.reason)}"
    for code in sorted({finding.code for finding in report.active}):
        yield f"see  docs/lint/{code}.md"
    counts = [sum(f.level == level for f in report.active) for level in LEVELS]
    found = ", ".join(_counted(n, level) for n, level in zip(counts, LEVELS, strict=True))
    read = _counted(report.functions, "function")
    silenced = f"{len(report.suppressed)} silenced"
    yield f"{found}; {silenced}; {read} read, as exported by {report.strategy}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _cells(finding: LintFinding) -> tuple[str, ...]:
    module = f" (in {finding.module})" if finding.module else ""
    return (
        str(finding.line),
        finding.code,
        finding.level,
        f"{finding.expression}{module}",
        finding.message,
        finding.rewrite,
    )
