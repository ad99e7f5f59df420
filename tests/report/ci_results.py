"""Results of commands with each exit code, for the tests of CI formats."""

from __future__ import annotations

from gate.report.ci_formats import CiResult
from gate.report.html_page import Report
from gate.summary.summarize import summarize
from gate.summary.summary import Summary
from tests.report import report_records
from tests.report.samples import HOSTILE, failed


def _story(case: Report) -> Summary:
    return summarize(case.decision, case.evidence, explanation=case.explanation)


def hostile() -> CiResult:
    """Return a result with malicious names and NaN."""
    return CiResult(
        command="check", exit_code=1, summary=summarize(*failed(HOSTILE)), model=HOSTILE
    )


def duplicate_checks() -> CiResult:
    """Return a summary that contains each check twice, one of them with both verdicts."""
    summary = _story(report_records.rejected())
    passed = _story(report_records.passed())
    return CiResult(
        command="check",
        exit_code=1,
        summary=summary.model_copy(
            update={"check_rows": (*passed.check_rows, *summary.check_rows)}
        ),
    )


def parts() -> CiResult:
    """Return a release of two files with the same checks."""
    summary = _story(report_records.rejected())
    words = [
        word.model_copy(update={"check": word.check.model_copy(update={"part": part})})
        for part in ("encoder", "decoder")
        for word in summary.check_rows
    ]
    return CiResult(
        command="check",
        exit_code=1,
        summary=summary.model_copy(update={"check_rows": tuple(words)}),
    )


RESULTS = {
    "passed": lambda: CiResult(
        command="check", exit_code=0, summary=_story(report_records.passed())
    ),
    "rejected": lambda: CiResult(
        command="check", exit_code=1, summary=_story(report_records.rejected())
    ),
    "unjudged": lambda: CiResult(
        command="check", exit_code=2, summary=_story(report_records.unjudged())
    ),
    "nothing": lambda: CiResult(
        command="check", exit_code=2, model="m:build", sentence="model.onnx does not exist."
    ),
    "bare": lambda: CiResult(command="check", exit_code=2),
    "unexported": lambda: CiResult(
        command="export",
        is_stage=True,
        exit_code=1,
        sentence="the model's source forbids every strategy",
    ),
    "refused": lambda: CiResult(
        command="promote",
        exit_code=1,
        model="digits",
        sentence="refused: version 7 was taken back",
        summary=_story(report_records.passed()).about(name="digits"),
    ),
    "promoted": lambda: CiResult(
        command="promote",
        exit_code=0,
        sentence="promoted: version 8 is champion",
        summary=_story(report_records.passed()).about(name="digits"),
        links={"Model version": "http://127.0.0.1:5000/#/models/digits/versions/8"},
    ),
    "hostile": hostile,
    "twice": duplicate_checks,
    "parts": parts,
}
"""Functions that create each result, by name."""
