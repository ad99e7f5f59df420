"""JUnit, OpenMetrics, SARIF."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import quote
from xml.etree import ElementTree

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest

from gate.decision.check_result import Verdict
from gate.lint.lint import LintReport
from gate.lint.rules import RULES
from gate.records.export import LintFinding
from gate.storage.safe_text import make_printable
from gate.summary.render import format_bound_usage, render_check
from gate.summary.summary import CheckRow, Finding, Summary

Outcome = Literal["passed", "rejected", "not judged"]

_OUTCOMES: dict[int, Outcome] = {0: "passed", 1: "rejected"}


@dataclass(frozen=True, kw_only=True)
class CiResult:
    """How the command ended, and the summary of its decision."""

    command: str
    """`check`, `merge`, `promote`, or the stage of a pipeline."""
    is_stage: bool = False
    exit_code: int
    model: str = ""
    """The registered model or the factory."""
    sentence: str = ""
    """The reason in addition to the verdict: why nothing could be judged, or why the file was
    promoted or not. Must not contain passwords. May be empty."""
    summary: Summary | None = None
    """None if there is no decision."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Labels with their addresses."""

    @property
    def title(self) -> str:
        """`gate check`, or `stage parity`."""
        return f"{'stage' if self.is_stage else 'gate'} {self.command}"

    @property
    def outcome(self) -> Outcome:
        """The outcome of the build: a pass, a rejection or "not judged"."""
        return _OUTCOMES.get(self.exit_code, "not judged")

    @property
    def verdict(self) -> Verdict:
        """The verdict of the decision; ERROR without a decision."""
        return Verdict.ERROR if self.summary is None else self.summary.headline.verdict

    @property
    def subject(self) -> str:
        """The registered model, else the factory; empty if both are unknown."""
        if self.summary is None:
            return self.model
        return self.summary.subject.name or self.model or self.summary.subject.title

    @property
    def reason(self) -> str:
        """Return the reason for the exit code, in one sentence."""
        headline = self.summary.headline.sentence if self.summary else ""
        return self.sentence or headline or f"it ended with exit code {self.exit_code}"

    @property
    def shown_by_a_check(self) -> bool:
        """Return whether some check has the outcome of the whole build.

        If not, a case with the reason is added: a red build must not consist of green checks.
        """
        verdicts = {row.check.verdict for row in self.summary.check_rows} if self.summary else set()
        expected = Verdict.FAIL if self.outcome == "rejected" else Verdict.ERROR
        return self.outcome == "passed" or expected in verdicts


# One suite per runtime, one case per check. A red build always has a case with the reason, even if
# no check failed: a refused promotion, a file that could not be read.


_ELEMENTS = {Verdict.FAIL: "failure", Verdict.ERROR: "error", Verdict.WAIVED: "skipped"}

_COUNTED = {"tests": "testcase", "failures": "failure", "errors": "error"}
"""Counts of a suite and of the whole file. The schema of Jenkins' xUnit plug-in allows a count of
skipped cases in suites only."""

_SECONDS = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")

MEASUREMENT = "measurement"
"""The suite of checks without a runtime, named as in the report."""


def junit_xml(result: CiResult) -> str:
    """Return the XML text: suites `parity-gate.<runtime>`, cases `<part> / <output> / <check>`. A
    FAIL is a `failure`, an ERROR an `error`, a WAIVED check is `skipped`."""
    root = ElementTree.Element("testsuites", name="parity-gate")
    suites = [] if result.summary is None else list(_suites(result.summary))
    if not result.shown_by_a_check:
        suites.append(_suite(result.command, [_unexplained_case(result)]))
    root.extend(suites)
    _count(root)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, "unicode")}\n'


def _suites(summary: Summary) -> Iterator[ElementTree.Element]:
    runtimes = dict.fromkeys(row.runtime for row in summary.proof)
    causes = {
        check.title: f"{finding.title}: {finding.sentence}"
        for finding in summary.findings
        for check in finding.checks
    }
    by_runtime: dict[str, list[CheckRow]] = {name: [] for name in runtimes}
    for row in summary.check_rows:
        by_runtime.setdefault(row.check.runtime or MEASUREMENT, []).append(row)
    for runtime, rows in by_runtime.items():
        if rows:
            is_onnx = summary.subject.is_onnx_reference
            suite = _suite(runtime, [_case(row, causes, onnx_reference=is_onnx) for row in rows])
            suite.insert(0, _properties(summary))
            if _SECONDS.match(summary.subject.decided_at):
                suite.set("timestamp", summary.subject.decided_at[:19])
            yield suite


def _suite(name: str, cases: Iterable[ElementTree.Element]) -> ElementTree.Element:
    """Add a suite with unique names of cases: GitLab merges cases with equal names."""
    suite = ElementTree.Element("testsuite", name=f"parity-gate.{make_printable(name)}")
    names: Counter[str] = Counter()
    for case in cases:
        title = case.get("name", "")
        names[title] += 1
        case.set("name", title if names[title] == 1 else f"{title} ({names[title]})")
        case.set("classname", suite.get("name", ""))
        suite.append(case)
    _count(suite)
    suite.set("skipped", _number(suite, "skipped"))
    return suite


def _count(element: ElementTree.Element) -> None:
    for attribute, tag in _COUNTED.items():
        element.set(attribute, _number(element, tag))


def _number(element: ElementTree.Element, tag: str) -> str:
    return str(len(list(element.iter(tag))))


def _properties(summary: Summary) -> ElementTree.Element:
    subject = summary.subject
    properties = {
        "model": subject.name,
        "file": subject.sha256,
        "policy": subject.policy_sha256,
        "evidence": subject.evidence_sha256,
        "machine": subject.machine,
    }
    element = ElementTree.Element("properties")
    for name, value in properties.items():
        if value is not None:
            ElementTree.SubElement(element, "property", name=name, value=make_printable(str(value)))
    return element


def _case(row: CheckRow, causes: Mapping[str, str], *, onnx_reference: bool) -> ElementTree.Element:
    check = row.check
    names = (check.part, check.output, check.label)
    title = " / ".join(name for name in names if name)
    case = ElementTree.Element("testcase", name=make_printable(title))
    if check.verdict in _ELEMENTS:
        short = make_printable(format_bound_usage(check)) or render_check(check)
        outcome = ElementTree.SubElement(case, _ELEMENTS[check.verdict], message=short)
        outcome.set("type", check.name)
        texts = _sentences(row, causes.get(check.title), onnx_reference=onnx_reference)
        outcome.text = "\n".join(texts)
    return case


def _sentences(row: CheckRow, cause: str | None, *, onnx_reference: bool) -> Iterator[str]:
    """Yield the details of one case, beginning with the cause, which several cases may share."""
    check = row.check
    if cause is not None:
        yield make_printable(cause)
    yield render_check(check)
    yield f"Asks: {make_printable(row.meaning)}"
    if check.bound is not None:
        yield f"Why this bound: {make_printable(row.why)}"
    if remedy := render_check(check, "remedy", onnx_reference=onnx_reference):
        yield f"Try: {remedy}"


def _unexplained_case(result: CiResult) -> ElementTree.Element:
    """Return a case with the reason for a result that no check explains."""
    case = ElementTree.Element("testcase", name=result.title)
    tag = "failure" if result.outcome == "rejected" else "error"
    outcome = ElementTree.SubElement(case, tag, message=make_printable(result.reason))
    outcome.set("type", result.outcome)
    outcome.text = make_printable(result.reason)
    return case


# All are gauges, with names that node_exporter's textfile collector accepts, too.


_CHECK = ("part", "runtime", "output", "check", "point")

_CHECK_GAUGES = (
    ("check_observed", "Observed value of a check, in its unit.", ""),
    ("check_bound", "Bound of a check, in the same unit.", ""),
    ("check_used", "Used share of the bound of a check: 1 at the bound.", "ratio"),
)

_DECISIVE = (Verdict.PASS, Verdict.FAIL, Verdict.ERROR)


def openmetrics_text(result: CiResult) -> str:
    """Return the text, which ends with `# EOF`. Every series has the label `model` (docs/ci.md)."""
    model = make_printable(result.subject)
    gauges = list(_result_gauges(result, model))
    if result.summary is not None:
        gauges += _file_gauges(result.summary, model)
        gauges += _runtime_gauges(result.summary, model)
        gauges += _check_gauges(result.summary, model)
    registry = SimpleNamespace(collect=lambda: gauges)
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]  # it has no types
    return text.decode()


def _gauge(
    model: str,
    name: str,
    meaning: str,
    values: Mapping[Any, float],
    *labels: str,
    unit: str = "",
) -> GaugeMetricFamily:
    """Format a gauge. `values`: by tuples of values for `labels`."""
    gauge = GaugeMetricFamily(f"parity_gate_{name}", meaning, labels=("model", *labels), unit=unit)
    for texts, value in values.items():
        gauge.add_metric((model, *texts), value)
    return gauge


def _result_gauges(result: CiResult, model: str) -> Iterator[GaugeMetricFamily]:
    code = {(result.command,): result.exit_code}
    meaning = "Exit code of the command: 0 passed, 1 rejected, 2 could not judge."
    yield _gauge(model, "exit_code", meaning, code, "command")
    verdicts = {(each.value,): float(each is result.verdict) for each in _DECISIVE}
    meaning = "1 for the verdict on the file, 0 for the others."
    yield _gauge(model, "verdict", meaning, verdicts, "verdict")


def _file_gauges(summary: Summary, model: str) -> Iterator[GaugeMetricFamily]:
    subject = summary.subject
    file = {(str(subject.sha256), str(subject.policy_sha256 or "")): 1}
    meaning = "Always 1; the labels are the judged file and its policy."
    yield _gauge(model, "file", meaning, file, "sha256", "policy")
    yield _gauge(model, "samples", "Number of samples of the measurement.", {(): subject.samples})
    size, meaning = {(): subject.size_bytes}, "Size of the file with its external data."
    yield _gauge(model, "file_size", meaning, size, unit="bytes")
    for name, text in (("measured", subject.measured_at), ("decided", subject.decided_at)):
        seconds = _seconds(text)
        if seconds is not None:
            meaning = f"Time at which the file was {name}, since 1970."
            yield _gauge(model, f"{name}_timestamp", meaning, {(): seconds}, unit="seconds")


def _runtime_gauges(summary: Summary, model: str) -> Iterator[GaugeMetricFamily]:
    rows = [(make_printable(row.runtime), row) for row in summary.proof]
    passed = {(name, row.state): float(row.state == "passed") for name, row in rows}
    meaning = "1 if every check of the runtime passed."
    yield _gauge(model, "runtime_passed", meaning, passed, "runtime", "state")
    agreement = {(name,): row.agreement for name, row in rows if row.agreement is not None}
    meaning = "Lowest judged top-1 agreement."
    yield _gauge(model, "top1_agreement", meaning, agreement, "runtime", unit="ratio")
    latency = {(name,): row.latency_ms / 1e3 for name, row in rows if row.latency_ms is not None}
    meaning = "Median time of a batch."
    yield _gauge(model, "batch_latency", meaning, latency, "runtime", unit="seconds")


def _check_gauges(summary: Summary, model: str) -> Iterator[GaugeMetricFamily]:
    counts = Counter(
        (make_printable(row.check.runtime or MEASUREMENT), row.check.verdict.value)
        for row in summary.check_rows
    )
    yield _gauge(model, "checks", "Number of checks by verdict.", counts, "runtime", "verdict")
    rows = {
        labels: (row.check.observed, row.check.bound, row.bound_usage)
        for labels, row in _unique_checks(summary).items()
    }
    for column, (name, meaning, unit) in enumerate(_CHECK_GAUGES):
        numbers = {labels: row[column] for labels, row in rows.items()}
        values = {labels: value for labels, value in numbers.items() if isinstance(value, float)}
        yield _gauge(model, name, meaning, values, *_CHECK, unit=unit)


def _unique_checks(summary: Summary) -> dict[tuple[str, ...], CheckRow]:
    """Return the checks by their labels. Of checks with equal labels, the first one that does not
    pass: a series must be unique."""
    rows: dict[tuple[str, ...], CheckRow] = {}
    for row in sorted(summary.check_rows, key=lambda row: row.check.verdict is Verdict.PASS):
        check = row.check
        runtime = check.runtime or MEASUREMENT
        names = (check.part, runtime, check.output, check.name, check.point)
        rows.setdefault(tuple(make_printable(name or "") for name in names), row)
    return rows


def _seconds(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)

_FINGERPRINT = "parityGate/v1"


def sarif_log(
    report: LintReport | None,
    *,
    exit_code: int,
    failure: str = "",
    file_of: Callable[[str], str] = str,
) -> str:
    """Return the JSON text: every rule with its help, every finding with file and line.

    `report`: None if the source could not be read, with the reason in `failure`. A viewer then
    shows an error instead of a model without findings. `file_of`: maps the path of a finding's file
    below the import path to its path in the repository. Silenced findings are included as
    suppressed in source.
    """
    rules = [
        {
            "id": code,
            "shortDescription": {"text": f"{rule.title}."},
            "fullDescription": {"text": f"{rule.message}."},
            "help": {
                "text": f"{rule.message}. Instead: {rule.rewrite}. docs/lint/{code}.md",
                "markdown": f"{rule.message}.\n\n**Instead:** {rule.rewrite}.\n\n"
                f"More: `docs/lint/{code}.md`. `# noqa: {code}` on the line silences it.",
            },
            "defaultConfiguration": {"level": rule.level},
            "properties": {"strategies": sorted(rule.strategies)},
        }
        for code, rule in RULES.items()
    ]
    if report is None:
        return _sarif("parity-gate", rules, [], exit_code, [_notice("error", failure)])
    notices = [_notice("warning", f"not read: {c.name}: {c.reason}") for c in report.unread]
    results = list(_results(report, file_of))
    return _sarif("parity-gate", rules, results, exit_code, notices, columnKind="unicodeCodePoints")


def _notice(level: str, text: str) -> dict[str, Any]:
    return {"level": level, "message": {"text": make_printable(text) or "it failed"}}


def _sarif(
    tool: str,
    rules: list[dict[str, Any]],
    results: list[dict[str, Any]],
    exit_code: int,
    notices: list[dict[str, Any]],
    **more: str,
) -> str:
    version = metadata.version("parity-gate")
    invocation = {
        "executionSuccessful": exit_code < 2,
        "exitCode": exit_code,
        "toolExecutionNotifications": notices,
    }
    run = {
        "tool": {"driver": {"name": tool, "semanticVersion": version, "rules": rules}},
        "invocations": [invocation],
        **more,
        "results": results,
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _results(report: LintReport, file_of: Callable[[str], str]) -> Iterator[dict[str, Any]]:
    rule_indices = {code: index for index, code in enumerate(RULES)}
    alike: Counter[str] = Counter()
    for finding in report.findings:
        fingerprint = _fingerprint(finding)
        alike[fingerprint] += 1
        result = {
            "ruleId": finding.code,
            "ruleIndex": rule_indices[finding.code],
            "level": finding.level,
            "message": {"text": make_printable(_message(finding))},
            "locations": [_location(finding, file_of(finding.path))],
            "partialFingerprints": {_FINGERPRINT: f"{fingerprint}:{alike[fingerprint]}"},
        }
        if finding.suppressed:
            result["suppressions"] = [{"kind": "inSource"}]
        yield result


def _message(finding: LintFinding) -> str:
    module = f" (in {finding.module})" if finding.module else ""
    return f"{finding.expression}{module}: {finding.message}. Instead: {finding.rewrite}."


def _location(finding: LintFinding, file: str) -> dict[str, Any]:
    snippet = {"snippet": {"text": make_printable(finding.expression)}}
    location = _line(file, finding.line, **snippet)
    if finding.module:
        name = make_printable(finding.module)
        location["logicalLocations"] = [{"fullyQualifiedName": name, "kind": "module"}]
    return location


def _fingerprint(finding: LintFinding) -> str:
    """Return an identifier that does not depend on the lines above the finding."""
    text = "\0".join((finding.code, finding.path, finding.expression))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def check_sarif_log(result: CiResult, *, file: str, source: tuple[str, int] | None) -> str:
    """Return the JSON text of a verdict: one result for each finding that fails or could not be
    judged, none for a file that passes.

    file: path of the ONNX file in the repository; source: file and line of the diverging module, to
    which the first finding points.
    """
    findings = [] if result.summary is None else list(result.summary.findings)
    findings = [each for each in findings if each.verdict in (Verdict.FAIL, Verdict.ERROR)]
    rules = {each.cause: each.title for each in reversed(findings)}
    results = [
        {
            "ruleId": finding.cause,
            "ruleIndex": list(rules).index(finding.cause),
            "level": "error",
            "message": {"text": make_printable(_with_remedy(finding))},
            "locations": [_line(*(source if source and not number else (file, 1)))],
            "partialFingerprints": {_FINGERPRINT: f"{finding.cause}:{file}"},
        }
        for number, finding in enumerate(findings)
    ]
    return _sarif(
        "parity-gate check",
        [
            {"id": cause, "shortDescription": {"text": make_printable(title)}}
            for cause, title in rules.items()
        ],
        results,
        result.exit_code,
        [] if findings or result.exit_code == 0 else [_notice("error", result.reason)],
    )


def _with_remedy(finding: Finding) -> str:
    text = f"{finding.title}: {finding.sentence}."
    return f"{text} Try: {finding.remedy}." if finding.remedy else text


def _line(file: str, line: int, **more: Any) -> dict[str, Any]:
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": quote(file), "uriBaseId": "%SRCROOT%"},
            "region": {"startLine": line, **more},
        }
    }
