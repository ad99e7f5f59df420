from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from gate import Evidence, Verdict, decide, installation
from gate.records.champion_comparison import TrendRow
from gate.records.localization import Explanation
from gate.records.outputs import Confidence, ConfidenceOfClass, Histogram
from gate.report import chart as drawing
from gate.report import html_page
from gate.report.chart import BLUE, RED, Chart
from gate.report.error_charts import bound_usage_chart, worst_first
from gate.report.html_page import Report
from gate.report.model_charts import depth_chart, trend_charts
from gate.summary.summary import CheckRow
from tests.builders import (  # fmt: skip
    absent,
    class_parity,
    digest,
    evidence,
    output_parity,
    policy,
    runtime_evidence,
)
from tests.report import report_records

INVALID_NUMBERS = [math.nan, math.inf, 1.7e308, 0.0]


def evidence_with(output: object) -> Evidence:
    return evidence(runtimes=(runtime_evidence(outputs=(output,)),))


def names(charts: tuple[Chart, ...]) -> set[str]:
    return {chart.name for chart in charts}


def texts(chart: Chart) -> list[str]:
    root = ElementTree.fromstring(chart.file())
    return ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("}text")]


def all_charts(case: Report) -> tuple[Chart, ...]:
    return html_page.report_charts(case.summary, case.evidence, case.decision, case.explanation)


def test_failed_report_has_each_chart_as_svg():
    charts = all_charts(report_records.rejected())
    assert names(charts) == set(html_page.NAMES)
    for chart in charts:
        root = ElementTree.fromstring(chart.file())
        assert root.attrib["role"] == "img"
        assert root.attrib["aria-label"].startswith(chart.title)
        assert root.attrib["viewBox"].split()[2] == "360"
        assert len(texts(chart)) > 3
        idents = [e.attrib["id"] for e in root.iter() if "id" in e.attrib]
        assert all(ident.startswith(f"{chart.name}-") for ident in idents)


def test_charts_without_data_are_omitted():
    assert html_page.evidence_charts(evidence(runtimes=(absent("ort-cuda"),))) == ()
    tensors = evidence_with(output_parity(classification=None))
    assert names(html_page.evidence_charts(tensors)) == {"latency"}


@pytest.mark.rows(4)
@pytest.mark.parametrize("value", INVALID_NUMBERS)
def test_invalid_numbers_are_drawn(value):
    confidence = Confidence(
        mean=value, min=value, max=value, bands=(0.0, 0.0, 0.0, 1.0),
        per_class=(ConfidenceOfClass(label=3, samples=1, mean=value, max=value, signed_mean=value,
                                     reference_mean=value, candidate_mean=value),),
    )  # fmt: skip
    spread = Histogram(zeros=0, first=-4200, counts=(1,) * 8400, nonfinite=3)
    output = output_parity(
        max_abs_diff=value,
        l2_max=value,
        classification=class_parity(confidence=confidence, top1_disagreements=400),
        differences=spread,
    )
    observed = evidence_with(output)
    judged = decide(policy(), observed, decided_at="now")
    words = tuple(map(report_records.word, judged.checks))
    drawn = html_page.evidence_charts(observed, judged)
    assert names(drawn) == {"differences", "confidence", "agreement", "latency"}
    ranked = bound_usage_chart(words)
    assert ranked is not None
    for chart in (*drawn, ranked):
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
    result = report_records._layers(name)
    chart = depth_chart(result)
    assert chart is not None
    tags = {e.tag.rpartition("}")[2] for e in ElementTree.fromstring(chart.file()).iter()}
    assert tags <= {"svg", "title", "desc", "g", "path", "text", "tspan", "defs", "use", "clipPath",
                    "rect"}  # fmt: skip
    assert any(text.startswith(name[:5]) for text in texts(chart))


def test_failed_checks_have_a_different_color_and_shape():
    words = [report_records.word(check) for check in report_records.rejected().decision.checks]
    shown = {}
    for verdict in (Verdict.PASS, Verdict.FAIL):
        chosen = [w for w in words if w.check.verdict is verdict and w.bound_usage is not None][:1]
        chart = bound_usage_chart(chosen)
        assert chart is not None
        shown[verdict] = chart.svg
    assert f"fill: none; stroke: var(--blue, {BLUE})" in shown[Verdict.PASS]
    assert f"fill: var(--red, {RED}); stroke: var(--red, {RED})" not in shown[Verdict.PASS]
    assert f"fill: var(--red, {RED}); stroke: var(--red, {RED})" in shown[Verdict.FAIL]


def test_worst_check_is_first_and_nan_is_worst():
    check = next(c for c in report_records.passed().decision.checks if c.bound is not None)

    def used(value: float | None) -> CheckRow:
        return report_records.word(check).model_copy(update={"bound_usage": value})

    ranked = worst_first([used(0.1), used(None), used(math.nan), used(3.0)])
    assert [word.bound_usage for word in ranked][1:] == [3.0, 0.1]
    assert math.isnan(ranked[0].bound_usage or 0.0)

    def failed(name, value, bound_usage):
        bad = check.model_copy(update={"name": name, "observed": value, "verdict": Verdict.FAIL})
        return report_records.word(bad).model_copy(update={"bound_usage": bound_usage})

    counted, measured = (
        failed("graph_rounded_weights", 1.0, math.inf),
        failed("noise_ratio", 30.0, 20.0),
    )
    assert worst_first([counted, used(0.5), measured])[:2] == [measured, counted]
    drawn = bound_usage_chart([counted, used(0.5), measured])
    assert "10⁷" not in texts(drawn)


def test_first_chart_shows_the_cause():
    rejected, passed = report_records.rejected(), report_records.passed()
    layer = html_page.cause_chart(rejected.summary, rejected.explanation)
    assert layer is not None
    assert report_records.LAYER in texts(layer)
    finding = html_page.cause_chart(rejected.summary, Explanation())
    assert finding is not None
    blamed = {check.name for check in rejected.summary.findings[0].checks}
    assert blamed <= set(texts(finding))
    everything = html_page.cause_chart(passed.summary, passed.explanation)
    assert everything is not None
    assert "19 more in the table" in everything.title
    assert (
        html_page.cause_chart(passed.summary.model_copy(update={"check_rows": ()}), Explanation())
        is None
    )


def release(name: str, noise_ratio: float | None) -> TrendRow:
    return TrendRow(
        sha256=digest(name),
        measured_at="now",
        noise_ratio=noise_ratio,
        agreement=1.0,
        accuracy=None,
        latency_ms=math.nan,
    )


def test_trend_needs_two_releases():
    charts = trend_charts([release("a", 1.2), release("b", 1.1), release("c", None)])
    assert [chart.name for chart in charts] == ["trend-noise_ratio", "trend-agreement"]
    assert f"{digest('b').hex[:6]}: 1.1" in charts[0].alternative
    assert trend_charts([release("a", 1.2)]) == ()


def test_chart_without_matplotlib_is_text(monkeypatch):
    monkeypatch.setattr(installation, "is_installed", lambda module: module != "matplotlib")
    created = drawing.chart(
        "latency",
        lambda _figure: pytest.fail("drawn"),
        title="Latency",
        alternative="ort-cpu: <b>1 ms</b>; " * 20,
        height=90,
    )
    root = ElementTree.fromstring(created.svg)
    lines = [element.text for element in root.iter() if element.tag.endswith("}text")]
    assert lines[0].startswith("ort-cpu: <b>1 ms</b>;")
    assert lines[-1] == "Drawn with matplotlib: pip install 'parity-gate[charts]'"
    assert all(len(line) <= 68 for line in lines)
    assert float(root.attrib["height"]) >= 14 * len(lines)
