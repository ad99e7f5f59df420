"""Terminal, Markdown, page and MLflow show the same summary. tests/frozen contains the texts."""

import re
from dataclasses import replace

import pytest

from gate.report.markdown import summary_markdown
from gate.summary.summarize import summarize
from tests.frozen.test_decisions import html, mlflow, terminal
from tests.report import report_records
from tests.reused_charts import reused_charts

__all__ = ["reused_charts"]


@pytest.mark.parametrize(
    "make", [report_records.passed, report_records.rejected, report_records.unjudged]
)
def test_all_output_formats_show_the_same_findings(make):
    case = make()
    summary = summarize(case.decision, case.evidence, explanation=case.explanation)
    summary = summary.about(name="digits").with_files({"MODEL.onnx": "digits.onnx"})
    texts = {
        "terminal": terminal(summary),
        "markdown": summary_markdown(summary, {"MLflow run": "#/experiments/1/runs/2"}),
        "html": html(replace(case, summary=summary)),
        "mlflow": mlflow(case.decision, summary),
    }
    plain = re.sub(r"[\\`*_]", "", summary.headline.sentence)
    for surface, printed in texts.items():
        text = " ".join(re.sub(r"[\\`*_]", "", printed).split())
        assert plain.split(";")[0] in text, surface
        assert summary.headline.verdict in text, surface
        assert "None" not in text.replace("no None", ""), surface
        for finding in summary.findings if surface in ("markdown", "html") else ():
            assert re.sub(r"[\\`*_]", "", finding.title) in text, surface
