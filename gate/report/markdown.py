"""The story as Markdown, for the description of a registered model version and for reviews.

The first line is one plain sentence: MLflow shows it raw in its list of models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gate.decision.checks import Verdict
from gate.records.trend import TrendRow
from gate.story.costs import COST_HEADINGS
from gate.story.story import Finding, RuntimeProof, Story
from gate.story.wording import number, printable
from gate.story.words import measure

_GAP = "\N{NO-BREAK SPACE}"
"""MLflow draws tables without space between their columns."""


def _table_row(cells: Iterable[str]) -> str:
    return "| " + f"{_GAP} | ".join(cells) + " |"


_COLUMNS = ("runtime", "state", "worst", "observed", "allowed", "top-1", "latency")
_HEADER = (
    "Runtimes:",
    "",
    _table_row(_COLUMNS),
    "|---|---|---|---:|---:|---:|---:|",
)
_CHANGES, _CHECKS, _RELEASES = 8, 3, 5
_MARKUP = re.compile(r"[\\|`*\[\]<>#!]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
"""What Markdown could take for markup; an underscore within a word is none."""


def describe(story: Story, links: Mapping[str, str]) -> str:
    """Markdown text: headline, findings, change, runtimes, next steps, what it is bound to, `links`
    (label to address)."""
    lines = [_plain(sentence(story)), ""]
    if story.headline.remedy:
        lines += [f"**Try:** {literal(story.headline.remedy)}", ""]
    lines += [*_findings(story), *_change(story)]
    lines += [*_HEADER, *map(_row, story.proof), ""]
    lines += [*_costs(story)]
    lines += [*_listed("Also to be known:", map(literal, (*story.warnings, *story.notes)))]
    lines += [*_listed("Next:", _steps(story))]
    lines += ["What was judged:", "", *_bound_to(story), ""]
    lines += [f"- [{literal(label)}](<{_address(target)}>)" for label, target in links.items()]
    return "\n".join(lines).rstrip() + "\n"


def describe_twin(story: Story) -> str:
    """Markdown text about the quantized twin, to stand below that of its exact file."""
    subject = story.subject
    lines = ["", f"**Quantized twin.** {_plain(sentence(story))}", "", *_findings(story)]
    lines += [f"- {literal(note)}" for note in story.notes]
    lines += [f"- file: `{subject.sha256}`, {subject.size_bytes} bytes"]
    return "\n".join(lines) + "\n"


def sentence(story: Story) -> str:
    """The verdict and its cause, one plain sentence."""
    return f"{story.headline.verdict}: {story.headline.sentence}."


def _listed(title: str, entries: Iterable[str]) -> Iterator[str]:
    """A list below a line of its own: MLflow draws no space between a table and what follows."""
    lines = [f"- {entry}" for entry in entries]
    if lines:
        yield from (title, "", *lines, "")


def _steps(story: Story) -> Iterator[str]:
    for step in story.steps:
        if step.command:
            yield f"{literal(step.label)}: `{_code(step.command)}`"


def _findings(story: Story) -> Iterator[str]:
    for finding in story.findings:
        first = finding is story.findings[0] and finding.verdict is not Verdict.WAIVED
        text = "" if first else f": {literal(finding.sentence)}"
        yield f"- **{finding.verdict}** {literal(finding.title)}{text} ({_count(finding)})"
        if finding.verdict is Verdict.WAIVED:
            continue
        for check in finding.checks[:_CHECKS]:
            shown = measure(check) or check.explanation
            yield f"  - {literal(check.title)}: {literal(shown)}"
        if len(finding.checks) > _CHECKS:
            yield f"  - and {len(finding.checks) - _CHECKS} more in the report"
    if story.findings:
        yield ""


def _count(finding: Finding) -> str:
    return "1 check" if len(finding.checks) == 1 else f"{len(finding.checks)} checks"


def _change(story: Story) -> Iterator[str]:
    change = story.change
    if change.version is None:
        yield f"Against the champion: {literal(change.absent or 'nothing to compare with')}"
        yield ""
        yield from _trend(change.trend[-_RELEASES:])
        return
    moved = [row for row in change.rows if row.changed]
    yield f"Against the champion, version {literal(change.version)}:"
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
    yield from _trend(change.trend[-_RELEASES:])


def _trend(rows: Sequence[TrendRow]) -> Iterator[str]:
    """A few numbers over the releases, the newest last: MLflow shows none across versions."""
    if len(rows) < 2:
        return
    yield from ("Over versions, the newest last:", "")
    yield _table_row(("file", "noise ratio", "agreement", "accuracy", "latency, ms"))
    yield "|---|---:|---:|---:|---:|"
    for row in rows:
        numbers = (row.noise_ratio, row.agreement, row.accuracy, row.latency_ms)
        cells = ("" if value is None else number(value) for value in numbers)
        yield _table_row((row.sha256.short, *cells))
    yield ""


def _row(row: RuntimeProof) -> str:
    observed = allowed = worst = ""
    if row.worst is not None:
        value, bound = row.worst.observed, row.worst.bound
        worst = row.worst.name
        observed = number(value) if isinstance(value, float) else ""
        allowed = number(bound) if isinstance(bound, float) else ""
    elif row.reason is not None:
        worst = row.reason.partition(": ")[0]
    agreement = "" if row.agreement is None else f"{100 * row.agreement:.4g} %"
    latency = "" if row.latency_ms is None else f"{row.latency_ms:.3g} ms"
    cells = (row.runtime, row.state, worst, observed, allowed, agreement, latency)
    return _table_row(map(literal, cells))


def _costs(story: Story) -> Iterator[str]:
    if story.costs:
        yield from ("Time and memory (median / 95th percentile):", "")
        yield _table_row(COST_HEADINGS)
        yield f"|---{'|---:' * (len(COST_HEADINGS) - 1)}|"
        for row in story.costs:
            yield _table_row(map(literal, row.cells()))
        yield ""


def _bound_to(story: Story) -> Iterator[str]:
    subject = story.subject
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
    """`text` without any Markdown in it, still readable raw."""
    for relation, symbol in (("<=", "≤"), (">=", "≥")):
        text = text.replace(relation, symbol)
    return _MARKUP.sub("'", printable(text))


def literal(text: str) -> str:
    """`text` as literal Markdown within a table cell or a list item."""
    return _MARKUP.sub(lambda found: f"\\{found[0]}", printable(text))


def _code(text: str) -> str:
    return printable(text).replace("`", "'")


def _address(target: str) -> str:
    return printable(target).translate({ord("<"): "%3C", ord(">"): "%3E", ord(" "): "%20"})
