"""JUnit and OpenMetrics files of command results."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
import xmlschema
from prometheus_client import parser as older
from prometheus_client.openmetrics import parser

from gate import Verdict
from gate.report.ci_formats import CiResult, check_sarif_log, junit_xml, openmetrics_text
from gate.report.markdown import literal, pull_request_comment
from tests.report.ci_results import RESULTS

SCHEMA = xmlschema.XMLSchema(str(Path(__file__).parent / "schemas" / "junit.xsd"))
TAGS = {Verdict.FAIL: "failure", Verdict.ERROR: "error", Verdict.WAIVED: "skipped"}


@pytest.mark.parametrize("name", RESULTS)
def test_junit_is_valid_and_its_failures_match_the_exit_code(name):
    result = RESULTS[name]()
    text = junit_xml(result)
    assert [error.reason for error in SCHEMA.iter_errors(text)] == []
    assert "<script" not in text
    assert "\x1b" not in text
    root = ElementTree.fromstring(text)
    red = {tag for tag in ("failure", "error") if list(root.iter(tag))}
    assert ("failure" in red) == (result.exit_code == 1)
    assert bool(red) == (result.exit_code != 0)


@pytest.mark.parametrize("name", ["passed", "rejected", "unjudged"])
def test_check_is_a_junit_case_of_its_runtime(name):
    result = RESULTS[name]()
    assert result.summary is not None
    root = ElementTree.fromstring(junit_xml(result))
    expected = [
        (f"parity-gate.{word.check.runtime or 'measurement'}", TAGS.get(word.check.verdict))
        for word in result.summary.check_rows
    ]
    matches = [
        (suite.get("name"), case[0].tag if len(case) else None)
        for suite in root
        for case in suite.iter("testcase")
    ]
    assert sorted(map(str, matches)) == sorted(map(str, expected))
    counts = {"tests": "testcase", "failures": "failure", "errors": "error"}
    for element in (root, *root):
        counted = counts if element is root else counts | {"skipped": "skipped"}
        for attribute, tag in counted.items():
            assert element.get(attribute) == str(len(list(element.iter(tag))))


def test_junit_failure_has_cause_number_and_remedy():
    root = ElementTree.fromstring(junit_xml(RESULTS["rejected"]()))
    suite = root.find("testsuite[@name='parity-gate.ort-cpu']")
    assert suite is not None
    result = suite.find("testcase[@name='logits / noise_ratio']/failure")
    assert result is not None
    assert result.get("message") == "2.878e+04 × rounding, allowed 1.5"
    first, *rest = str(result.text).splitlines()
    assert first.startswith("A layer differs: head.weight")
    assert any(line.startswith("Try: ") for line in rest)


def test_result_without_check_is_a_junit_case():
    for name, tag, says in (
        ("refused", "failure", "refused: version 7 was taken back"),
        ("nothing", "error", "model.onnx does not exist."),
        ("unexported", "failure", "the model's source forbids every strategy"),
    ):
        result: CiResult = RESULTS[name]()
        root = ElementTree.fromstring(junit_xml(result))
        (case,) = root.findall(f"testsuite[@name='parity-gate.{result.command}']/testcase")
        assert (case[0].tag, case[0].get("message")) == (tag, says)
        assert case.get("name") == result.title


@pytest.mark.parametrize("name", ["rejected", "unjudged"])
def test_every_format_has_headline_and_remedy(name):
    result: CiResult = RESULTS[name]()
    assert result.summary is not None
    headline = result.summary.headline
    assert headline.remedy is not None
    junit = "".join(ElementTree.fromstring(junit_xml(result)).itertext())
    assert f"{headline.sentence}\n" in junit
    assert f"Try: {headline.remedy}\n" in f"{junit}\n"
    sarif = check_sarif_log(result, file="model.onnx", source=None)
    (first, *_) = json.loads(sarif)["runs"][0]["results"]
    assert headline.sentence in first["message"]["text"]
    assert f"Try: {headline.remedy}".endswith(first["message"]["text"].partition("Try: ")[2])
    assert first["ruleId"] == headline.cause
    for text in (headline.sentence, headline.remedy):
        assert literal(text) in pull_request_comment(result)


def test_each_part_has_its_own_junit_cases():
    names = re.findall(r'<testcase name="(.*?)"', junit_xml(RESULTS["parts"]()))
    assert "encoder / logits / noise_ratio" in names
    assert "decoder / logits / noise_ratio" in names
    assert not [name for name in names if name.endswith("(2)")]


Series = tuple[str, frozenset[tuple[str, str]]]


def read_series(text: str) -> dict[Series, float]:
    """Parse the metrics as Prometheus does; each series must be unique."""
    families = list(parser.text_string_to_metric_families(text))
    samples = [sample for family in families for sample in family.samples]
    keys = Counter((sample.name, frozenset(sample.labels.items())) for sample in samples)
    assert {family.type for family in families} == {"gauge"}
    assert {key: count for key, count in keys.items() if count > 1} == {}
    return {(s.name, frozenset(s.labels.items())): s.value for s in samples}


def metric_value(result: CiResult, name: str, **labels: str) -> float:
    arguments = labels.items()
    (actual,) = (
        number
        for (title, pairs), number in read_series(openmetrics_text(result)).items()
        if title == f"parity_gate_{name}" and arguments <= dict(pairs).items()
    )
    return actual


@pytest.mark.parametrize("name", RESULTS)
def test_metrics_are_read_by_prometheus(name):
    result = RESULTS[name]()
    text = openmetrics_text(result)
    assert text.endswith("\n# EOF\n")
    assert "\x1b" not in text
    series = read_series(text)
    before = [s for family in older.text_string_to_metric_families(text) for s in family.samples]
    assert {(s.name, frozenset(s.labels.items())) for s in before} == series.keys()
    assert metric_value(result, "exit_code", command=result.command) == result.exit_code
    for verdict in ("PASS", "FAIL", "ERROR"):
        assert metric_value(result, "verdict", verdict=verdict) == (result.verdict == verdict)


def test_metrics_have_numbers_of_runtimes():
    result = RESULTS["rejected"]()
    assert result.summary is not None
    assert metric_value(result, "runtime_passed", runtime="ort-cpu") == 0
    assert metric_value(RESULTS["passed"](), "runtime_passed", runtime="ort-cpu") == 1
    assert metric_value(result, "top1_agreement_ratio", runtime="ort-cpu") == 1
    (row,) = [row for row in result.summary.proof if row.runtime == "ort-cpu"]
    assert row.latency_ms is not None
    latency = metric_value(result, "batch_latency_seconds", runtime="ort-cpu")
    assert latency == pytest.approx(row.latency_ms / 1e3)
    assert metric_value(result, "checks", runtime="ort-cpu", verdict="FAIL") == 18
    assert metric_value(result, "samples") == 48
    assert metric_value(result, "decided_timestamp_seconds") == 1772644500
