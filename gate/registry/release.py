"""A file with what was measured on it and decided, and the proof that it belongs together."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from gate.attestation.statements import Statements
from gate.bounded.limits import ChildLimits
from gate.decision.decision import Decision, decide
from gate.errors import DigestMismatch, EvidenceError, PolicyError
from gate.golden.folder import read_golden
from gate.golden.record import Golden, Origin
from gate.onnxfile.description import verify_description, verify_files
from gate.policy.policy import Policy
from gate.policy.tried import sentence
from gate.preprocess.spec import PreprocessSpec
from gate.records.evidence import Evidence
from gate.storage.digest import Digest

_CLOCKS_APART = timedelta(minutes=5)
"""How far the clocks of two machines may be apart."""


@dataclass(frozen=True)
class GoldenFolder:
    """Golden vectors on the disk, as they were when they were opened: read and proven then, once.

    Whoever takes the files along compares what arrives with `sha256`.
    """

    path: Path
    golden: Golden
    sha256: Digest
    """Of golden.json, which names the digests of all else."""

    @classmethod
    def open(cls, path: Path, *, sha256: Digest | None = None) -> Self:
        """Read and prove the vectors, as `read_golden`. Raises EvidenceError, DigestMismatch."""
        vectors = read_golden(path, sha256=sha256)
        return cls(path, vectors.golden, vectors.sha256)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A file, its evidence and decision, and the golden vectors that go beside it.

    What it says of itself is what was opened: only `verify` looks at the disk.
    """

    onnx_path: Path
    evidence: Evidence
    decision: Decision
    golden: GoldenFolder | None = None
    """Made with the decision's policy."""
    preprocessing: Path | None = None
    """The spec of preprocessing whose digest is in the evidence."""
    statements: Statements | None = None
    """Who vouches for evidence and decision; None: nobody signed."""

    def verify(self, policy: Policy, *, limits: ChildLimits | None = None) -> None:
        """Prove that file, evidence, policy, decision and golden vectors belong together.

        `limits`: within which a child process reads the file; None: it is our own, and is read in
        this process.

        Raises DigestMismatch where the file or a digest is another, EvidenceError where deciding
        again does not give this decision, or the golden vectors were computed by other code of the
        model, or of other parts of a release; PolicyError for a release file that is none;
        LimitExceeded.
        """
        subject, decision = self.evidence.subject.sha256, self.decision
        verify_files(self.onnx_path, self.evidence)
        verify_description(self.onnx_path, self.evidence, limits)
        decision.subject_sha256.verify(subject, what="the evidence's file")
        decision.policy_sha256.verify(policy.digest(), what="the policy")
        decision.evidence_sha256.verify(self.evidence.digest(), what="the evidence")
        again = decide(
            policy, self.evidence, incumbent=decision.incumbent, decided_at=decision.decided_at
        )
        if self.golden is not None:
            made_for, origin = self.golden.golden.model.sha256, self.golden.golden.origin
            vectors = f"the golden vectors in {self.golden.path}"
            subject.verify(made_for, what=f"the file of {vectors}")
            decision.policy_sha256.verify(origin.policy_sha256, what=f"the policy of {vectors}")
            self._verify_code(origin, what=vectors)
            self._verify_vectors_of_parts(self.golden.golden, what=vectors)
        self._verify_preprocessing()
        # By digest: NaN is not equal to itself.
        if again.digest() != decision.digest():
            raise EvidenceError(
                f"the decision says {decision.verdict} in {len(decision.checks)} checks; its own "
                f"evidence and policy give {again.verdict} in {len(again.checks)} checks, not the "
                "same ones. It was edited, or made by another version of the gate: decide again."
            )

    @property
    def golden_sha256(self) -> Digest | None:
        """Digest of the golden vectors, if there are any."""
        return None if self.golden is None else self.golden.sha256

    @property
    def why_not(self) -> str | None:
        """Why the decision refuses the file; None for a PASS by a policy as it is written."""
        decision = self.decision
        if decision.tried:
            return (
                f"the verdict is by values that were tried out: {sentence(decision.tried)}. Write "
                "them into the policy, and judge again without --set"
            )
        if decision.passed:
            return None
        problems = decision.problems
        # A part that fails is why the whole does.
        check = next((check for check in problems if check.part), next(iter(problems), None))
        first = "no runtime passed" if check is None else check.explanation
        if check is not None and check.part:
            first = f"in the part {check.part}: {first}"
        return f"{decision.verdict}: {len(decision.problems)} checks say no, first: {first}"

    def untimely(self, policy: Policy, *, at: datetime) -> str | None:
        """Why the evidence is too old for a promotion at this moment, or of its future, or None."""
        text = self.evidence.measured_at
        measured, remedy = (
            moment(text),
            "Measure the file again (make repro, or gate check --report)",
        )
        if measured is None:
            return f"its evidence was measured at '{text}', which is no time (ISO 8601). {remedy}."
        age = (at - measured) / timedelta(days=1)
        if age > policy.max_age_days:
            return (
                f"its evidence is {age:.1f} days old, the policy allows {policy.max_age_days:g} "
                f"(max_age_days). {remedy}."
            )
        if measured - at > _CLOCKS_APART:
            return (
                f"its evidence is of the future: measured at {text}, promoted at "
                f"{at.isoformat(timespec='seconds')}; clocks may be {_CLOCKS_APART.seconds // 60} "
                f"minutes apart. Set the clocks right. {remedy}."
            )
        return None

    def _verify_code(self, origin: Origin, *, what: str) -> None:
        code = self.evidence.source.code
        measured = None if code is None else code.digest()
        if origin.code_sha256 != measured:
            raise EvidenceError(
                f"{what} were computed by the model's code "
                f"{origin.code_sha256 or '(not recorded)'}, the evidence is on "
                f"{measured or '(not recorded)'}. Measure again, which makes both."
            )

    def _verify_preprocessing(self) -> None:
        if self.preprocessing is None:
            return
        expected = self.evidence.source.preprocess_sha256
        if expected is None:
            raise EvidenceError(
                f"{self.preprocessing} goes with the file, the evidence names no preprocessing. "
                "Measure with it (gate check --preprocessing), or leave it out."
            )
        what = str(self.preprocessing)
        try:
            spec = PreprocessSpec.of_file(self.preprocessing)
        except PolicyError as error:
            raise DigestMismatch(f"{what} is no whole preprocessing spec: {error}") from error
        expected.verify(spec.digest(), what=f"the preprocessing spec {what}")
        inputs = self.evidence.subject.inputs
        misfit = spec.tensor.misfit((taken.dtype, taken.shape) for taken in inputs)
        if misfit is not None:
            raise EvidenceError(
                f"{self.preprocessing} is not the preprocessing of {self.onnx_path}: {misfit}. "
                "Give the spec that the model was trained with."
            )

    def _verify_vectors_of_parts(self, golden: Golden, *, what: str) -> None:
        parts = {name: part.sha256 for name, part in self.evidence.subject.parts.items()}
        proven = {name: part.model.sha256 for name, part in golden.parts.items()}
        if parts != proven:
            other = ", ".join(sorted({name for name, _ in parts.items() ^ proven.items()}))
            raise EvidenceError(
                f"{what} are of other parts than the release: {other}. Measure again, which makes "
                "both."
            )


def moment(text: str) -> datetime | None:
    """The time that an ISO 8601 text names, UTC without a zone; None where it is no time."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
