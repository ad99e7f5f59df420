"""Each kind of fault has one finding, which is on the first screen of the HTML report."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator

from gate.report.html_page import Report, render_page
from tests.browser import chromium
from tests.exhaustive import select_rows
from tests.frozen.store import input_names
from tests.frozen.test_decisions import Records
from tests.reused_charts import reused_charts

__all__ = ["reused_charts"]

NAMES = [name for name in input_names() if name.startswith("story-")]
SIZES = ((390, 844), (1280, 800))


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.mark.parametrize("name", NAMES)
def test_one_fault_is_one_finding(name):
    """Waived checks do not count."""
    records = Records.read(name)
    decision = records.decide()
    summary = records.summary(decision)
    decisive = [finding for finding in summary.findings if finding.cause != "waived"]
    assert len(decisive) == 1, [finding.sentence for finding in decisive]
    assert set(decisive[0].checks) == set(decision.problems)
    assert summary.headline.remedy
    assert len(summary.headline.sentence) < 320
    texts = [summary.headline.sentence, summary.headline.remedy, *summary.notes]
    texts += [finding.sentence for finding in summary.findings]
    texts += [word.why for word in summary.check_rows]
    assert not [text for text in texts if "None" in text or "\n" in text]


@pytest.mark.proof
@pytest.mark.parametrize("name", select_rows(dict.fromkeys(NAMES), 6))
def test_answer_is_read_without_scrolling(browser, reused_charts, name):
    records = Records.read(name)
    decision = records.decide()
    summary = records.summary(decision)
    report = Report(summary, records.evidence, decision, records.explanation)
    page = browser.new_page()
    page.set_content(render_page(report))
    for width, height in SIZES:
        page.set_viewport_size({"width": width, "height": height})
        text = {
            part: visible_text(page.locator(f"#{part}"), width, height)
            for part in ("verdict", "sentence", "matrix", "remedy", "step-0")
        }
        assert decision.verdict.value in text["verdict"]
        assert (summary.headline.blamed or "").lower() in text["sentence"].lower()
        assert text["remedy"] == " ".join((summary.headline.remedy or "").split())
        assert text["step-0"].startswith("gate ")
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    page.close()


def visible_text(element: Locator, width: int, height: int) -> str:
    """Return the text of an element that is completely visible."""
    box, text = element.bounding_box(), " ".join(element.inner_text().split())
    assert box is not None
    assert box["x"] >= 0, text
    assert box["y"] >= 0, text
    assert box["x"] + box["width"] <= width, text
    assert box["y"] + box["height"] <= height, (text, box)
    return text
