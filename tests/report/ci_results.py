"""Results of commands with each exit code, for the tests of CI formats."""

from __future__ import annotations

from functools import partial
from typing import Any

from gate.report.ci_formats import CiResult
from gate.report.html_page import Report
from gate.summary.summarize import summarize
from gate.summary.summary import Summary
from tests.report import report_records
from tests.report.samples import HOSTILE, failed


def _summary(case: Report) -> Summary:
    return summarize(case.decision, case.evidence, explanation=case.explanation)


def parts() -> CiResult:
    """Return a release of two files with the same checks."""
    summary = _summary(report_records.rejected())
    rows = tuple(
        row.model_copy(update={"check": row.check.model_copy(update={"part": part})})
        for part in ("encoder", "decoder")
        for row in summary.check_rows
    )
    summary = summary.model_copy(update={"check_rows": rows})
    return CiResult(command="check", exit_code=1, summary=summary)


def _of(case: Any, exit_code: int, name: str | None = None, **fields: Any) -> CiResult:
    summary = _summary(case()).about(name=name)
    return CiResult(**{"command": "check", "exit_code": exit_code, "summary": summary, **fields})


RESULTS = {
    "passed": partial(_of, report_records.passed, 0),
    "rejected": partial(_of, report_records.rejected, 1),
    "unjudged": partial(_of, report_records.unjudged, 2),
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
    "refused": partial(_of, report_records.passed, 1, "digits", command="promote", model="digits",
                       sentence="refused: version 7 was taken back"),
    "promoted": partial(_of, report_records.passed, 0, "digits", command="promote",
                        sentence="promoted: version 8 is champion",
                        links={"Model version": "http://127.0.0.1:5000/#/models/digits/versions/8"}),
    "hostile": lambda: CiResult(
        command="check", exit_code=1, summary=summarize(*failed(HOSTILE)), model=HOSTILE
    ),
    "parts": parts,
}  # fmt: skip
"""Functions that create each result, by name."""
