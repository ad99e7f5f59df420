"""The story of a decision."""

from __future__ import annotations

from gate.story.making import story_of
from gate.story.story import Story
from tests.report.samples import failed, passed


def test_a_story_is_exact_through_json() -> None:
    for decision, evidence in (passed(), failed()):
        story = story_of(decision, evidence)
        text = story.to_json()
        assert Story.from_json(text).to_json() == text
