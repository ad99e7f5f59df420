"""The records of a judgement as they lie in a folder: what a page is made of again."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from gate.decision.decision import Decision, decide
from gate.errors import DigestMismatch, EvidenceError, GateError
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.records.localisation import Explanation, Localisation
from gate.records.names import CHANGE, DECISION, EVIDENCE, EXPLANATION, LOCALISATION
from gate.report.folder import pictures
from gate.report.report import Report
from gate.story.making import story_of
from gate.story.story import Change


@dataclass(frozen=True)
class RecordFiles:
    """Files that are to be read in the place of those beside the evidence, and another policy."""

    decision: Path | None = None
    explanation: Path | None = None
    policy: Policy | None = None
    """Judge anew by it, at `now`."""
    now: str = ""
    """UTC, ISO 8601."""


@dataclass(frozen=True)
class JudgedRecords:
    """Evidence and decision, and what lies beside them."""

    folder: Path
    evidence: Evidence
    decision: Decision
    explanation: Explanation

    @classmethod
    def read(cls, place: Path, given: RecordFiles | None = None) -> JudgedRecords:
        """Of an evidence file or of the folder that has one. Raises EvidenceError where a record is
        missing or not whole, DigestMismatch where the decision is of other evidence."""
        given = given or RecordFiles()
        file = place / EVIDENCE if place.is_dir() else place
        evidence = Evidence.load(file)
        if given.policy is not None:
            decision = decide(given.policy, evidence, decided_at=given.now)
        else:
            decision = _decision(given.decision or file.parent / DECISION, evidence)
        found = _explanation(file.parent, given.explanation, evidence)
        return cls(file.parent, evidence, decision, found)

    def report(self, change: Change | None = None) -> Report:
        """What the page is made of. `change`: against other records; None: what was recorded
        beside these against the champion, if anything was."""
        change = change or _change(self.folder)
        story = story_of(self.decision, self.evidence, explanation=self.explanation, change=change)
        return Report(
            story,
            self.evidence,
            self.decision,
            explanation=self.explanation,
            pictures=pictures(self.folder),
        )


def _change(folder: Path) -> Change | None:
    """Against the champion of then; it is only shown, so one that can't be read is none."""
    with contextlib.suppress(EvidenceError):
        return Change.load(folder / CHANGE)
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
    for name in (EXPLANATION, LOCALISATION):
        try:
            found = _read(folder / name)
        except GateError:
            continue
        if _is_of(found, evidence):
            return found
    return Explanation()


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
