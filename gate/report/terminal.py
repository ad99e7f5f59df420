"""The decision on a terminal: a table of checks, the problems with their remedies, the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gate.decision.checks import CheckResult, Verdict
from gate.decision.decision import Decision
from gate.records.evidence import Evidence
from gate.records.localisation import Explanation
from gate.report import localisation
from gate.report.table import add_row, table
from gate.story import wording

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_STYLES = {
    Verdict.PASS: "green",
    Verdict.FAIL: "bold red",
    Verdict.ERROR: "bold magenta",
    Verdict.WAIVED: "yellow",
}


def print_decision(
    decision: Decision,
    evidence: Evidence,
    console: Console,
    *,
    confidence: float = 0.95,
    explanation: Explanation | None = None,
) -> None:
    """Print the table, what top-1 proves at `confidence`, what is to be known of the model's code,
    the waived checks, the problems, the first diverging layer, and the verdict last, where a
    terminal shows it."""
    console.print(_table(decision))
    for sentence in wording.agreement_sentences(decision, evidence, confidence=confidence):
        _say(console, sentence, "dim")
    for sentence in (*wording.input_sentences(decision), *wording.weight_sentences(evidence)):
        _say(console, sentence, "dim")
    for sentence in wording.code_sentences(evidence):
        _say(console, sentence, _STYLES[Verdict.WAIVED])
    for reason, titles in wording.waivers(decision).items():
        _say(console, f"waived  {', '.join(titles)}: {reason}", _STYLES[Verdict.WAIVED])
    remedies: set[str | None] = {None}
    for check in decision.problems:
        _say(console, f"{check.verdict}  {_text(check)}", _STYLES[check.verdict])
        if check.remedy not in remedies:
            _say(console, f"    try: {wording.printable(str(check.remedy))}")
            remedies.add(check.remedy)
    for sentence in localisation.sentences(explanation or Explanation()):
        _say(console, sentence, "bold")
    _say(console, wording.verdict_sentence(decision, evidence), _STYLES[decision.verdict])


def _table(decision: Decision) -> Table:
    from rich.text import Text

    headings = ("runtime", "check", "observed", "allowed", "n", "verdict")
    shown = table(headings, right=("observed", "n"))
    for runtime, checks in wording.folded_groups(decision):
        label = runtime
        for check in checks:
            verdict = Text(check.verdict.value, style=_STYLES[check.verdict])
            add_row(shown, (Text(label, style="bold"), *wording.cells(check), verdict))
            label = ""
        shown.add_section()
    return shown


def _text(check: CheckResult) -> str:
    return f"{wording.printable(check.title)}: {wording.printable(check.explanation)}"


def _say(console: Console, text: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(text, style=style))
