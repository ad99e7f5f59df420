"""JUnit and OpenMetrics of what a command came to."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
import xmlschema
from prometheus_client import parser as older
from prometheus_client.openmetrics import parser

from gate import Verdict
from gate.report.ci_formats import CiResult, junit_xml, openmetrics_text
from tests.report.ci_results import RESULTS
from tests.report.samples import HOSTILE

SCHEMA = xmlschema.XMLSchema(str(Path(__file__).parent / "schemas" / "junit.xsd"))
TAGS = {Verdict.FAIL: "failure", Verdict.ERROR: "error", Verdict.WAIVED: "skipped"}


@pytest.mark.parametrize("name", RESULTS)
def test_the_schema_of_junit_holds(name):
    assert [error.reason for error in SCHEMA.iter_errors(junit_xml(RESULTS[name]()))] == []


@pytest.mark.parametrize(("text", "instead"), [
    ("<testsuites", "<suites"),
    ('tests="', 'count="'),
    ('name="parity-gate.ort-cpu"', 'name="ort-cpu"'),
    ('classname="', 'class="'),
    ('failures="', 'failures="-'),
    ('<testsuites name="parity-gate"', '<testsuites name="parity-gate" skipped="0"'),
    ("<failure ", "<fault "),
    ('type="noise_ratio"', ""),
    ('name="logits / noise_peak"', 'name="logits / noise_ratio"'),
])  # fmt: skip
def test_the_schema_of_junit_refuses(text, instead):
    good = junit_xml(RESULTS["rejected"]())
    assert text in good
    end = {"<testsuites": "testsuites>", "<failure ": "failure>"}.get(text)
    bad = good.replace(text, instead, 1)
    if end:
        bad = bad.replace(f"</{end}", f"</{instead.strip('< ')}>", 1)
    assert not SCHEMA.is_valid(bad)


@pytest.mark.parametrize("name", RESULTS)
def test_its_colour_is_that_of_the_exit_code(name):
    result = RESULTS[name]()
    root = ElementTree.fromstring(junit_xml(result))
    red = {tag for tag in ("failure", "error") if list(root.iter(tag))}
    assert ("failure" in red) == (result.exit_code == 1)
    assert bool(red) == (result.exit_code != 0)


@pytest.mark.parametrize("name", ["passed", "rejected", "unjudged"])
def test_a_check_is_a_case_in_the_suite_of_its_runtime(name):
    result = RESULTS[name]()
    assert result.summary is not None
    root = ElementTree.fromstring(junit_xml(result))
    expected = [
        (f"parity-gate.{word.check.runtime or 'measurement'}", TAGS.get(word.check.verdict))
        for word in result.summary.words
    ]
    found = [
        (suite.get("name"), case[0].tag if len(case) else None)
        for suite in root
        for case in suite.iter("testcase")
    ]
    assert sorted(map(str, found)) == sorted(map(str, expected))
    counts = {"tests": "testcase", "failures": "failure", "errors": "error"}
    for element in (root, *root):
        counted = counts if element is root else counts | {"skipped": "skipped"}
        for attribute, tag in counted.items():
            assert element.get(attribute) == str(len(list(element.iter(tag))))


def test_a_failure_says_the_cause_first_then_the_number_and_what_to_try():
    root = ElementTree.fromstring(junit_xml(RESULTS["rejected"]()))
    suite = root.find("testsuite[@name='parity-gate.ort-cpu']")
    assert suite is not None
    found = suite.find("testcase[@name='logits / noise_ratio']/failure")
    assert found is not None
    assert found.get("message") == "34 × rounding, allowed 3.335"
    first, *rest = str(found.text).splitlines()
    assert first.startswith("A layer differs: The weight of layer3.0.conv1")
    assert any(line.startswith("Try: ") for line in rest)


def test_what_no_check_says_is_a_case_of_its_own():
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


def test_names_that_attack_stay_text():
    text = junit_xml(RESULTS["hostile"]())
    assert "<script" not in text
    assert "\x1b" not in text


def test_each_part_of_a_release_has_its_own_cases():
    names = re.findall(r'<testcase name="(.*?)"', junit_xml(RESULTS["parts"]()))
    assert "encoder / logits / noise_ratio" in names
    assert "decoder / logits / noise_ratio" in names
    assert not [name for name in names if name.endswith("(2)")]


Series = tuple[str, frozenset[tuple[str, str]]]


def series(text: str) -> dict[Series, float]:
    """What Prometheus reads, each once."""
    families = list(parser.text_string_to_metric_families(text))
    samples = [sample for family in families for sample in family.samples]
    keys = Counter((sample.name, frozenset(sample.labels.items())) for sample in samples)
    assert {family.type for family in families} == {"gauge"}
    assert {key: count for key, count in keys.items() if count > 1} == {}
    return {(s.name, frozenset(s.labels.items())): s.value for s in samples}


def value(result: CiResult, name: str, **labels: str) -> float:
    given = labels.items()
    (found,) = (
        number
        for (title, pairs), number in series(openmetrics_text(result)).items()
        if title == f"parity_gate_{name}" and given <= dict(pairs).items()
    )
    return found


@pytest.mark.parametrize("name", RESULTS)
def test_prometheus_reads_it_old_and_new(name):
    text = openmetrics_text(RESULTS[name]())
    assert text.endswith("\n# EOF\n")
    found = series(text)
    before = [s for family in older.text_string_to_metric_families(text) for s in family.samples]
    assert {(s.name, frozenset(s.labels.items())) for s in before} == found.keys()


@pytest.mark.parametrize("name", RESULTS)
def test_the_verdict_and_the_exit_code(name):
    result = RESULTS[name]()
    assert value(result, "exit_code", command=result.command) == result.exit_code
    for verdict in ("PASS", "FAIL", "ERROR"):
        assert value(result, "verdict", verdict=verdict) == (result.verdict == verdict)


def test_runtimes_and_checks_have_their_numbers():
    result = RESULTS["rejected"]()
    check = {"runtime": "ort-cpu", "output": "logits", "check": "noise_ratio"}
    assert value(result, "check_observed", **check) == pytest.approx(34)
    assert value(result, "check_bound", **check) == pytest.approx(3.3354, abs=1e-4)
    assert value(result, "check_used_ratio", **check) == pytest.approx(34 / 3.3354, rel=1e-4)
    assert value(result, "runtime_passed", runtime="ort-cpu") == 0
    assert value(RESULTS["passed"](), "runtime_passed", runtime="ort-cpu") == 1
    assert value(result, "top1_agreement_ratio", runtime="ort-cpu") == 1
    assert value(result, "batch_latency_seconds", runtime="ort-cpu") == pytest.approx(0.020)
    assert value(result, "checks", runtime="ort-cpu", verdict="FAIL") == 15
    assert value(result, "samples") == 400
    assert value(result, "decided_timestamp_seconds") == 1772644500


def test_nan_and_names_that_attack():
    result = RESULTS["hostile"]()
    found = series(openmetrics_text(result))
    assert any(math.isnan(number) for number in found.values())
    models = {dict(pairs)["model"] for _, pairs in found}
    assert models == {HOSTILE.replace("\x1b", "�").replace("\n", " ")}


def test_of_equal_checks_the_one_that_does_not_hold_is_shown():
    check = {"runtime": "ort-cpu", "output": "logits", "check": "noise_ratio"}
    assert value(RESULTS["twice"](), "check_observed", **check) == pytest.approx(34)


def test_each_part_of_a_release_has_its_own_series():
    check = {"runtime": "ort-cpu", "output": "logits", "check": "noise_ratio"}
    for part in ("encoder", "decoder"):
        assert value(RESULTS["parts"](), "check_observed", part=part, **check) == pytest.approx(34)
