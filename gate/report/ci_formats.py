"""JUnit, OpenMetrics, SARIF."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from typing import Any, Literal
from urllib.parse import quote
from xml.etree import ElementTree

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.exposition import generate_latest

from gate.decision.check_result import Verdict
from gate.lint.lint import LintReport
from gate.lint.rules import RULES
from gate.storage.safe_text import make_printable
from gate.summary.render import render_check, result_of, short_name
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
    if result.summary is not None:
        root.extend(_suites(result.summary))
    if not result.shown_by_a_check:
        tag, reason = (
            "failure" if result.outcome == "rejected" else "error",
            make_printable(result.reason),
        )
        case = _case(result.title, tag, kind=result.outcome, message=reason, text=reason)
        root.append(_suite(result.command, [case]))
    _count(root)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, "unicode")}\n'


def _suites(summary: Summary) -> Iterator[ElementTree.Element]:
    findings = {check.title: finding for finding in summary.findings for check in finding.checks}
    subject = summary.subject
    cases: dict[str, list[ElementTree.Element]] = {row.runtime: [] for row in summary.proof}
    for row in summary.check_rows:
        check = row.check
        title = short_name(check, several_outputs=True)
        finding = findings.get(check.title)
        text = _details(row, finding, onnx_reference=subject.is_onnx_reference)
        case = _case(title, _ELEMENTS.get(check.verdict), kind=check.name,
                     message=result_of(check), text=text)  # fmt: skip
        cases.setdefault(check.runtime or MEASUREMENT, []).append(case)
    properties = {
        "model": subject.name,
        "file": subject.sha256,
        "policy": subject.policy_sha256,
        "evidence": subject.evidence_sha256,
        "machine": subject.machine,
    }
    for runtime, of_runtime in cases.items():
        if of_runtime:
            suite = _suite(runtime, of_runtime)
            element = ElementTree.Element("properties")
            for name, value in properties.items():
                if value is not None:
                    shown = make_printable(str(value))
                    ElementTree.SubElement(element, "property", name=name, value=shown)
            suite.insert(0, element)
            if _SECONDS.match(subject.decided_at):
                suite.set("timestamp", subject.decided_at[:19])
            yield suite


def _case(
    title: str, tag: str | None, *, kind: str, message: str, text: str
) -> ElementTree.Element:
    """Return a case; `tag`: its outcome, None for a pass."""
    case = ElementTree.Element("testcase", name=make_printable(title))
    if tag is not None:
        message = make_printable(message)
        outcome = ElementTree.SubElement(case, tag, message=message, type=kind)
        outcome.text = text
    return case


def _suite(name: str, cases: Iterable[ElementTree.Element]) -> ElementTree.Element:
    """Return a suite with unique names of cases: GitLab merges cases with equal names."""
    suite = ElementTree.Element("testsuite", name=f"parity-gate.{make_printable(name)}")
    names: Counter[str] = Counter()
    for case in cases:
        title = case.get("name", "")
        names[title] += 1
        case.set("name", title if names[title] == 1 else f"{title} ({names[title]})")
        case.set("classname", suite.get("name", ""))
        suite.append(case)
    _count(suite)
    suite.set("skipped", str(len(list(suite.iter("skipped")))))
    return suite


def _count(element: ElementTree.Element) -> None:
    for attribute, tag in _COUNTED.items():
        element.set(attribute, str(len(list(element.iter(tag)))))


def _details(row: CheckRow, finding: Finding | None, *, onnx_reference: bool) -> str:
    """Return the lines of one case: first the cause, which it may share with other cases."""
    check, remedy = row.check, None
    if finding is not None and finding.cause != "evidence":  # its checks have other remedies
        remedy = finding.remedy
    lines = [make_printable(f"{finding.title}: {finding.sentence}")] if finding is not None else []
    lines += [render_check(check), f"Asks: {make_printable(row.meaning)}"]
    if check.bound is not None:
        lines.append(f"Why this bound: {make_printable(row.why)}")
    if remedy := remedy or render_check(check, "remedy", onnx_reference=onnx_reference):
        lines.append(f"Try: {remedy}")
    return "\n".join(lines)


# All are gauges, with names that node_exporter's textfile collector accepts, too.


_DECISIVE = (Verdict.PASS, Verdict.FAIL, Verdict.ERROR)


def openmetrics_text(result: CiResult) -> str:
    """Return the text, which ends with `# EOF`. Every series has the label `model` (docs/ci.md)."""
    registry, model = CollectorRegistry(), make_printable(result.subject)

    def gauge(
        name: str,
        meaning: str,
        values: Mapping[Any, float | None],
        *labels: str,
        unit: str = "",
    ) -> None:
        """Add a gauge. `values`: by tuples of values for `labels`; None: not measured."""
        added = Gauge(f"parity_gate_{name}", meaning, ("model", *labels), unit=unit,
                      registry=registry)  # fmt: skip
        for texts, value in values.items():
            if value is not None:
                added.labels(model, *map(make_printable, texts)).set(value)

    meaning = "Exit code of the command: 0 passed, 1 rejected, 2 could not judge."
    gauge("exit_code", meaning, {(result.command,): result.exit_code}, "command")
    verdicts = {(each.value,): float(each is result.verdict) for each in _DECISIVE}
    gauge("verdict", "1 for the verdict on the file, 0 for the others.", verdicts, "verdict")
    if result.summary is not None:
        subject, rows = result.summary.subject, result.summary.proof
        file = {(str(subject.sha256), str(subject.policy_sha256 or "")): 1.0}
        meaning = "Always 1; the labels are the judged file and its policy."
        gauge("file", meaning, file, "sha256", "policy")
        gauge("samples", "Number of samples of the measurement.", {(): subject.samples})
        size = {(): subject.size_bytes}
        gauge("file_size", "Size of the file with its external data.", size, unit="bytes")
        for name, text in (("measured", subject.measured_at), ("decided", subject.decided_at)):
            meaning = f"Time at which the file was {name}, since 1970."
            with suppress(ValueError):
                seconds = {(): datetime.fromisoformat(text).timestamp()}
                gauge(f"{name}_timestamp", meaning, seconds, unit="seconds")
        passed = {(row.runtime, row.state): float(row.state == "passed") for row in rows}
        meaning = "1 if every check of the runtime passed."
        gauge("runtime_passed", meaning, passed, "runtime", "state")
        agreement = {(row.runtime,): row.agreement for row in rows}
        meaning = "Lowest judged top-1 agreement."
        gauge("top1_agreement", meaning, agreement, "runtime", unit="ratio")
        latency = {(row.runtime,): row.latency_ms and row.latency_ms / 1e3 for row in rows}
        gauge("batch_latency", "Median time of a batch.", latency, "runtime", unit="seconds")
        checks = [row.check for row in result.summary.check_rows]
        counts = Counter((check.runtime or MEASUREMENT, check.verdict.value) for check in checks)
        gauge("checks", "Number of checks by verdict.", counts, "runtime", "verdict")
    exposition: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]  # it has no types
    return exposition.decode()


_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)

_FINGERPRINT = "parityGate/v1"

_RED = (Verdict.FAIL, Verdict.ERROR)


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
    codes = list(RULES)
    alike: Counter[str] = Counter()
    for finding in report.findings:
        # The fingerprint does not depend on the lines above the finding.
        same = "\0".join((finding.code, finding.path, finding.expression))
        fingerprint = hashlib.sha256(same.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        alike[fingerprint] += 1
        expression = make_printable(finding.expression)
        location = _line(file_of(finding.path), finding.line, snippet={"text": expression})
        where = ""
        if finding.module:
            where = f" (in {finding.module})"
            name = make_printable(finding.module)
            location["logicalLocations"] = [{"fullyQualifiedName": name, "kind": "module"}]
        text = f"{finding.expression}{where}: {finding.message}. Instead: {finding.rewrite}."
        result = {
            "ruleId": finding.code,
            "ruleIndex": codes.index(finding.code),
            "level": finding.level,
            "message": {"text": make_printable(text)},
            "locations": [location],
            "partialFingerprints": {_FINGERPRINT: f"{fingerprint}:{alike[fingerprint]}"},
        }
        if finding.suppressed:
            result["suppressions"] = [{"kind": "inSource"}]
        yield result


def check_sarif_log(result: CiResult, *, file: str, source: tuple[str, int] | None) -> str:
    """Return the JSON text of a verdict: one result for each finding that fails or could not be
    judged, none for a file that passes.

    file: path of the ONNX file in the repository; source: file and line of the diverging module, to
    which the first finding points.
    """
    summary = result.summary
    findings = [f for f in (summary.findings if summary else ()) if f.verdict in _RED]
    rules = {finding.cause: finding.title for finding in reversed(findings)}
    results = []
    for number, finding in enumerate(findings):
        text = f"{finding.title}: {finding.sentence}."
        text += f" Try: {finding.remedy.rstrip('.')}." if finding.remedy else ""
        results.append(
            {
                "ruleId": finding.cause,
                "ruleIndex": list(rules).index(finding.cause),
                "level": "error",
                "message": {"text": make_printable(text)},
                "locations": [_line(*(source if source and not number else (file, 1)))],
                "partialFingerprints": {_FINGERPRINT: f"{finding.cause}:{file}"},
            }
        )
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


def _line(file: str, line: int, **more: Any) -> dict[str, Any]:
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": quote(file), "uriBaseId": "%SRCROOT%"},
            "region": {"startLine": line, **more},
        }
    }
