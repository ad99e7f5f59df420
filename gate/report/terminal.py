"""The story on a terminal: the verdict and its cause first, one line a runtime, then what to do."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gate.decision.checks import CheckResult, Verdict
from gate.report.table import add_row, table
from gate.story.costs import COST_HEADINGS
from gate.story.story import Finding, RuntimeProof, Story, Word
from gate.story.wording import cells, number, printable
from gate.story.words import measure

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {
    Verdict.PASS: "bold green",
    Verdict.FAIL: "bold red",
    Verdict.ERROR: "bold magenta",
    Verdict.WAIVED: "yellow",
}
_STATES = {"passed": "green", "failed": "red", "not judged": "magenta", "waived": "yellow"}
_FINDINGS, _CHECKS, _CHANGES = 4, 3, 4
"""So many are shown; the rest is counted, and `-v` has it."""
_NARROW, _WIDE = 64, 100
"""Columns below which a line says only what nobody can do without, and from which it says all."""
_LABEL = 7
_LONGEST = 90
"""Characters of what a check without a number says."""


@dataclass(frozen=True)
class _Line:
    """A line with a label in front, under which what does not fit goes on."""

    label: str
    text: str
    style: str = ""


def print_story(story: Story, console: Console, *, verbose: bool = False) -> None:
    """Print the verdict with its cause, the runtimes, the findings and the next commands.

    `verbose`: all checks and notes, too. The verdict comes once more at the end where all that is
    longer than the screen.
    """
    verdict = _Line(story.headline.verdict, f"{story.headline.sentence}.", _style(story))
    lines = [verdict, *_lines(story, width=console.width, verbose=verbose)]
    _print(console, lines)
    if verbose:
        _print_costs(story, console)
        _print_checks(story, console)
    _print_steps(story, console)
    long = console.is_terminal and len(lines) + len(story.steps) > console.height - 2
    if verbose or long:
        _print(console, [verdict])


def _style(story: Story) -> str:
    return STYLES[story.headline.verdict]


def _lines(story: Story, *, width: int, verbose: bool) -> Iterator[_Line]:
    if story.headline.remedy:
        yield _Line("try", story.headline.remedy)
    yield from _runtimes(story, width=width)
    shown = story.findings if verbose else story.findings[:_FINDINGS]
    for finding in shown:
        first = finding is story.findings[0] and story.headline.sentence == finding.sentence
        yield from _finding(finding, first=first, verbose=verbose)
    if len(shown) < len(story.findings):
        yield _Line("", f"{len(story.findings) - len(shown)} more findings: -v shows them", "dim")
    yield from _champion(story)
    yield from (_Line("note", warning, STYLES[Verdict.WAIVED]) for warning in story.warnings)
    if verbose or story.headline.verdict is Verdict.PASS:
        yield from (_Line("note", note, "dim") for note in story.notes)


def _runtimes(story: Story, *, width: int) -> Iterator[_Line]:
    """Those that were to be measured; the waived ones share a finding."""
    rows = [row for row in story.proof if row.state not in ("waived", "not measured")]
    longest = max((len(row.runtime) for row in rows), default=0) if width >= _NARROW else 0
    for row in rows:
        facts = [row.runtime.ljust(longest), row.state, *_facts(row, width=width)]
        yield _Line("ran", "  ".join(facts), _STATES.get(row.state, ""))


def _facts(row: RuntimeProof, *, width: int) -> Iterator[str]:
    if row.reason is not None:
        yield row.reason.partition(": ")[0]
    if row.worst is not None:
        value, bound = row.worst.observed, row.worst.bound
        if isinstance(value, float) and isinstance(bound, float):
            yield f"{row.worst.name} {number(value)} of {number(bound)}"
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
    """What a check saw, on a line."""
    text = measure(check) or printable(check.explanation)
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    return f"{printable(check.title)}: {text}"


def _champion(story: Story) -> Iterator[_Line]:
    change = story.change
    if change.version is None:
        return
    moved = [f"{row.name} {row.before} → {row.now}" for row in change.rows if row.changed]
    listed = "; ".join(moved[:_CHANGES]) or change.unmoved
    gap = ", " if change.absent else ": "
    yield _Line("before", f"champion is version {change.version}{gap}{listed}")
    if change.machines:
        yield _Line("", change.machines)


def _print(console: Console, lines: list[_Line]) -> None:
    """The lines below their labels; a repeated label is left out."""
    from rich.text import Text

    before = None
    for line in lines:
        label = "" if line.label == before else line.label
        room = max(console.width - _LABEL, 16)
        for part in textwrap.wrap(line.text, room, break_on_hyphens=False) or [""]:
            console.print(Text(f"{label:<{_LABEL}}{part}", style=line.style), soft_wrap=True)
            label = ""
        before = line.label


def _print_steps(story: Story, console: Console) -> None:
    """Commands as they are to be pasted: the terminal folds them, nothing else."""
    from rich.text import Text

    for step in story.steps:
        console.print(
            Text(f"next   {step.label}:  {step.command or step.address or ''}"), soft_wrap=True
        )


def _print_costs(story: Story, console: Console) -> None:
    if story.costs:
        rows = [row.cells() for row in story.costs]
        console.print(table(COST_HEADINGS, rows, right=COST_HEADINGS[1:]))


def _print_checks(story: Story, console: Console) -> None:
    from rich.text import Text

    headings = ("runtime", "check", "observed", "allowed", "n", "verdict", "asks")
    shown = table(headings, right=("observed", "n"))
    for word in story.words:
        verdict = Text(word.check.verdict.value, style=STYLES[word.check.verdict])
        runtime = word.check.runtime or "measurement"
        add_row(shown, (runtime, *cells(word.check), verdict, _asks(word)))
    console.print(shown)


def _asks(word: Word) -> str:
    return word.meaning if word.check.bound is None else f"{word.meaning} {word.why}"
