"""A release: a file with its evidence and decision; and what came of promoting it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gate.decision import Decision, decide
from gate.digest import Digest
from gate.errors import DigestMismatch, EvidenceError, OnnxFileError
from gate.evidence import Evidence
from gate.golden.folder import Vectors, read_golden
from gate.policy import Policy
from gate.registry.port import (
    GOLDEN,
    TAG_EVIDENCE,
    TAG_GOLDEN,
    TAG_POLICY,
    TAG_RUNTIMES,
    TAG_SHA256,
    TAG_VERDICT,
    TAG_WAIVED,
    Draft,
)

Outcome = Literal["promoted", "passed", "unchanged", "refused", "dry_run", "rolled_back"]


@dataclass(frozen=True)
class Release:
    """A file, what was measured on it, what was decided, and the MLflow run that it belongs to.

    `description`: Markdown for the registry; the first line is one plain sentence.
    """

    model_name: str
    onnx_path: Path
    evidence: Evidence
    decision: Decision
    run_id: str
    description: str
    golden: Path | None = None
    """The folder of golden vectors that goes beside the file, with the decision's policy."""

    def verify(self, policy: Policy) -> None:
        """Prove that file, evidence, policy and decision belong together.

        Raises DigestMismatch where the file or a digest is another, EvidenceError where deciding
        again does not give this decision or the golden vectors are not whole.
        """
        subject, decision = self.evidence.subject.sha256, self.decision
        subject.verify(digest_of_model(self.onnx_path, expected=subject), what=str(self.onnx_path))
        self._verify_description()
        decision.subject_sha256.verify(subject, what="the evidence's file")
        decision.policy_sha256.verify(policy.digest(), what="the policy")
        decision.evidence_sha256.verify(self.evidence.digest(), what="the evidence")
        again = decide(policy, self.evidence, decided_at=decision.decided_at)
        golden = self._vectors()
        if golden is not None:
            made_for, origin = golden.golden.model.sha256, golden.golden.origin
            subject.verify(made_for, what=f"the file of the golden vectors in {self.golden}")
            decision.policy_sha256.verify(
                origin.policy_sha256, what=f"the policy of the golden vectors in {self.golden}"
            )
        # By digest: NaN is not equal to itself.
        if again.digest() != decision.digest():
            raise EvidenceError(
                f"the decision says {decision.verdict} in {len(decision.checks)} checks; its own "
                f"evidence and policy give {again.verdict} in {len(again.checks)} checks, not the "
                "same ones. It was edited, or made by another version of the gate: decide again."
            )

    def _verify_description(self) -> None:
        """What is uploaded follows the subject (its external data): it must be the file's own."""
        from gate.export.onnx_file import read_subject

        seen, told = read_subject(self.onnx_path).to_plain(), self.evidence.subject.to_plain()
        other = sorted(field for field in seen if seen[field] != told[field])
        if other:
            raise EvidenceError(
                f"the evidence describes {self.onnx_path} otherwise than it is: "
                f"{', '.join(f'{field} {told[field]}, not {seen[field]}' for field in other)}. "
                "It was edited, or made by another version of the gate: measure and decide again."
            )

    def draft(self) -> Draft:
        """The version that this release becomes."""
        decision = self.decision
        tags = {
            TAG_VERDICT: str(decision.verdict),
            TAG_SHA256: decision.subject_sha256.hex,
            TAG_POLICY: decision.policy_sha256.hex,
            TAG_EVIDENCE: decision.evidence_sha256.hex,
            TAG_RUNTIMES: ",".join(decision.runtimes),
        }
        if decision.waived:
            tags[TAG_WAIVED] = ",".join(check.title for check in decision.waived)
        golden = self._vectors()
        beside = {}
        if golden is not None and self.golden is not None:
            tags[TAG_GOLDEN] = golden.sha256.hex
            beside = {GOLDEN: self.golden}
        return Draft(
            self.onnx_path, self.evidence.subject, self.run_id, tags, self.description, beside
        )

    @property
    def golden_sha256(self) -> Digest | None:
        """Digest of the golden vectors, if there are any. Raises EvidenceError."""
        vectors = self._vectors()
        return None if vectors is None else vectors.sha256

    def _vectors(self) -> Vectors | None:
        return None if self.golden is None else read_golden(self.golden)


@dataclass(frozen=True)
class Promotion:
    """What came of it. `version` serves now (refused: what the answer is about, if anything)."""

    outcome: Outcome
    version: str | None
    previous_version: str | None
    reason: str


def digest_of_model(path: Path, *, expected: Digest) -> Digest:
    """Digest of a model as evidence counts it: of the file, else of file and external data.

    Raises StorageError if the file can't be read, DigestMismatch if it is a text.
    """
    seen = Digest.of_file(path)
    if _is_text(path):
        raise DigestMismatch(f"{path} is a text, no ONNX model. It was exchanged.")
    if seen == expected:
        return seen
    from gate.export.onnx_file import read_subject

    try:
        return read_subject(path).sha256
    except OnnxFileError:  # damaged: surely not the expected bytes
        return seen


def _is_text(path: Path) -> bool:
    """True for JSON: the digest of a model with external data is that of such a text, and no
    protobuf begins so."""
    with path.open("rb") as stream:
        return stream.read(1) == b"{"
