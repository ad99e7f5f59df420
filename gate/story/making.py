"""Make the story of a decision: a pure function of the records."""

from __future__ import annotations

from gate.decision.decision import Decision
from gate.records.evidence import Evidence
from gate.records.localisation import Explanation
from gate.story.story import Change, Headline, Story, Subtitle
from gate.story.wording import printable, verdict_sentence


def story_of(
    decision: Decision,
    evidence: Evidence,
    *,
    explanation: Explanation | None = None,
    change: Change | None = None,
) -> Story:
    """The story. `explanation`: what localisation found; `change`: against the champion."""
    environment = evidence.environment
    return Story(
        headline=Headline(
            verdict=decision.verdict,
            cause="passed" if decision.passed else "numbers",
            sentence=verdict_sentence(decision, evidence),
        ),
        subject=Subtitle(
            sha256=decision.subject_sha256,
            size_bytes=evidence.subject.size_bytes,
            opset=evidence.subject.opset,
            producer=printable(evidence.subject.producer),
            factory=printable(evidence.source.factory),
            samples=evidence.dataset.samples,
            measured_at=evidence.measured_at,
            decided_at=decision.decided_at,
            machine=", ".join(filter(None, (environment.cpu, environment.gpu))),
        ),
        findings=(),
        proof=(),
        change=change or Change(absent="nobody asked for the champion"),
        steps=(),
        notes=(explanation.localisation.cause,) if explanation and explanation.localisation else (),
    )
