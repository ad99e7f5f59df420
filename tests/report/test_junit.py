from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import xmlschema

from gate.decision.check_result import Verdict
from gate.report.ci_formats import CiResult, junit_xml
from tests.report.ci_results import RESULTS

SCHEMA = xmlschema.XMLSchema(str(Path(__file__).parent / "schemas" / "junit.xsd"))
TAGS = {Verdict.FAIL: "failure", Verdict.ERROR: "error", Verdict.WAIVED: "skipped"}


@pytest.mark.parametrize("name", RESULTS)
def test_the_schema_holds(name: str) -> None:
    assert [error.reason for error in SCHEMA.iter_errors(junit_xml(RESULTS[name]()))] == []


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("<testsuites", "<suites"),
        ('tests="', 'count="'),
        ('name="parity-gate.ort-cpu"', 'name="ort-cpu"'),
        ('classname="', 'class="'),
        ('failures="', 'failures="-'),
        ('<testsuites name="parity-gate"', '<testsuites name="parity-gate" skipped="0"'),
        ("<failure ", "<fault "),
        ('type="noise_ratio"', ""),
        ('name="logits / noise_peak"', 'name="logits / noise_ratio"'),
    ],
)
def test_the_schema_refuses(text: str, instead: str) -> None:
    good = junit_xml(RESULTS["rejected"]())
    assert text in good
    end = {"<testsuites": "testsuites>", "<failure ": "failure>"}.get(text)
    bad = good.replace(text, instead, 1)
    if end:
        bad = bad.replace(f"</{end}", f"</{instead.strip('< ')}>", 1)
    assert not SCHEMA.is_valid(bad)


@pytest.mark.parametrize("name", RESULTS)
def test_its_colour_is_that_of_the_exit_code(name: str) -> None:
    result = RESULTS[name]()
    root = ElementTree.fromstring(junit_xml(result))
    red = {tag for tag in ("failure", "error") if list(root.iter(tag))}
    assert ("failure" in red) == (result.exit_code == 1)
    assert bool(red) == (result.exit_code != 0)


@pytest.mark.parametrize("name", ["passed", "rejected", "unjudged"])
def test_a_check_is_a_case_in_the_suite_of_its_runtime(name: str) -> None:
    result = RESULTS[name]()
    assert result.story is not None
    root = ElementTree.fromstring(junit_xml(result))
    expected = [
        (f"parity-gate.{word.check.runtime or 'measurement'}", TAGS.get(word.check.verdict))
        for word in result.story.words
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


def test_a_failure_says_the_cause_first_then_the_number_and_what_to_try() -> None:
    root = ElementTree.fromstring(junit_xml(RESULTS["rejected"]()))
    suite = root.find("testsuite[@name='parity-gate.ort-cpu']")
    assert suite is not None
    found = suite.find("testcase[@name='logits / noise_ratio']/failure")
    assert found is not None
    assert found.get("message") == "34 × rounding, allowed 3.335"
    first, *rest = str(found.text).splitlines()
    assert first.startswith("A layer differs: The weight of layer3.0.conv1")
    assert any(line.startswith("Try: ") for line in rest)


def test_what_no_check_says_is_a_case_of_its_own() -> None:
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


def test_names_that_attack_stay_text() -> None:
    text = junit_xml(RESULTS["hostile"]())
    assert "<script" not in text
    assert "\x1b" not in text


def test_each_part_of_a_release_has_its_own_cases() -> None:
    names = re.findall(r'<testcase name="(.*?)"', junit_xml(RESULTS["parts"]()))
    assert "encoder / logits / noise_ratio" in names
    assert "decoder / logits / noise_ratio" in names
    assert not [name for name in names if name.endswith("(2)")]
