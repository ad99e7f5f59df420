"""Each kind of fault has one finding, which is on the first screen of the HTML report."""

from __future__ import annotations

import pytest

from tests.browser import chromium
from tests.frozen.store import input_names
from tests.frozen.test_decisions import Records
from tests.reused_charts import reused_charts

__all__ = ["reused_charts"]

NAMES = [name for name in input_names() if name.startswith("story-")]


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
