"""The records of a judgement as they lie in a folder: what a page is made of again."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gate.attestation.keys import labels
from gate.attestation.statements import Statements
from gate.attestation.trust import Trust
from gate.decision.decision import Decision, decide
from gate.errors import DigestMismatch, EvidenceError, GateError
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.records.incumbent import Incumbent
from gate.records.localisation import Explanation, Localisation
from gate.records.names import CHANGE, DECISION, EVIDENCE, EXPLANATION, LOCALISATION
from gate.records.trend import TrendRow
from gate.report.folder import pictures
from gate.report.report import Report
from gate.story.making import story_of
from gate.story.story import Change
from gate.story.wording import printable


@dataclass(frozen=True)
class RecordFiles:
    """Files that are to be read in the place of those beside the evidence, and another policy."""

    decision: Path | None = None
    explanation: Path | None = None
    policy: Policy | None = None
    """Judge anew by it, at `now`."""
    now: str = ""
    """UTC, ISO 8601."""
    trust: Trust | None = None
    """Whose signatures count; None: nobody's."""


@dataclass(frozen=True)
class JudgedRecords:
    """Evidence and decision, and what lies beside them."""

    folder: Path
    evidence: Evidence
    decision: Decision
    explanation: Explanation
    change: Change | None = None
    """Against the version that served when it was measured; None: it was not compared."""
    confidence: float = 0.95
    """Of what agreement proves."""
    signed_by: str | None = None
    """Name and short id of the key by which both are vouched for; None: no trusted one's."""

    @classmethod
    def read(cls, place: Path, given: RecordFiles | None = None) -> JudgedRecords:
        """Of an evidence file or of the folder that has one. Raises EvidenceError where a record is
        missing or not whole, DigestMismatch where the decision is of other evidence."""
        given = given or RecordFiles()
        file = place / EVIDENCE if place.is_dir() else place
        evidence = Evidence.load(file)
        path, policy = given.decision or file.parent / DECISION, given.policy
        if policy is not None:
            compared = _compared(path, evidence)
            decision = decide(policy, evidence, incumbent=compared, decided_at=given.now)
        else:
            decision = _decision(path, evidence)
        return cls(
            file.parent,
            evidence,
            decision,
            _explanation(file.parent, given.explanation, evidence),
            change_beside(file.parent, evidence),
            cls.confidence if policy is None else policy.confidence,
            None
            if given.trust is None
            else _signed_by(file.parent, evidence, decision, given.trust),
        )

    def report(self, change: Change | None = None) -> Report:
        """What the page is made of. `change`: against other records."""
        story = story_of(
            self.decision,
            self.evidence,
            explanation=self.explanation,
            change=change or self.change,
            confidence=self.confidence,
        ).signed(self.signed_by and printable(self.signed_by))
        return Report(
            story,
            self.evidence,
            self.decision,
            explanation=self.explanation,
            pictures=pictures(self.folder),
        )


def change_beside(folder: Path, evidence: Evidence) -> Change | None:
    """Against the champion, as it lies beside the evidence; None where there is none, and where it
    can't be read or tells of another measurement: it is there to be looked at."""
    try:
        change = Change.load(folder / CHANGE)
    except GateError:
        return None
    measured = [(row.sha256, row.measured_at) for row in change.trend[-1:]]
    this = TrendRow.of(evidence)
    return change if measured == [(this.sha256, this.measured_at)] else None


def explanation_beside(folder: Path, evidence: Evidence) -> Explanation:
    """What localisation found of this very file, as it lies beside the evidence; nothing where
    there is none, or where it can't be read."""
    for name in (EXPLANATION, LOCALISATION):
        with suppress(GateError):
            found = _read(folder / name)
            if _is_of(found, evidence):
                return found
    return Explanation()


def _signed_by(folder: Path, evidence: Evidence, decision: Decision, trust: Trust) -> str | None:
    """Who signed exactly these, when they were made; None where nobody did who counts."""
    with suppress(GateError):
        statements = Statements.beside(folder)
        return labels(statements.verify(evidence, decision, trust=trust, now=statements.made_at))
    return None


def _compared(path: Path, evidence: Evidence) -> Incumbent | None:
    """What the decision before says of the champion, which another policy judges, too."""
    with suppress(GateError):
        return _decision(path, evidence).incumbent
    return None


def _decision(path: Path, evidence: Evidence) -> Decision:
    if not path.is_file():
        raise EvidenceError(
            f"{path} is not there, so nobody knows the verdict on this evidence. Give the decision "
            "(--decision), or judge anew by a policy (--policy)."
        )
    decision = Decision.load(path)
    if decision.evidence_sha256 != evidence.digest():
        raise DigestMismatch(
            f"{path} decides on the evidence {decision.evidence_sha256}, this one is "
            f"{evidence.digest()}. Give the decision that belongs to it (--decision), or judge "
            "anew by a policy (--policy)."
        )
    return decision


def _explanation(folder: Path, given: Path | None, evidence: Evidence) -> Explanation:
    """What localisation found of this very file: as given, else beside the evidence, where one of
    another file, or one that can't be read, says nothing."""
    if given is not None:
        found = _read(given)
        if not _is_of(found, evidence):
            raise DigestMismatch(
                f"{given} explains another file than {evidence.subject.sha256}. Give that of this "
                "one, or leave --explanation away."
            )
        return found
    return explanation_beside(folder, evidence)


def _read(path: Path) -> Explanation:
    """`gate locate` writes the layers alone, the pipeline the explanation around them."""
    if path.name == EXPLANATION:
        return Explanation.load(path)
    try:
        return Explanation(localisation=Localisation.load(path))
    except EvidenceError:
        return Explanation.load(path)


def _is_of(found: Explanation, evidence: Evidence) -> bool:
    layers = found.localisation
    return layers is None or layers.subject_sha256 == evidence.subject.sha256
