"""A decision with all that it was made of, for whoever prints or records it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from gate.decision.decision import Decision
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.records.localisation import Explanation
from gate.story.making import story_of
from gate.story.story import Change, Step, Story
from gate.story.wording import printable


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A decision with all that it was made of, and its story."""

    decision: Decision
    evidence: Evidence
    policy: Policy
    explanation: Explanation = field(default_factory=Explanation)
    change: Change | None = None
    """Against the champion, where somebody compared."""
    model_name: str | None = None
    """Of the registered model."""
    steps: tuple[Step, ...] = ()
    """What to do next, where that is not what follows from the decision alone."""
    signed_by: str | None = None
    """Name and short id of the key that signed the verdict; None: nobody did."""

    @cached_property
    def story(self) -> Story:
        """What every surface prints."""
        story = (
            story_of(
                self.decision,
                self.evidence,
                explanation=self.explanation,
                change=self.change,
                confidence=self.policy.confidence,
            )
            .about(name=self.model_name)
            .signed(self.signed_by and printable(self.signed_by))
        )
        return story.leading_to(*self.steps) if self.steps else story
