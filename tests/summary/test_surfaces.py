"""Terminal, Markdown, page and MLflow print one story: each as it was approved, in golden files.

To approve another text: GATE_RENEW_FROZEN=1 pytest tests/summary, then read the diff.
"""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console

from gate.mlflow_client.runs import headline_tags, run_name, status_of
from gate.report.html_page import Report, render_page
from gate.report.markdown import summary_markdown
from gate.report.terminal import print_summary
from gate.summary.summarize import summarize
from gate.summary.summary import Summary
from tests.frozen.store import RENEW
from tests.report import stories
from tests.reused_charts import reused_charts

__all__ = ["reused_charts"]

GOLDEN = Path(__file__).parents[1] / "golden" / "story"
CASES = {"passed": stories.passed, "rejected": stories.rejected, "unjudged": stories.unjudged}
LINKS = {"MLflow run": "#/experiments/1/runs/2"}


def told(name: str) -> tuple[Summary, Report]:
    case = CASES[name]()
    story = summarize(case.decision, case.evidence, explanation=case.explanation)
    story = story.about(name="digits", version="7").with_files({"MODEL.onnx": "digits.onnx"})
    return story, replace(case, story=story)


def terminal(story: Summary, _case: Report) -> str:
    stream = io.StringIO()
    print_summary(story, Console(file=stream, width=80))
    return stream.getvalue()


def markdown(story: Summary, _case: Report) -> str:
    return summary_markdown(story, LINKS)


def html(_story: Summary, case: Report) -> str:
    """What a reader of the page reads, without the charts."""
    body = render_page(case).partition("<body>")[2] or render_page(case)
    for element in ("script", "style", "svg"):
        body = re.sub(rf"<{element}\b.*?</{element}>", "", body, flags=re.DOTALL)
    # Where a name may be broken, and where not, is nothing to read.
    body = re.sub(r'<wbr>|<span class="name">([^<]*)</span>', r"\1", body)
    lines = (" ".join(line.split()) for line in re.sub(r"<[^>]+>", "\n", body).splitlines())
    return unescape("\n".join(line for line in lines if line)) + "\n"


def mlflow(story: Summary, case: Report) -> str:
    headline, verdict = story.headline, case.decision.verdict
    shown = {
        "name": run_name(verdict, case.decision.subject_sha256, headline),
        "status": status_of(verdict),
        "tags": headline_tags(headline),
    }
    return json.dumps(shown, indent=2, ensure_ascii=False) + "\n"


SURFACES = {"terminal": terminal, "markdown": markdown, "html": html, "mlflow": mlflow}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("surface", SURFACES)
def test_each_surface_prints_what_was_approved(case: str, surface: str) -> None:
    text = SURFACES[surface](*told(case))
    file = GOLDEN / f"{case}.{surface}.txt"
    if os.environ.get(RENEW) == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.rows(3)
@pytest.mark.parametrize("case", CASES)
def test_all_surfaces_say_the_same(case: str) -> None:
    story, records = told(case)
    sentence = story.headline.sentence
    plain = re.sub(r"[\\`*_]", "", sentence)
    for surface, make in SURFACES.items():
        text = " ".join(re.sub(r"[\\`*_]", "", make(story, records)).split())
        assert plain.split(";")[0] in text, surface
        assert story.headline.verdict in text, surface
        assert "None" not in text.replace("no None", ""), surface
        for finding in story.findings if surface in ("markdown", "html") else ():
            assert re.sub(r"[\\`*_]", "", finding.title) in text, surface
