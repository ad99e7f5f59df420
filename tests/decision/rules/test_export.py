"""Rules for export findings cover tracer warnings, hazards, lint and the export record."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate import Decision, Evidence, Verdict
from gate.policy.sections import ExportFindings
from gate.records.evidence import ExportRecord, SubjectPart
from gate.records.export import LEVELS, LintFinding
from gate.summary.render import render_check
from tests import builders

PASS, FAIL, ERROR = Verdict.PASS, Verdict.FAIL, Verdict.ERROR
STRATEGIES = st.builds(
    ExportFindings,
    tracer_warnings=st.sampled_from(["show", "refuse"]),
    hazards=st.sampled_from(["show", "refuse"]),
    lint=st.sampled_from(["show", "refuse_errors", "refuse_warnings"]),
    record=st.sampled_from(["optional", "required"]),
)


def finding(level: str = "error", **fields: Any) -> LintFinding:
    return LintFinding(
        code="TRC008",
        level=level,
        path="models/net.py",
        line=7,
        module="stem",
        expression="x.sum() > 0",
        message="baked",
        rewrite="torch.where",
        **fields,
    )


def evidence_with_export(**fields: Any) -> Evidence:
    return builders.evidence(export=ExportRecord(strategy="traced", settings={}, **fields))


def judge(evidence: Evidence, **settings: Any) -> Decision:
    return builders.judge(evidence, export_findings=ExportFindings(**settings))


def export_verdicts(decision: Decision) -> dict[str, Verdict]:
    return {c.name: c.verdict for c in decision.checks if c.name.startswith("export_")}


@pytest.mark.parametrize(
    ("asked", "fields", "expected"),
    [
        ({}, {}, {}),
        ({}, {"lint": (finding(),)}, {"export_lint": FAIL}),
        ({}, {"lint": (finding("warning"),)}, {"export_lint": PASS}),
        ({}, {"lint": (finding(suppressed=True),)}, {"export_lint": PASS}),
        ({"lint": "refuse_warnings"}, {"lint": (finding("warning"),)}, {"export_lint": FAIL}),
        ({"lint": "refuse_warnings"}, {"lint": (finding("note"),)}, {"export_lint": PASS}),
        ({"lint": "show"}, {"lint": (finding(),)}, {"export_lint": PASS}),
        ({}, {"tracer_warnings": ("x.py:1: baked",)}, {}),
        ({"tracer_warnings": "refuse"}, {"tracer_warnings": ("x",)}, {"export_tracer_warnings": FAIL}),
        ({"tracer_warnings": "refuse"}, {}, {}),
        ({}, {"hazards": ("Dropout is in training mode",)}, {}),
        ({"hazards": "refuse"}, {"hazards": ("Dropout",)}, {"export_hazards": FAIL}),
        ({"record": "required"}, {}, {}),
    ],
)  # fmt: skip
def test_export_findings_have_their_verdict(asked, fields, expected):
    decision = judge(evidence_with_export(**fields), **asked)
    assert export_verdicts(decision) == expected
    assert decision.passed is (FAIL not in expected.values())
    assert all(render_check(check, "remedy") for check in decision.checks if check.name in expected)


@pytest.mark.parametrize(("record", "expected"), [("optional", {}), ("required", {"export_record": ERROR})])  # fmt: skip
def test_missing_export_record(record, expected):
    evidence = builders.evidence(export=None)
    decision = judge(evidence, record=record, tracer_warnings="refuse", hazards="refuse")
    assert export_verdicts(decision) == expected
    assert decision.passed is (not expected)


def test_failed_lint_check_lists_locations():
    findings = (*(finding(),) * 5, finding(suppressed=True))
    (check,) = judge(evidence_with_export(lint=findings)).problems
    assert check.observed == 5.0
    assert "TRC008 error at models/net.py:7 (x.sum() > 0)" in render_check(check)
    assert "and 2 more" in render_check(check)
    assert "1 silenced by noqa" in render_check(check)


@given(
    asked=STRATEGIES,
    before=st.lists(st.sampled_from(LEVELS), max_size=3),
    added=st.sampled_from(LEVELS),
    suppressed=st.booleans(),
    warned=st.booleans(),
)
def test_additional_finding_never_turns_fail_into_pass(asked, before, added, suppressed, warned):
    lint = tuple(map(finding, before))
    less = evidence_with_export(lint=lint)
    more = evidence_with_export(
        lint=(*lint, finding(added, suppressed=suppressed)),
        tracer_warnings=("x",) if warned else (),
        hazards=("y",) if warned else (),
    )
    first, second = (builders.judge(each, export_findings=asked) for each in (less, more))
    assert first.passed or not second.passed


def test_unset_export_fields_are_not_serialized():
    assert "lint" not in evidence_with_export().to_json()
    assert "export_findings" not in builders.policy().to_json()


def test_each_part_needs_its_own_export_record():
    part = builders.evidence(export=None)
    subject_parts = {"head": SubjectPart(file="head.onnx", sha256=part.subject.sha256)}
    release = part.model_copy(
        update={
            "subject": part.subject.model_copy(update={"parts": subject_parts}),
            "parts": {"head": part},
        }
    )
    decision = judge(release, record="required")
    parts_without_record = [
        check.part for check in decision.checks if check.name == "export_record"
    ]
    assert parts_without_record == ["head"]
