"""A release: file, twin, evidence, decision, statements."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, Self

from gate.decision.decide import Decision, decide
from gate.errors import DigestMismatch, EvidenceError, OnnxFileError, PolicyError
from gate.golden.folder import files_of, read_golden
from gate.golden.manifest import GoldenManifest, Origin
from gate.ledger.entry import ComparedWith, LedgerEntry, TwinDigests
from gate.onnx_file.release_file import ReleaseFile, is_release_file
from gate.onnx_file.sandboxed_reading import origin_within, verify_description, verify_files
from gate.policy.overrides import sentence
from gate.policy.policy import Policy
from gate.preprocess.spec import PreprocessSpec
from gate.records.champion_comparison import Trend
from gate.records.evidence import Evidence, Source
from gate.records.layout import GOLDEN, VersionSize
from gate.registry.interface import Draft, Tag
from gate.sandbox.limits import SandboxLimits
from gate.signing.trust import CLOCKS_APART, time_of
from gate.signing.verification import StatementPair
from gate.storage.digest import Digest
from gate.summary.render import render_check


@dataclass(frozen=True)
class GoldenFolder:
    """Golden vectors on the disk, as they were when they were opened: read and proven then, once.

    Whoever takes the files along compares what arrives with `sha256`.
    """

    path: Path
    golden: GoldenManifest
    sha256: Digest
    """Of golden.json, which names the digests of all else."""

    @classmethod
    def open(cls, path: Path, *, sha256: Digest | None = None) -> Self:
        """Read and prove the vectors, as `read_golden`. Raises EvidenceError, DigestMismatch."""
        vectors = read_golden(path, sha256=sha256)
        return cls(path, vectors.golden, vectors.sha256)


@dataclass(frozen=True)
class VerificationRules:
    """How a release is verified."""

    limits: SandboxLimits | None = None
    """Within which a child process reads the file; None: it is our own, and is read in this
    process."""
    line: LedgerEntry | None = None
    """Of a registered version: the entry that names what is beside it. What was decided by another
    policy, or without the comparison of this entry, is decided again. None: a release that is to be
    promoted, by the policy that decided on it."""
    at: datetime | None = None
    """When statements and keys must count; None: when the verdict was made."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedFile:
    """A file, its evidence and decision, and the golden vectors that go beside it.

    What it says of itself is what was opened: only `verified` looks at the disk.
    """

    onnx_path: Path
    evidence: Evidence
    decision: Decision
    golden: GoldenFolder | None = None
    """Made with the decision's policy."""
    preprocessing: Path | None = None
    """The spec of preprocessing whose digest is in the evidence."""
    statements: StatementPair | None = None
    """Signatures of evidence and decision; None: they are not signed."""

    def verified(self, policy: Policy, rules: VerificationRules) -> Self:
        """Prove that file, evidence, policy, decision and golden vectors belong together; gives it
        with the decision as it is decided again. Only `verify_release` calls it.

        Raises DigestMismatch where the file or a digest is another, EvidenceError where deciding
        again does not give this decision, or the golden vectors were computed by other code of the
        model, or of other parts of a release; PolicyError for a release file that is none;
        LimitExceeded.
        """
        subject, decision = self.evidence.subject.sha256, self.decision
        try:
            # One pass: the digest is that of the bytes that are parsed.
            verify_description(self.onnx_path, self.evidence, rules.limits)
        except (EvidenceError, OnnxFileError, PolicyError):
            verify_files(self.onnx_path, self.evidence)  # raises DigestMismatch for other bytes
            raise
        incumbent = decision.incumbent or (rules.line.incumbent if rules.line else None)
        by = (decision.policy_sha256, decision.incumbent)
        is_anew = rules.line is not None and by != (policy.digest(), incumbent)
        decision.subject_sha256.verify(subject, what="the evidence's file")
        if not is_anew and policy.digest() != decision.policy_sha256:
            raise DigestMismatch(
                f"the policy has digest {policy.digest()}, but {decision.policy_sha256} was "
                "applied. Name that one by --policy, or apply this one by gate check --policy."
            )
        decision.evidence_sha256.verify(self.evidence.digest(), what="the evidence")
        again = decide(policy, self.evidence, incumbent=incumbent, decided_at=decision.decided_at)
        if self.golden is not None:
            made_for, origin = self.golden.golden.model.sha256, self.golden.golden.origin
            vectors = f"the golden vectors in {self.golden.path}"
            subject.verify(made_for, what=f"the file of {vectors}")
            decision.policy_sha256.verify(origin.policy_sha256, what=f"the policy of {vectors}")
            self._verify_code(origin, what=vectors)
            self._verify_vectors_of_parts(self.golden.golden, what=vectors)
        self._verify_preprocessing()
        if not is_anew and again.conclusion() != decision.conclusion():
            raise EvidenceError(
                f"the decision says {decision.verdict} in {len(decision.checks)} checks; its own "
                f"evidence and policy give {again.verdict} in {len(again.checks)} checks, not the "
                "same ones. It was edited, or made by another version of the gate: decide again."
            )
        return replace(self, decision=again if is_anew else decision)

    @property
    def golden_sha256(self) -> Digest | None:
        """Digest of the golden vectors, if there are any."""
        return None if self.golden is None else self.golden.sha256

    @property
    def why_not(self) -> str | None:
        """Return why the decision refuses the file; None for a PASS by a policy as it is
        written."""
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
        first = "no runtime passed" if check is None else render_check(check)
        if check is not None and check.part:
            first = f"in the part {check.part}: {first}"
        return f"{decision.verdict}: {len(decision.problems)} checks say no, first: {first}"

    def untimely(self, policy: Policy, *, at: datetime) -> str | None:
        """Return why the evidence is too old for a promotion at this moment, or of its future, or
        None."""
        text = self.evidence.measured_at
        measured = time_of(text)
        remedy = "Measure the file again (make repro, or gate check --report)"
        if measured is None:
            return f"its evidence was measured at '{text}', which is no time (ISO 8601). {remedy}."
        age = (at - measured) / timedelta(days=1)
        if age > policy.max_age_days:
            return (
                f"its evidence is {age:.1f} days old, the policy allows {policy.max_age_days:g} "
                f"(max_age_days). {remedy}."
            )
        if measured - at > CLOCKS_APART:
            return (
                f"its evidence is of the future: measured at {text}, promoted at "
                f"{at.isoformat(timespec='seconds')}; clocks may be {CLOCKS_APART.seconds // 60} "
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
            spec = PreprocessSpec.from_file(self.preprocessing)
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

    def _verify_vectors_of_parts(self, golden: GoldenManifest, *, what: str) -> None:
        parts = {name: part.sha256 for name, part in self.evidence.subject.parts.items()}
        proven = {name: part.model.sha256 for name, part in golden.parts.items()}
        if parts != proven:
            other = ", ".join(sorted({name for name, _ in parts.items() ^ proven.items()}))
            raise EvidenceError(
                f"{what} are of other parts than the release: {other}. Measure again, which makes "
                "both."
            )


Outcome = Literal[
    "promoted", "passed", "handed_in", "unchanged", "refused", "dry_run", "rolled_back"
]


@dataclass(frozen=True, kw_only=True)
class Release(EvaluatedFile):
    """A judged file, and its quantized twin where the policy names one.

    `description`: Markdown for the registry; the first line is one plain sentence.
    """

    model_name: str
    run_id: str
    description: str
    twin: EvaluatedFile | None = None
    trend: Trend = field(default_factory=Trend)
    """Of the releases before this one."""
    signers: tuple[str, ...] = ()
    """IDs of the keys that were verified to sign the verdict, for the ledger; set on promotion."""
    measured_by: tuple[str, ...] = ()
    """The same of further keys that signed what was measured."""

    def verified(self, policy: Policy, rules: VerificationRules) -> Self:
        """Prove that all of it belongs together, the twin too.

        Raises DigestMismatch and EvidenceError, as `EvaluatedFile.verified`; EvidenceError for a
        twin that the policy does not name, or names and is not there, or is of another model, and
        as `verify_origin`.
        """
        verified = super().verified(policy, rules)
        if self.twin is None and policy.twin is None:
            return verified
        if self.twin is None or policy.twin is None:
            there = "no quantized twin" if self.twin is None else "a quantized twin"
            names = "names one" if policy.twin is not None else "names none"
            raise EvidenceError(
                f"the release has {there}, the policy {names} (gate.twin). Give both or neither."
            )
        line = rules.line and rules.line.model_copy(update={"incumbent": None})
        twin = self.twin.verified(policy.twin, replace(rules, line=line))
        verify_origin(self.twin, exact=self, limits=rules.limits)
        ours, its = (_reference(each.evidence.source) for each in (self, self.twin))
        if ours != its:
            raise EvidenceError(
                f"the twin was measured against {its}, the file against {ours}. Measure both "
                "against the same model."
            )
        exact, quantized = self.evidence.source.code, self.twin.evidence.source.code
        if exact is not None and quantized is not None and exact != quantized:
            raise EvidenceError(
                "the model's code is not the same in the twin's evidence: "
                f"{', '.join(quantized.changes_since(exact))}. Measure both again."
            )
        return replace(verified, twin=twin)

    @property
    def refusal(self) -> str | None:
        """Return why it must not be promoted; None where every decision is a PASS."""
        if self.why_not is not None:
            return self.why_not
        if self.twin is not None and self.twin.why_not is not None:
            return f"the quantized twin: {self.twin.why_not}"
        return None

    def untimely(self, policy: Policy, *, at: datetime) -> str | None:
        """Return why the evidence of the file or the twin is too old or in the future, or None."""
        late = None if self.twin is None else self.twin.untimely(policy, at=at)
        return super().untimely(policy, at=at) or (late and f"the quantized twin: {late}")

    def outdated(self) -> str | None:
        """Look at the model's source files: why the evidence is on other code than there is here;
        None where it is the same, and where the code is not at hand."""
        from gate.model.source_code import changed_files

        code = self.evidence.source.code
        changed = () if code is None else changed_files(code)
        if not changed:
            return None
        return (
            f"the model's code changed since it was measured: {', '.join(changed)}. "
            "Measure the file again (make repro, or gate check --report)."
        )

    @property
    def twin_digests(self) -> TwinDigests | None:
        """Return the digests of the twin for the ledger; None without a twin."""
        return None if self.twin is None else digests_of(self.twin)

    @property
    def compared_with(self) -> ComparedWith | None:
        """Return the digests of the comparison with the champion for the ledger."""
        return ComparedWith.from_decision(self.decision)

    @property
    def preprocess_sha256(self) -> Digest | None:
        """Digest of the preprocessing spec that goes with the file."""
        return None if self.preprocessing is None else self.evidence.source.preprocess_sha256

    @property
    def extent(self) -> VersionSize:
        """How much it is, the twin and the golden vectors included; records are small."""
        parts = [self] if self.twin is None else [self, self.twin]
        golden = [part.golden.golden for part in parts if part.golden is not None]
        subjects = [part.evidence.subject for part in parts]
        return VersionSize(
            size_bytes=sum(each.size_bytes for each in subjects)
            + sum(each.size_bytes for each in golden),
            files=sum(1 + len(each.external_data) for each in subjects)
            + sum(len(files_of(each)) for each in golden),
        )

    def draft(self) -> Draft:
        """The version that this release becomes."""
        decision = self.decision
        tags = {
            Tag.VERDICT: str(decision.verdict),
            Tag.SHA256: decision.subject_sha256.hex,
            Tag.POLICY: decision.policy_sha256.hex,
            Tag.EVIDENCE: decision.evidence_sha256.hex,
            Tag.RUNTIMES: ",".join(decision.runtimes),
        }
        if decision.waived:
            tags[Tag.WAIVED] = ",".join(check.title for check in decision.waived)
        if self.twin is not None:
            tags[Tag.TWIN] = self.twin.decision.subject_sha256.hex
        if self.preprocess_sha256 is not None:
            tags[Tag.PREPROCESS] = self.preprocess_sha256.hex
        if self.compared_with is not None:
            tags[Tag.COMPARED_WITH] = self.compared_with.record_sha256.hex
        beside = {}
        if self.golden is not None:
            tags[Tag.GOLDEN] = self.golden.sha256.hex
            beside = {GOLDEN: self.golden.path}
        return Draft(
            self.onnx_path, self.evidence.subject, self.run_id, tags, self.description, beside
        )


@dataclass(frozen=True)
class PromotionResult:
    """The result of a promotion.

    `version` serves now; of a refusal, it is the version that the reason is about, if any.
    """

    outcome: Outcome
    version: str | None
    previous_version: str | None
    reason: str
    signers: tuple[str, ...] = ()
    """IDs of the keys that signed the verdict; none: no signature was required, or nothing was
    tried."""


def digests_of(twin: EvaluatedFile) -> TwinDigests:
    """Return the digests of a twin as it was loaded."""
    return TwinDigests(
        sha256=twin.decision.subject_sha256,
        evidence_sha256=twin.decision.evidence_sha256,
        golden_sha256=twin.golden_sha256,
    )


def verify_origin(
    twin: EvaluatedFile, *, exact: EvaluatedFile, limits: SandboxLimits | None
) -> None:
    """A twin is of these very bytes, as its own metadata says; of a release it has the same chain
    and parts, each of which is the exact one of that name or was quantized from it.

    Both are to be verified before. `limits`: as of `VerificationRules`. Raises EvidenceError with
    the name of the part, and as `origin_within`.
    """
    several = is_release_file(exact.onnx_path)
    if several != is_release_file(twin.onnx_path):
        kinds = [
            "a release of several files" if each else "one file" for each in (several, not several)
        ]
        raise EvidenceError(
            f"{exact.onnx_path} is {kinds[0]}, its twin {twin.onnx_path} is {kinds[1]}. Quantize "
            "what is promoted (gate quantize), and judge that twin."
        )
    if several:
        _verify_parts(twin, exact, limits)
        return
    if twin.onnx_path.suffix != ".onnx":
        raise EvidenceError(
            f"the twin {twin.onnx_path} must have a name that ends in .onnx: rename it, and "
            "judge it again."
        )
    origin = origin_within(twin.onnx_path, limits)
    sha256 = str(exact.evidence.subject.sha256)
    if origin != sha256:
        raise EvidenceError(
            f"the twin {twin.onnx_path} was quantized from {origin or 'an unknown file'}, the "
            f"exact file is {sha256}. Quantize this file (gate quantize), and judge its twin."
        )


def _verify_parts(twin: EvaluatedFile, exact: EvaluatedFile, limits: SandboxLimits | None) -> None:
    ours, its = (ReleaseFile.load(each.onnx_path) for each in (exact, twin))
    remedy = "Quantize this release (gate quantize), and judge its twin."
    if its.chain != ours.chain:
        raise EvidenceError(
            f"the chain of the twin {twin.onnx_path} is {its.chain}, that of the exact release is "
            f"{ours.chain}. {remedy}"
        )
    for name in sorted({*ours.references} | {*its.references}):
        reference, of_twin = ours.references.get(name), its.references.get(name)
        if reference != of_twin:
            raise EvidenceError(
                f"the part {name} of the twin {twin.onnx_path} computes like "
                f"{of_twin or 'nothing: there is none'}, that of the exact release like "
                f"{reference or 'nothing: there is none'}. {remedy}"
            )
    quantized = False
    for name, part in twin.evidence.subject.parts.items():
        sha256 = exact.evidence.subject.parts[name].sha256
        if part.sha256 == sha256:
            continue
        origin = origin_within(twin.onnx_path.parent / part.file, limits)
        if origin != str(sha256):
            raise EvidenceError(
                f"the part {name} of the twin {twin.onnx_path} was quantized from "
                f"{origin or 'an unknown file'}, the exact part is {sha256}. {remedy}"
            )
        quantized = True
    if not quantized:
        raise EvidenceError(
            f"no part of the twin {twin.onnx_path} is quantized: all are the exact ones. {remedy}"
        )


def _reference(source: Source) -> str:
    """Return a description of the reference, by digest where it has one: an ONNX file may have
    moved."""
    what = (
        f"the model {source.factory} with checkpoint {source.checkpoint_sha256}"
        if source.onnx_sha256 is None
        else f"the ONNX file {source.onnx_sha256}"
    )
    return f"{what} and preprocessing {source.preprocess_sha256}"
