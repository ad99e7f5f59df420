"""Markdown for version pages and pull requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gate.decision.check_result import Verdict
from gate.report.ci_formats import CiResult, Outcome
from gate.storage.safe_text import make_printable
from gate.summary.render import beginning, count, format_number, result_of, short_name
from gate.summary.summary import COST_HEADINGS, TREND_HEADINGS, RuntimeProof, Summary

# The first line is one plain sentence: MLflow shows it raw in its list of models.


_GAP = "\N{NO-BREAK SPACE}"
"""MLflow draws tables without space between their columns."""


def _table(
    title: str, headings: Sequence[str], rows: Iterable[Iterable[str]], *, left: int = 1
) -> Iterator[str]:
    """Yield a table below its title. All columns after the first `left` hold numbers."""
    yield from (title, "", _table_row(headings))
    yield f"|{'---|' * left}{'---:|' * (len(headings) - left)}"
    yield from map(_table_row, rows)
    yield ""


def _table_row(cells: Iterable[str]) -> str:
    return "| " + f"{_GAP} | ".join(map(literal, cells)) + " |"


_COLUMNS = ("runtime", "state", "worst", "observed", "allowed", "top-1", "latency")

_CHANGES, _CHECKS = 8, 3

_MARKUP = re.compile(r"[\\|`*\[\]<>#!]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
"""Characters that Markdown may interpret as markup. An underscore within a word is safe."""


def summary_markdown(summary: Summary, links: Mapping[str, str]) -> str:
    """Return Markdown: headline, findings, changes, runtimes, next steps, digests, `links` (label
    to address)."""
    lines = [_plain(sentence(summary)), ""]
    if summary.headline.remedy:
        lines += [f"**Try:** {literal(summary.headline.remedy)}", ""]
    lines += [*_findings(summary), *_change(summary)]
    if summary.change.trend_rows:
        trend = summary.change.trend_rows
        lines += _table("Over versions, the newest last:", TREND_HEADINGS, trend)
    several = summary.has_several_outputs
    rows = (_cells(row, several=several) for row in summary.proof)
    lines += _table("Runtimes:", _COLUMNS, rows, left=3)
    if summary.costs:
        costs = (row.cells for row in summary.costs)
        lines += _table("Time and memory (median / 95th percentile):", COST_HEADINGS, costs)
    lines += [*_bullets("Notes:", map(literal, (*summary.warnings, *summary.notes)))]
    steps = ((step.label, step.command) for step in summary.steps if step.command)
    lines += [
        *_bullets("Next:", (f"{literal(label)}: `{_code(command)}`" for label, command in steps))
    ]
    lines += ["What was judged:", "", *_identity_lines(summary), ""]
    lines += [f"- [{literal(label)}](<{_address(target)}>)" for label, target in links.items()]
    return "\n".join(lines).rstrip() + "\n"


def twin_markdown(summary: Summary) -> str:
    """Return Markdown about the quantized twin, for the end of the text about the exact file."""
    subject = summary.subject
    lines = ["", f"**Quantized twin.** {_plain(sentence(summary))}", "", *_findings(summary)]
    lines += [f"- {literal(note)}" for note in summary.notes]
    lines += [f"- file: `{subject.sha256}`, {subject.size_bytes} bytes"]
    return "\n".join(lines) + "\n"


def sentence(summary: Summary) -> str:
    """Return the verdict and its cause in one plain sentence."""
    return f"{summary.headline.verdict}: {summary.headline.sentence}."


def _bullets(title: str, entries: Iterable[str]) -> Iterator[str]:
    """Yield a list below a title line: MLflow draws no space below a table."""
    lines = [f"- {entry}" for entry in entries]
    if lines:
        yield from (title, "", *lines, "")


def _findings(summary: Summary) -> Iterator[str]:
    for finding in summary.findings:
        first = finding is summary.findings[0] and finding.verdict is not Verdict.WAIVED
        text = "" if first else f": {literal(finding.sentence)}"
        checks = count(len(finding.checks), "check")
        yield f"- **{finding.verdict}** {literal(finding.title)}{text} ({checks})"
        if finding.verdict is Verdict.WAIVED:
            continue
        for check in finding.checks[:_CHECKS]:
            yield f"  - {literal(check.title)}: {literal(result_of(check))}"
        if len(finding.checks) > _CHECKS:
            yield f"  - and {len(finding.checks) - _CHECKS} more in the report"
    if summary.findings:
        yield ""


def _change(summary: Summary) -> Iterator[str]:
    change = summary.change
    if change.version is None:
        yield f"Comparison with the champion: {literal(change.absent or 'nothing to compare with')}"
        yield ""
        return
    moved = change.changed_rows
    yield f"Comparison with the champion, version {literal(change.version)}:"
    yield ""
    if not moved:
        yield f"- {literal(change.unmoved)}"
    for row in moved[:_CHANGES]:
        sense = f" ({row.sense})" if row.sense else ""
        yield f"- {literal(row.name)}: {literal(row.before)} → {literal(row.now)}{sense}"
    if len(moved) > _CHANGES:
        yield f"- and {len(moved) - _CHANGES} more in the report"
    if change.machines:
        yield f"- {literal(change.machines)}"
    yield ""


def _cells(row: RuntimeProof, *, several: bool) -> tuple[str, ...]:
    observed = allowed = worst = ""
    if row.worst is not None:
        value, bound = row.worst.observed, row.worst.bound
        worst = short_name(row.worst, several_outputs=several)
        observed = format_number(value) if isinstance(value, float) else ""
        allowed = format_number(bound) if isinstance(bound, float) else ""
    elif row.reason is not None:
        worst = beginning(row.reason)
    return (row.runtime, row.state, worst, observed, allowed, row.top1, row.latency)


def _identity_lines(summary: Summary) -> Iterator[str]:
    subject = summary.subject
    yield f"- file: `{subject.sha256}`, {subject.size_bytes} bytes, opset {subject.opset}"
    yield f"- reference: {literal(subject.factory)}; {subject.samples} samples"
    for name, digest in (
        ("checkpoint", subject.checkpoint_sha256),
        ("samples", subject.data_sha256),
        ("policy", subject.policy_sha256),
        ("evidence", subject.evidence_sha256),
    ):
        if digest is not None:
            yield f"- {name}: `{digest}`"
    yield f"- measured {literal(subject.measured_at)} on {literal(subject.machine)}"
    yield f"- decided {literal(subject.decided_at)}"


def _plain(text: str) -> str:
    """Return `text` without Markdown markup, readable as plain text."""
    for relation, symbol in (("<=", "≤"), (">=", "≥")):
        text = text.replace(relation, symbol)
    return _MARKUP.sub("'", make_printable(text))


def literal(text: str) -> str:
    """Return `text` escaped for a Markdown table cell or list item."""
    return _MARKUP.sub(lambda match: f"\\{match[0]}", make_printable(text))


def _code(text: str) -> str:
    return make_printable(text).replace("`", "'")


def _address(target: str) -> str:
    return make_printable(target).translate({ord("<"): "%3C", ord(">"): "%3E", ord(" "): "%20"})


LIMIT = 60_000
"""Bytes. GitHub takes 65 536 characters of a comment, and 1 MiB of a step's summary."""

_MARKS = {"passed": "✅", "rejected": "❌", "not judged": "⚠️"}

_VERDICTS = {"passed": Verdict.PASS, "rejected": Verdict.FAIL, "not judged": Verdict.ERROR}

_NOTHING: dict[Outcome, str] = {
    "passed": "Nothing was decided.",
    "rejected": "It was rejected before anything was measured (exit code 1).",
    "not judged": "Nothing was decided (exit code 2): this is neither a pass nor a rejection.",
}
"""Texts for results without a summary."""

_CUT = "\n(Truncated: the report has the rest.)\n"


def pull_request_comment(result: CiResult) -> str:
    """Return Markdown of at most `LIMIT` bytes: the verdict, the outcome of the command, then the
    summary: cause, findings, changes from the champion, runtimes, next steps."""
    subject = f" ({literal(result.subject)})" if result.subject else ""
    lines = [f"## {_MARKS[result.outcome]} parity-gate: {_verdict_text(result)}{subject}", ""]
    if result.summary is None:
        lines += [f"`{result.title}`: {literal(result.reason)}", "", _NOTHING[result.outcome], ""]
        return _cut("\n".join(lines))
    if result.sentence:
        lines += [f"`{result.title}`: **{literal(result.sentence)}**", ""]
    return _cut("\n".join([*lines, summary_markdown(result.summary, result.links)]))


def _verdict_text(result: CiResult) -> str:
    """Return the verdict. If a file that passes was refused, the refusal comes first."""
    if result.summary is None:
        return "could not judge" if result.outcome == "not judged" else result.outcome
    as_decided = result.verdict is _VERDICTS[result.outcome]
    return result.verdict if as_decided else f"{result.outcome}, the verdict is {result.verdict}"


def _cut(text: str) -> str:
    """Return as many whole lines from the beginning as fit."""
    if len(text.encode()) <= LIMIT:
        return text
    room = LIMIT - len(_CUT.encode())
    kept = text.encode()[:room].decode(errors="ignore")
    return kept[: kept.rfind("\n") + 1] + _CUT
