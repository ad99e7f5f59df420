from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from gate import decide
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
from tests.report.report_records import HOSTILE
from tests.reused_charts import reused_charts

__all__ = ["reused_charts"]

CASES = {"passed": report_records.passed, "waiting": report_records.waiting, "rejected": report_records.rejected,
         "unjudged": report_records.unjudged, "hostile": report_records.hostile}  # fmt: skip


class ParsedPage(HTMLParser):
    """A parsed page: tags with attributes, and the text outside of script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside = ""
        self.feed(text.replace("<wbr>", ""))
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += f" {data}"

    def values(self, *names: str) -> list[str]:
        return [value or "" for _, attrs in self.tags for name, value in attrs.items() if name in names]  # fmt: skip


@pytest.fixture(scope="module")
def pages():
    """Render with real charts, before `reused_charts` replaces them."""
    return {name: render_page(case()) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_page_is_self_contained_and_accessible(pages, name):
    outline = ParsedPage(pages[name])
    tags = [tag for tag, _ in outline.tags]
    assert tags.count("script") == 1
    assert {"link", "iframe", "object", "form", "base"}.isdisjoint(tags)
    assert all(a.startswith(("data:image/png;base64,", "#")) for a in outline.values("src", "href"))
    assert "default-src 'none'" in " ".join(outline.values("content"))
    ids = outline.values("id")
    assert len(ids) == len(set(ids))
    targets = [*outline.values("data-copy", "aria-labelledby")]
    targets += [a[1:] for a in outline.values("href") if a.startswith("#")]
    assert {target for target in targets if not target.startswith("/")} <= set(ids)
    levels = [int(tag[1]) for tag in tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    shown = [outline.text, *outline.values("aria-label", "title", "alt")]
    assert [text for text in shown if re.search(r"\b(None|nan|undefined)\b", text)] == []
    charts = [attrs for tag, attrs in outline.tags if tag == "svg"]
    assert len(charts) >= 3
    assert all(c["role"] == "img" and len(c["aria-label"] or "") > 40 for c in charts)


def test_each_check_is_in_the_table_with_text_and_remedy(pages):
    case, outline = report_records.rejected(), ParsedPage(pages["rejected"])
    for check in case.decision.checks:
        assert " ".join(render_check(check).split()) in outline.text
    for check in case.decision.problems:
        assert render_check(check, "remedy") in outline.text
    table = pages["rejected"].partition('class="cards sortable"')[2].partition("</table>")[0]
    assert table.count("<tr>") == len(case.decision.checks) + 1
    first, last = table.index('data-value="FAIL"'), table.rindex('data-value="PASS"')
    assert first < table.index('data-value="PASS"') < last


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


@pytest.mark.further
def test_long_tables_are_truncated_with_a_count():
    case = report_records.rejected()
    checks = case.decision.checks * 20
    result = case.explanation.localisation
    assert result is not None
    deep = result.model_copy(update={"layers": result.layers * 80})
    report = replace(
        case,
        decision=case.decision.model_copy(update={"checks": checks}),
        explanation=case.explanation.model_copy(update={"localisation": deep}),
        summary=case.summary.model_copy(update={"check_rows": case.summary.check_rows * 20}),
    )
    text = ParsedPage(render_page(report)).text
    assert f"{len(checks) - html_page.MAX_CHECKS} more that used less of their bounds" in text
    assert f"240 of {len(deep.layers)} layers, those that are not right" in text


def test_only_small_pictures_are_embedded():
    case = report_records.passed()
    good = case.pictures[0]
    worst = [each.sample for each in case.evidence.runtimes[1].outputs[0].worst]
    offered = dict(
        zip(worst, (good, b"<svg onload=alert(1)>", good + b"\0" * 200_000), strict=False)
    )
    page = render_page(replace(case, pictures=offered))
    assert ParsedPage(page).values("alt") == [f"sample {worst[0]}"]


def test_page_names_the_model():
    case = report_records.passed()
    for name, shown in ((None, case.evidence.source.factory), ("digits", "digits")):
        page = render_page(replace(case, summary=case.summary.about(name=name)))
        assert f"<title>PASS {shown} " in page
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
        return output.model_copy(update={"classification": classes})

    runtimes = tuple(
        r.model_copy(update={"outputs": tuple(map(grown, r.outputs))})
        for r in case.evidence.runtimes
    )
    page = render_page(
        replace(case, evidence=case.evidence.model_copy(update={"runtimes": runtimes}))
    )
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
    assert summary.proof[0].runtime == "ort-cpu-optimized"
    assert "ort-cpu" in [row.runtime for row in summary.proof]


def test_bound_of_zero_shows_no_infinite_factor():
    wrong = class_parity(top1_disagreements=3)
    summary, first = _summary_and_first_screen(output_parity(classification=wrong))
    assert summary.headline.verdict == "FAIL"
    agreement = next(w for w in summary.check_rows if w.check.name == "top1_agreement")
    assert agreement.bound_usage == math.inf
    assert "inf ×" not in first
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
