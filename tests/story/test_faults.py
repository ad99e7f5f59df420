"""Each class of faults is named by its cause: the headline says it, and all else is folded."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from gate.front_door import Verdicted
from gate.story.making import story_of
from gate.story.story import Story
from tests.story.faults import FAULTS, judged

pytestmark = pytest.mark.proof

PLACES: dict[str, Verdicted] = {}


@functools.cache
def story(name: str) -> tuple[Story, Verdicted]:
    verdicted = PLACES[name]
    return story_of(
        verdicted.decision, verdicted.evidence, explanation=verdicted.explanation
    ), verdicted


@pytest.fixture(params=FAULTS)
def name(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param not in PLACES:
        PLACES[request.param] = judged(FAULTS[request.param], tmp_path)
    return request.param


class TestFaults:
    def test_the_headline_names_the_cause(self, name: str) -> None:
        fault, (told, _) = FAULTS[name], story(name)
        headline = told.headline
        assert (headline.verdict, headline.cause) == (fault.verdict, fault.cause)
        assert headline.blamed == fault.blamed
        for word in fault.words:
            assert word in headline.sentence
        assert headline.remedy
        assert len(headline.sentence) < 320

    def test_one_fault_is_one_finding(self, name: str) -> None:
        """And what the policy waives is another one."""
        told, verdicted = story(name)
        decisive = [finding for finding in told.findings if finding.cause != "waived"]
        assert len(decisive) == 1, [finding.sentence for finding in decisive]
        assert set(decisive[0].checks) == set(verdicted.decision.problems)

    def test_nothing_shows_none_or_markup_of_ours(self, name: str) -> None:
        told, _ = story(name)
        texts = [told.headline.sentence, told.headline.remedy or "", *told.notes]
        texts += [finding.sentence for finding in told.findings]
        texts += [word.why for word in told.words]
        assert not [text for text in texts if "None" in text or "\n" in text]
