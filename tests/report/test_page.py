from __future__ import annotations

import itertools
import math
import re
from html.parser import HTMLParser

import pytest

from gate import Verdict, decide
from gate.records.outputs import ConfidenceOfClass, OutputParity
from gate.report import html_page
from gate.report.html_page import Report, render_page
from gate.report.markdown import summary_markdown
from gate.summary.render import format_bound_usage, render_check
from gate.summary.summarize import summarize
from gate.summary.summary import Summary
from tests.builders import (
    class_parity,
    evidence,
    noise_parity,
    output_parity,
    policy,
    runtime_evidence,
)
from tests.report import report_records
from tests.report.report_records import HOSTILE, LAYER
from tests.reused_charts import reused_charts

__all__ = ["reused_charts"]

CASES = {"passed": report_records.passed, "waiting": report_records.waiting, "rejected": report_records.rejected,
         "unjudged": report_records.unjudged, "hostile": report_records.hostile}  # fmt: skip


class ParsedPage(HTMLParser):
    """A parsed page: tags with attributes, ids, and texts outside of script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._inside: list[str] = []
        self._joined = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._joined = tag == "wbr"
        if tag in ("script", "style"):
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if self._joined and self.texts:
            self.texts[-1] += data
        elif not self._inside:
            self.texts.append(data)
        self._joined = False

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def values(self, *names: str) -> list[str]:
        return [value or "" for _, attrs in self.tags for name, value in attrs.items() if name in names]  # fmt: skip


@pytest.fixture(scope="module")
def pages():
    """Render with real charts, before `reused_charts` replaces them."""
    return {name: render_page(case()) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
class TestEachPage:
    @pytest.mark.further
    @pytest.mark.rows(4)
    def test_page_is_self_contained(self, pages, name):
        outline = ParsedPage(pages[name])
        tags = [tag for tag, _ in outline.tags]
        assert tags.count("script") == 1
        assert {"link", "iframe", "object", "form", "base"}.isdisjoint(tags)
        assert all(a.startswith(("data:image/png;base64,", "#")) for a in outline.values("src", "href"))  # fmt: skip
        assert "default-src 'none'" in " ".join(outline.values("content"))

    def test_page_has_unique_ids_and_ordered_headings(self, pages, name):
        outline = ParsedPage(pages[name])
        ids = outline.values("id")
        assert len(ids) == len(set(ids))
        levels = [int(tag[1]) for tag, _ in outline.tags if re.fullmatch(r"h[1-6]", tag)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
        targets = [*outline.values("data-copy", "aria-labelledby")]
        targets += [a[1:] for a in outline.values("href") if a.startswith("#")]
        assert set(targets) <= set(ids)

    def test_page_shows_no_none(self, pages, name):
        outline = ParsedPage(pages[name])
        shown = [outline.text, *outline.values("aria-label", "title", "alt")]
        assert [text for text in shown if re.search(r"\b(None|nan|undefined)\b", text)] == []

    def test_each_chart_has_a_text_alternative(self, pages, name):
        charts = [attrs for tag, attrs in ParsedPage(pages[name]).tags if tag == "svg"]
        assert len(charts) >= 5
        assert all(c["role"] == "img" and len(c["aria-label"] or "") > 40 for c in charts)


def test_each_check_has_its_text_and_remedy(pages):
    decision = report_records.rejected().decision
    text = " ".join(ParsedPage(pages["rejected"]).text.split())
    for check in decision.checks:
        assert " ".join(render_check(check).split()) in text
    for check in decision.problems:
        assert render_check(check, "remedy") in text


def test_malicious_names_are_escaped(pages):
    outline = ParsedPage(pages["hostile"])
    assert all(not name.startswith("on") for _, attrs in outline.tags for name in attrs)
    assert [attrs for tag, attrs in outline.tags if tag == "img" and "data:" not in str(attrs["src"])] == []  # fmt: skip
    assert "\x1b" not in pages["hostile"]
    assert "<script>alert" not in pages["hostile"]
    assert not any("javascript:" in address for address in outline.values("href"))
    # The text must be shown unchanged.
    assert outline.text.count("{{ 7*7 }}") > 10
    assert HOSTILE.split("$")[0] in outline.text


def test_each_check_is_in_the_table(pages):
    case = report_records.rejected()
    table = pages["rejected"].partition('class="cards sortable"')[2].partition("</table>")[0]
    assert table.count("<tr>") == len(case.decision.checks) + 1
    assert table.count("why this bound") == len(case.decision.checks)
    first, last = table.index('data-value="FAIL"'), table.rindex('data-value="PASS"')
    assert first < table.index('data-value="PASS"') < last


@pytest.mark.further
def test_long_tables_are_truncated_with_a_count():
    case = report_records.rejected()
    checks = case.decision.checks * 20
    many = case.decision.model_copy(update={"checks": checks})
    result = case.explanation.localisation
    assert result is not None
    deep = result.model_copy(update={"layers": result.layers * 40})
    explanation = case.explanation.model_copy(update={"localisation": deep})
    summary = case.summary.model_copy(update={"check_rows": case.summary.check_rows * 20})
    report = Report(summary, case.evidence, many, explanation)
    text = ParsedPage(render_page(report)).text
    assert f"{len(checks) - html_page.MAX_CHECKS} more that used less of their bounds" in text
    assert f"{html_page.MAX_LAYERS} of {len(deep.layers)} layers, those that are not right" in text


def test_only_small_pictures_are_embedded():
    evidence = report_records.passed().evidence
    (good, *_) = report_records.pictures().values()
    offered = {3: good, 20: b"<svg onload=alert(1)>", 37: good + b"\0" * 200_000}
    shown = html_page.worst_samples(evidence, offered)
    assert shown is not None
    pictured = {row.sample.sample for row in shown.rows if row.picture}
    assert pictured == {3}


@pytest.mark.parametrize("name", [None, "digits"])
def test_page_names_the_model(name):
    case = report_records.passed()
    page = render_page(Report(case.summary.about(name=name), case.evidence, case.decision))
    shown = name or case.evidence.source.factory
    title = re.search(r"<title>(.*?)</title>", page)
    assert title is not None
    assert title[1].startswith(f"PASS {shown} ")
    assert f'<b id="name">{shown}</b>' in page


def test_page_of_many_samples_and_classes_is_small():
    case = report_records.rejected()
    per_class = tuple(
        ConfidenceOfClass(label=label, samples=50, mean=1e-5, max=1e-4, signed_mean=-1e-5,
                          reference_mean=0.9, candidate_mean=0.9)
        for label in range(1000)
    )  # fmt: skip

    def grown(output):
        classes = output.classification
        confidence = classes.confidence.model_copy(update={"per_class": per_class})
        classes = classes.model_copy(update={"classes": 1000, "confidence": confidence})
        more = {"samples": 50_000, "elements": 50_000_000, "classification": classes}
        return output.model_copy(update=more)

    runtimes = tuple(
        r.model_copy(update={"outputs": tuple(map(grown, r.outputs))})
        for r in case.evidence.runtimes
    )
    observed = case.evidence.model_copy(update={"runtimes": runtimes})
    judged = decide(policy(), observed, decided_at="2026-03-04T17:15:00+00:00")
    assert judged.verdict is Verdict.FAIL
    page = render_page(Report(case.summary, observed, judged, case.explanation, case.pictures))
    title = re.search(r"<title>(.*?)</title>", page)
    assert title is not None
    assert title[1].startswith(f"FAIL resnet-digits: {LAYER}.weight")
    assert len(page.encode()) < 2_000_000
    assert "the 20 of 1000 that changed most" in page


def _summary_and_first_screen(*outputs: OutputParity) -> tuple[Summary, str]:
    """Return the summary and the first screen for runtimes with these outputs."""
    good = evidence()
    (spec,) = good.subject.outputs
    specs = tuple(spec.model_copy(update={"name": output.name}) for output in outputs)
    of = {"ort-cpu": outputs, "ort-cpu-optimized": tuple(map(_slightly_worse, outputs))}
    observed = good.model_copy(
        update={
            "subject": good.subject.model_copy(update={"outputs": specs}),
            "runtimes": tuple(
                runtime_evidence(each.runtime, outputs=of[each.runtime]) if each.measured else each
                for each in good.runtimes
            ),
        }
    )
    decision = decide(policy(), observed, decided_at="2026-01-01T00:00:00+00:00")
    summary = summarize(decision, observed)
    return summary, render_page(Report(summary, observed, decision)).partition("</header>")[0]


def _slightly_worse(output: OutputParity) -> OutputParity:
    assert output.noise is not None
    noise = output.noise.model_copy(update={"ratio": 1.01 * output.noise.ratio})
    return output.model_copy(update={"noise": noise})


@pytest.mark.parametrize("ratio", [1.1, 194.8])
def test_headline_and_first_row_show_the_same_number(ratio):
    summary, first = _summary_and_first_screen(output_parity(noise=noise_parity(ratio=ratio)))
    worst = summary.proof[0].worst
    assert worst is not None
    assert (worst.name, worst.runtime) == ("noise_ratio", "ort-cpu-optimized")
    assert worst.observed == 1.01 * ratio
    assert format_bound_usage(worst) in summary.headline.sentence
    assert first.index(format_bound_usage(worst)) < first.index('<table class="matrix"')
    assert first.count(format_bound_usage(worst)) == 2
    assert summary.proof[0].runtime == "ort-cpu-optimized"
    assert not re.search("194.8[^<]*≤", first)
    assert "ort-cpu" in [row.runtime for row in summary.proof]


def test_bound_of_zero_shows_no_infinite_factor():
    wrong = class_parity(top1_disagreements=3)
    case = report_records.rejected()
    summary, first = _summary_and_first_screen(output_parity(classification=wrong))
    assert summary.headline.verdict == "FAIL"
    agreement = next(w for w in summary.check_rows if w.check.name == "top1_agreement")
    assert agreement.bound_usage == math.inf
    assert "inf ×" not in first
    assert "inf ×" not in render_page(case)
    assert "99.25 %, allowed at least 100 %" in first


def test_rows_name_the_output_when_there_are_several():
    boxes, scores = output_parity(name="boxes"), output_parity(name="scores")
    far = _slightly_worse(scores)
    summary, first = _summary_and_first_screen(boxes, far)
    rows = first.partition('<table class="matrix"')[2].partition("</table>")[0]
    assert re.findall('<span class="output">(.*?)</span>', rows) == ["scores", "scores"]
    assert "scores / noise_ratio" in summary.headline.sentence
    assert "scores / noise" in summary_markdown(summary, {})
    single_output, first = _summary_and_first_screen(output_parity(name="scores"))
    assert 'class="output"' not in first
    assert "scores / " not in single_output.headline.sentence
