"""Each kind of fault has its cause in the headline and on the first screen of the HTML report."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator

from gate.report.html_page import Report, render_page
from tests.browser import chromium
from tests.exhaustive import some
from tests.summary.faults import FAULTS, summary, verdicted

pytestmark = pytest.mark.proof
SIZES = ((390, 844), (1280, 800))


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.mark.parametrize("name", some(FAULTS, 6))
class TestFaults:
    def test_the_headline_names_the_cause(self, name):
        fault, told = FAULTS[name], summary(name)
        headline = told.headline
        assert (headline.verdict, headline.cause) == (fault.verdict, fault.cause)
        assert headline.blamed == fault.blamed
        for word in fault.words:
            assert word in headline.sentence
        assert headline.remedy
        assert len(headline.sentence) < 320

    def test_one_fault_is_one_finding(self, name):
        """And what the policy waives is another one."""
        told = summary(name)
        decisive = [finding for finding in told.findings if finding.cause != "waived"]
        assert len(decisive) == 1, [finding.sentence for finding in decisive]
        assert set(decisive[0].checks) == set(verdicted(name).decision.problems)

    def test_nothing_shows_none_or_markup_of_ours(self, name):
        told = summary(name)
        texts = [told.headline.sentence, told.headline.remedy or "", *told.notes]
        texts += [finding.sentence for finding in told.findings]
        texts += [word.why for word in told.words]
        assert not [text for text in texts if "None" in text or "\n" in text]

    def test_the_answer_is_read_without_scrolling(self, browser, name):
        found, told = verdicted(name), summary(name)
        report = Report(told, found.evidence, found.decision, found.explanation)
        shown = browser.new_page()
        shown.set_content(render_page(report))
        for width, height in SIZES:
            shown.set_viewport_size({"width": width, "height": height})
            text = {
                part: read(shown.locator(f"#{part}"), width, height)
                for part in ("verdict", "sentence", "matrix", "remedy", "step-0")
            }
            assert FAULTS[name].verdict in text["verdict"]
            for word in (*FAULTS[name].words, FAULTS[name].blamed or ""):
                assert word.lower() in text["sentence"].lower()
            assert text["remedy"] == " ".join((told.headline.remedy or "").split())
            assert text["step-0"].startswith("gate ")
            assert shown.evaluate("document.scrollingElement.scrollWidth") <= width
        shown.close()


def read(element: Locator, width: int, height: int) -> str:
    """The text of what is wholly on the screen."""
    box, text = element.bounding_box(), " ".join(element.inner_text().split())
    assert box is not None
    assert box["x"] >= 0, text
    assert box["y"] >= 0, text
    assert box["x"] + box["width"] <= width, text
    assert box["y"] + box["height"] <= height, (text, box)
    return text
