"""What a CI shows of one command, whichever file it reads: a verdict, a promotion, or a failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gate.decision.checks import Verdict
from gate.story.story import Story

Colour = Literal["passed", "rejected", "not judged"]
_COLOURS: dict[int, Colour] = {0: "passed", 1: "rejected"}


@dataclass(frozen=True, kw_only=True)
class CiResult:
    """How the command ended, and the story of the decision that it is about."""

    command: str
    """`check`, `merge`, `promote`; of a pipeline, the stage."""
    is_stage: bool = False
    exit_code: int
    model: str = ""
    """The registered model or the factory, as given."""
    sentence: str = ""
    """What it came to beside the verdict: why nothing could be judged, why it was promoted or not.
    Without a password in it; empty: nothing."""
    story: Story | None = None
    """None: nothing was decided."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Label to address."""

    @property
    def title(self) -> str:
        """`gate check`, or `stage parity`."""
        return f"{'stage' if self.is_stage else 'gate'} {self.command}"

    @property
    def colour(self) -> Colour:
        """As a CI colours it: what is neither passed nor rejected was not judged."""
        return _COLOURS.get(self.exit_code, "not judged")

    @property
    def verdict(self) -> Verdict:
        """Of the decision; ERROR where nothing was decided."""
        return Verdict.ERROR if self.story is None else self.story.headline.verdict

    @property
    def subject(self) -> str:
        """The registered model, else the factory; empty where neither is known."""
        if self.story is None:
            return self.model
        return self.story.subject.name or self.model or self.story.subject.factory

    @property
    def reason(self) -> str:
        """Why it ended so, in one sentence."""
        headline = self.story.headline.sentence if self.story else ""
        return self.sentence or headline or f"it ended with exit code {self.exit_code}"

    @property
    def shown_by_a_check(self) -> bool:
        """Whether some check has the colour of the whole: a red build with nothing but green checks
        would be a riddle."""
        verdicts = {word.check.verdict for word in self.story.words} if self.story else set()
        wanted = Verdict.FAIL if self.colour == "rejected" else Verdict.ERROR
        return self.colour == "passed" or wanted in verdicts
