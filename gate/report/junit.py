"""The checks as JUnit XML: what GitLab, Jenkins and others show as tests.

One suite a runtime, one case a check. A build that is not green has a case that says why, also
where no check does: a refused promotion, a file that could not be read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from xml.etree import ElementTree

from gate.decision.checks import Verdict
from gate.report.ci import CiResult
from gate.story.story import Story, Word
from gate.story.wording import printable
from gate.story.words import measure

_ELEMENTS = {Verdict.FAIL: "failure", Verdict.ERROR: "error", Verdict.WAIVED: "skipped"}
_COUNTED = {"tests": "testcase", "failures": "failure", "errors": "error"}
"""Of a suite and of the whole. Jenkins' plug-in xUnit refuses a file that counts what was skipped,
too, in the whole: its schema knows that count in a suite alone."""
_SECONDS = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
MEASUREMENT = "measurement"
"""The suite of checks that are about no runtime; the report calls them so, too."""


def junit(result: CiResult) -> str:
    """The XML text: suites `parity-gate.<runtime>`, cases `<part> / <output> / <check>`; a FAIL
    is a `failure`, an ERROR an `error`, a WAIVED check is `skipped`."""
    root = ElementTree.Element("testsuites", name="parity-gate")
    suites = [] if result.story is None else list(_suites(result.story))
    if not result.shown_by_a_check:
        suites.append(_suite(result.command, [_riddle(result)]))
    root.extend(suites)
    _count(root)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, "unicode")}\n'


def _suites(story: Story) -> Iterator[ElementTree.Element]:
    runtimes = dict.fromkeys(row.runtime for row in story.proof)
    causes = {
        check.title: f"{finding.title}: {finding.sentence}"
        for finding in story.findings
        for check in finding.checks
    }
    words: dict[str, list[Word]] = {name: [] for name in runtimes}
    for word in story.words:
        words.setdefault(word.check.runtime or MEASUREMENT, []).append(word)
    for runtime, found in words.items():
        if found:
            suite = _suite(runtime, [_case(word, causes) for word in found])
            suite.insert(0, _properties(story))
            if _SECONDS.match(story.subject.decided_at):
                suite.set("timestamp", story.subject.decided_at[:19])
            yield suite


def _suite(name: str, cases: Iterable[ElementTree.Element]) -> ElementTree.Element:
    """A suite whose cases have names of their own: GitLab takes equal ones for one test."""
    suite = ElementTree.Element("testsuite", name=f"parity-gate.{printable(name)}")
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


def _properties(story: Story) -> ElementTree.Element:
    subject = story.subject
    found = {
        "model": subject.name,
        "file": subject.sha256,
        "policy": subject.policy_sha256,
        "evidence": subject.evidence_sha256,
        "machine": subject.machine,
    }
    made = ElementTree.Element("properties")
    for name, value in found.items():
        if value is not None:
            ElementTree.SubElement(made, "property", name=name, value=printable(str(value)))
    return made


def _case(word: Word, causes: Mapping[str, str]) -> ElementTree.Element:
    check = word.check
    places = (check.part, check.output, check.label)
    title = " / ".join(place for place in places if place)
    case = ElementTree.Element("testcase", name=printable(title))
    if check.verdict in _ELEMENTS:
        short = printable(measure(check) or check.explanation)
        found = ElementTree.SubElement(case, _ELEMENTS[check.verdict], message=short)
        found.set("type", check.name)
        found.text = "\n".join(_sentences(word, causes.get(check.title)))
    return case


def _sentences(word: Word, cause: str | None) -> Iterator[str]:
    """For those who open the case: the cause first, which many cases may share."""
    check = word.check
    if cause is not None:
        yield printable(cause)
    yield printable(check.explanation)
    yield f"Asks: {printable(word.meaning)}"
    if check.bound is not None:
        yield f"Why this bound: {printable(word.why)}"
    if check.remedy:
        yield f"Try: {printable(check.remedy)}"


def _riddle(result: CiResult) -> ElementTree.Element:
    """The case that says what no check says."""
    case = ElementTree.Element("testcase", name=result.title)
    tag = "failure" if result.colour == "rejected" else "error"
    found = ElementTree.SubElement(case, tag, message=printable(result.reason))
    found.set("type", result.colour)
    found.text = printable(result.reason)
    return case
