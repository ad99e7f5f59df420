from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from gate import Evidence, Verdict, decide, installation
from gate.records.localization import Explanation
from gate.records.outputs import Confidence, ConfidenceOfClass, Histogram
from gate.report.chart import BLUE, RED, Chart
from gate.report.error_charts import bound_usage_chart, worst_first
from gate.report.html_page import Report, cause_chart
from gate.report.model_charts import depth_chart
from gate.summary.summarize import summarize
from gate.summary.summary import CheckRow
from tests.builders import (  # fmt: skip
    absent,
    class_parity,
    evidence,
    output_parity,
    policy,
    runtime_evidence,
)
from tests.report import report_records

INVALID_NUMBERS = [math.nan, math.inf, 1.7e308, 0.0]


def report_of(observed: Evidence) -> Report:
    decision = decide(policy(), observed, decided_at="now")
    return Report(summarize(decision, observed), observed, decision)


def evidence_with(output: object) -> Evidence:
    return evidence(runtimes=(runtime_evidence(outputs=(output,)),))


def texts(chart: Chart | None) -> list[str]:
    assert chart is not None
    root = ElementTree.fromstring(chart.file())
    return ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("}text")]


def test_failed_report_has_each_chart_as_svg():
    charts = report_records.rejected().charts
    assert [chart.name for chart in charts] == [
        "bound_usage", "localisation", "differences", "confidence",
    ]  # fmt: skip
    for chart in charts:
        root = ElementTree.fromstring(chart.file())
        assert root.attrib["role"] == "img"
        assert root.attrib["aria-label"].startswith(chart.title)
        assert root.attrib["viewBox"].split()[2] == "360"
        assert len(texts(chart)) > 3
        idents = [e.attrib["id"] for e in root.iter() if "id" in e.attrib]
        assert all(ident.startswith(f"{chart.name}-") for ident in idents)
        used = re.findall(r'(?:href="|url\()#([^")]+)', chart.svg)
        assert set(used) <= set(idents)


@pytest.mark.parametrize("measured", [
    evidence(runtimes=(absent("ort-cuda"),)),
    evidence_with(output_parity(classification=None)),
])  # fmt: skip
def test_charts_without_data_are_omitted(measured):
    assert [chart.name for chart in report_of(measured).charts] == ["bound_usage"]


@pytest.mark.rows(4)
@pytest.mark.parametrize("value", INVALID_NUMBERS)
def test_invalid_numbers_are_drawn(value):
    confidence = Confidence(
        mean=value, min=value, max=value, bands=(0.0, 0.0, 0.0, 1.0),
        per_class=(ConfidenceOfClass(label=3, samples=1, mean=value, max=value, signed_mean=value,
                                     reference_mean=value, candidate_mean=value),),
    )  # fmt: skip
    output = output_parity(
        max_abs_diff=value,
        l2_max=value,
        classification=class_parity(confidence=confidence, top1_disagreements=400),
        differences=Histogram(zeros=0, first=-4200, counts=(1,) * 8400, nonfinite=3),
    )
    charts = report_of(evidence_with(output)).charts
    assert {chart.name for chart in charts} == {"bound_usage", "differences", "confidence"}
    for chart in charts:
        locations = [
            value
            for element in ElementTree.fromstring(chart.svg).iter()
            for key, value in element.attrib.items()
            if key in ("d", "x", "y", "transform", "width", "height", "points")
        ]
        assert locations
        assert not re.search("nan|inf", " ".join(locations)), chart.name


@pytest.mark.parametrize("name", [report_records.HOSTILE, "$\\frac$", "日本語", "x" * 5000])
def test_names_are_escaped_in_charts(name):
    layers = report_records.rejected().explanation.localisation
    assert layers is not None
    for chart in (
        depth_chart(layers.model_copy(update={"runtime": name, "part": name})),
        *report_of(evidence_with(output_parity(name=name))).charts,
    ):
        assert chart is not None
        tags = {e.tag.rpartition("}")[2] for e in ElementTree.fromstring(chart.file()).iter()}
        assert tags <= {"svg", "g", "path", "text", "tspan", "defs", "use", "clipPath", "rect"}


def test_failed_checks_have_a_different_color_and_shape():
    rows = report_records.rejected().summary.check_rows
    shown = {}
    for verdict in (Verdict.PASS, Verdict.FAIL):
        chosen = [w for w in rows if w.check.verdict is verdict and w.bound_usage is not None][:1]
        chart = bound_usage_chart(chosen)
        assert chart is not None
        shown[verdict] = chart.svg
    assert f"fill: none; stroke: var(--blue, {BLUE})" in shown[Verdict.PASS]
    assert f"fill: var(--red, {RED}); stroke: var(--red, {RED})" not in shown[Verdict.PASS]
    assert f"fill: var(--red, {RED}); stroke: var(--red, {RED})" in shown[Verdict.FAIL]


def test_worst_check_is_first_and_waived_ones_are_last():
    row = next(r for r in report_records.passed().summary.check_rows if r.bound_usage is not None)

    def used(value: float | None, name: str = "l2", verdict: str = "PASS") -> CheckRow:
        check = row.check.model_copy(update={"name": name, "verdict": Verdict(verdict)})
        return row.model_copy(update={"check": check, "bound_usage": value})

    waived = used(math.inf, "probe_zeros", "WAIVED")
    counted = used(math.inf, "graph_rounded_weights", "FAIL")
    nan, measured, small = used(math.nan, "l2", "FAIL"), used(20.0, "l2", "FAIL"), used(0.1)
    rows = [waived, counted, small, used(None), measured, nan]
    assert worst_first(rows) == [nan, measured, counted, small, waived]
    assert "10⁷" not in texts(bound_usage_chart(rows[1:5]))


def test_first_chart_shows_the_cause():
    rejected, passed = report_records.rejected(), report_records.passed()
    layer = cause_chart(rejected.summary, rejected.explanation)
    assert layer is not None
    assert report_records.LAYER in layer.title
    blamed = {check.name for check in rejected.summary.findings[0].checks}
    shown = " ".join(texts(cause_chart(rejected.summary, Explanation())))
    assert sum(name in shown for name in blamed) == 5
    everything = cause_chart(passed.summary, passed.explanation)
    assert everything is not None
    assert "more in the table" in everything.title
    waived = tuple(
        row.model_copy(update={"check": row.check.model_copy(update={"verdict": Verdict.WAIVED})})
        for row in passed.summary.check_rows
    )
    summary = passed.summary.model_copy(update={"check_rows": waived})
    assert cause_chart(summary, Explanation()) is None


def test_chart_without_matplotlib_is_text(monkeypatch):
    monkeypatch.setattr(installation, "is_installed", lambda module: module != "matplotlib")
    chart = report_records.passed().charts[0]
    root = ElementTree.fromstring(chart.svg)
    lines = [element.text for element in root.iter() if element.tag.endswith("}text")]
    assert str(lines[0]).startswith(chart.alternative[:20])
    assert lines[-1] == "Drawn with matplotlib: pip install 'parity-gate[charts]'"
    assert all(len(line or "") <= 68 for line in lines)
    assert float(root.attrib["height"]) >= 14 * len(lines)
