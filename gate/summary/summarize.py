"""Make the story of a decision: a pure function of the records."""

from __future__ import annotations

from collections.abc import Iterator

from gate.decision.decision import Decision
from gate.policy.tried import sentence
from gate.records.evidence import Evidence
from gate.records.localisation import Explanation
from gate.story.accounts import account_of, finding_of
from gate.story.change import unasked
from gate.story.costs import costs_of
from gate.story.findings import groups_of
from gate.story.proof import proof_of
from gate.story.scene import Account
from gate.story.steps import steps_of
from gate.story.story import CauseKind, Change, Headline, Story, Subtitle
from gate.story.wording import (
    agreement_sentences,
    code_sentences,
    input_sentences,
    printable,
    weight_sentences,
)
from gate.story.words import is_about_samples, measure, strain, words


def story_of(
    decision: Decision,
    evidence: Evidence,
    *,
    explanation: Explanation | None = None,
    change: Change | None = None,
    confidence: float = 0.95,
) -> Story:
    """The story. `explanation`: what localisation found; `change`: against the champion;
    `confidence`: of what agreement proves."""
    explanation = explanation or Explanation()
    groups = groups_of(decision, evidence, explanation)
    accounts = [account_of(group, evidence, explanation) for group in groups]
    findings = tuple(map(finding_of, groups, accounts))
    headline = _headline(decision, evidence, findings[0].cause if findings else None, accounts)
    return Story(
        headline=headline,
        subject=_subject(decision, evidence),
        findings=findings,
        proof=proof_of(decision, evidence),
        costs=costs_of(evidence),
        change=change or unasked(),
        steps=steps_of(decision, evidence, headline.cause),
        warnings=tuple(_warnings(decision, evidence, explanation)),
        notes=tuple(_notes(decision, evidence, confidence=confidence)),
        words=words(decision, evidence),
    )


def _headline(
    decision: Decision, evidence: Evidence, cause: CauseKind | None, accounts: list[Account]
) -> Headline:
    if decision.passed:
        sentence = _passed(decision, evidence)
        return Headline(verdict=decision.verdict, cause="passed", sentence=sentence)
    if cause in (None, "waived"):
        sentence = "No measured runtime passed all its checks"
        return Headline(verdict=decision.verdict, cause="evidence", sentence=sentence)
    first = accounts[0]
    return Headline(
        verdict=decision.verdict,
        cause=cause,
        blamed=first.blamed,
        sentence=first.sentence,
        remedy=first.remedy,
    )


def _passed(decision: Decision, evidence: Evidence) -> str:
    """On how many samples, where, and what came nearest to its bound."""
    text = f"Within every bound on {evidence.dataset.samples} samples, on "
    text += ", ".join(decision.runtimes)
    measured = [c for c in decision.checks if c.runtime and not is_about_samples(c)]
    used = [(strain(check) or 0.0, check) for check in measured]
    nearest = max((pair for pair in used if 0.0 < pair[0] <= 1.0), key=lambda p: p[0], default=None)
    if nearest is not None and measure(nearest[1]):
        text += f"; the nearest is {nearest[1].name}, {measure(nearest[1])}"
    return printable(text)


def _subject(decision: Decision, evidence: Evidence) -> Subtitle:
    environment, subject = evidence.environment, evidence.subject
    return Subtitle(
        sha256=decision.subject_sha256,
        size_bytes=subject.size_bytes,
        opset=subject.opset,
        producer=printable(subject.producer),
        factory=printable(evidence.source.factory),
        samples=evidence.dataset.samples,
        measured_at=evidence.measured_at,
        decided_at=decision.decided_at,
        machine=printable(", ".join(filter(None, (environment.cpu, environment.gpu)))),
        policy_sha256=decision.policy_sha256,
        evidence_sha256=decision.evidence_sha256,
        data_sha256=evidence.dataset.sha256,
        checkpoint_sha256=evidence.source.checkpoint_sha256,
    )


def _warnings(decision: Decision, evidence: Evidence, explanation: Explanation) -> Iterator[str]:
    if decision.tried:
        yield printable(f"Tried out, so it promotes nothing: {sentence(decision.tried)}.")
    yield from code_sentences(evidence)
    if explanation.failure is not None:
        yield f"The first diverging layer is not known: {printable(explanation.failure)}"


def _notes(decision: Decision, evidence: Evidence, *, confidence: float) -> Iterator[str]:
    yield from agreement_sentences(decision, evidence, confidence=confidence)
    yield from input_sentences(decision)
    yield from weight_sentences(evidence)
    for warning in (evidence.export.tracer_warnings if evidence.export else ())[:3]:
        yield printable(f"The tracer warned: {warning}")
