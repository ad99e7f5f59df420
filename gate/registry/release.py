"""A release: ONNX file, quantized twin, evidence, decision, statements."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, Self

from gate.decision.decide import Decision, decide
from gate.errors import DigestMismatch, EvidenceError, OnnxFileError, PolicyError
from gate.golden.folder import files_of, read_golden
from gate.golden.manifest import GoldenManifest
from gate.ledger.entry import ComparedWith, LedgerEntry, TwinDigests
from gate.onnx_file.release_file import ReleaseFile, is_release_file
from gate.onnx_file.sandboxed_reading import origin_within, verify_description, verify_files
from gate.policy.overrides import override_text
from gate.policy.policy import Policy
from gate.preprocess.spec import PreprocessSpec
from gate.records.champion_comparison import Trend
from gate.records.evidence import Evidence, Source
from gate.records.layout import GOLDEN, VersionSize
from gate.registry.interface import Draft, Tag
from gate.sandbox.limits import SandboxLimits
from gate.signing.trust import MAX_CLOCK_SKEW, parse_time
from gate.signing.verification import StatementPair
from gate.storage.digest import Digest
from gate.summary.render import render_check


@dataclass(frozen=True)
class GoldenFolder:
    """A folder of golden vectors that was read and verified once, when it was opened.

    After copying the files, compare the copy with `sha256`.
    """

    path: Path
    golden: GoldenManifest
    sha256: Digest
    """Digest of golden.json, which contains the digests of the other files."""

    @classmethod
    def open(cls, path: Path, *, sha256: Digest | None = None) -> Self:
        """Read and verify the vectors (`read_golden`). Raises EvidenceError, DigestMismatch."""
        vectors = read_golden(path, sha256=sha256)
        return cls(path, vectors.golden, vectors.sha256)


@dataclass(frozen=True)
class VerificationRules:
    """How a release is verified."""

    limits: SandboxLimits | None = None
    """Limits of the child process that reads the file; None: the file is trusted and read in this
    process."""
    entry: LedgerEntry | None = None
    """The ledger entry of a registered version, with the digests of its files. A decision by
    another policy, or without the comparison in this entry, is computed again. None: a release to
    be promoted under the policy of its decision."""
    at: datetime | None = None
    """Time at which statements and keys must be valid; None: the time of the verdict."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedFile:
    """A file with its evidence, its decision and its golden vectors.

    The fields are those that were loaded; only `verified` reads the file itself.
    """

    onnx_path: Path
    evidence: Evidence
    decision: Decision
    golden: GoldenFolder | None = None
    """Golden vectors with the tolerances of the decision's policy."""
    preprocessing: Path | None = None
    """Preprocessing spec whose digest is in the evidence."""
    statements: StatementPair | None = None
    """Signed statements about evidence and decision; None if they are not signed."""

    def verified(self, policy: Policy, rules: VerificationRules) -> Self:
        """Verify that file, evidence, policy, decision and golden vectors belong together.

        Return the file with the recomputed decision. Only `verify_release` calls this method.

        Raises DigestMismatch if a digest differs; EvidenceError if the recomputed decision differs,
        or the golden vectors come from other model code or other parts of a release; PolicyError
        for a malformed release file; LimitExceeded.
        """
        subject, decision = self.evidence.subject.sha256, self.decision
        try:
            # One pass: the digest is that of the bytes that are parsed.
            verify_description(self.onnx_path, self.evidence, rules.limits)
        except (EvidenceError, OnnxFileError, PolicyError):
            verify_files(self.onnx_path, self.evidence)  # raises DigestMismatch for other bytes
            raise
        incumbent = decision.incumbent or (rules.entry.incumbent if rules.entry else None)
        basis = (decision.policy_sha256, decision.incumbent)
        is_new = rules.entry is not None and basis != (policy.digest(), incumbent)
        decision.subject_sha256.verify(subject, label="the evidence's file")
        if not is_new and policy.digest() != decision.policy_sha256:
            raise DigestMismatch(
                f"the policy has digest {policy.digest()}, but the decision was made with "
                f"{decision.policy_sha256}. Name that policy with --policy, or run gate check "
                "--policy with this one."
            )
        decision.evidence_sha256.verify(self.evidence.digest(), label="the evidence")
        repeated = decide(
            policy, self.evidence, incumbent=incumbent, decided_at=decision.decided_at
        )
        if self.golden is not None:
            self._verify_golden(self.golden)
        self._verify_preprocessing()
        if not is_new and repeated.conclusion() != decision.conclusion():
            raise EvidenceError(
                f"the decision is {decision.verdict} with {len(decision.checks)} checks, but its "
                f"evidence and policy give {repeated.verdict} with {len(repeated.checks)} checks. "
                "The decision was edited or made by another version of the gate: decide again."
            )
        return replace(self, decision=repeated if is_new else decision)

    @property
    def golden_sha256(self) -> Digest | None:
        """Return the digest of the golden vectors, if there are any."""
        return None if self.golden is None else self.golden.sha256

    @property
    def refusal_reason(self) -> str | None:
        """Return why the decision refuses the file; None for a PASS without overrides."""
        decision = self.decision
        if decision.tried:
            return (
                f"the policy was overridden with --set: {override_text(decision.tried)}. Write the "
                "values into the policy file and run gate check again without --set"
            )
        if decision.passed:
            return None
        problems = decision.problems
        # Prefer the check of a part: a part that fails makes the whole release fail.
        check = next((check for check in problems if check.part), next(iter(problems), None))
        first = "no runtime passed" if check is None else render_check(check)
        if check is not None and check.part:
            first = f"in the part {check.part}: {first}"
        return f"{decision.verdict}: {len(decision.problems)} checks did not pass, first: {first}"

    def age_problem(self, policy: Policy, *, at: datetime) -> str | None:
        """Return why the evidence is too old at a time, or from its future; None if it is valid."""
        text = self.evidence.measured_at
        measured = parse_time(text)
        remedy = "Measure the file again (make repro, or gate check --report)"
        if measured is None:
            return f"its evidence has the time '{text}', which is not ISO 8601. {remedy}."
        age = (at - measured) / timedelta(days=1)
        if age > policy.max_age_days:
            return (
                f"its evidence is {age:.1f} days old, the policy allows {policy.max_age_days:g} "
                f"(max_age_days). {remedy}."
            )
        if measured - at > MAX_CLOCK_SKEW:
            return (
                f"its evidence is from the future: measured at {text}, promoted at "
                f"{at.isoformat(timespec='seconds')}; the clocks may differ by at most "
                f"{MAX_CLOCK_SKEW.seconds // 60} minutes. Correct the clocks. {remedy}."
            )
        return None

    def _verify_golden(self, vectors: GoldenFolder) -> None:
        golden, label = vectors.golden, f"the golden vectors in {vectors.path}"
        origin, subject, code = golden.origin, self.evidence.subject, self.evidence.source.code
        subject.sha256.verify(golden.model.sha256, label=f"the file of {label}")
        policy = self.decision.policy_sha256
        policy.verify(origin.policy_sha256, label=f"the policy of {label}")
        measured_code = None if code is None else code.digest()
        if origin.code_sha256 != measured_code:
            raise EvidenceError(
                f"{label} were computed with the model code "
                f"{origin.code_sha256 or '(not recorded)'}, the evidence with "
                f"{measured_code or '(not recorded)'}. Measure again, which creates both."
            )
        parts = {name: part.sha256 for name, part in subject.parts.items()}
        computed = {name: part.model.sha256 for name, part in golden.parts.items()}
        if parts != computed:
            differing = ", ".join(sorted({name for name, _ in parts.items() ^ computed.items()}))
            raise EvidenceError(
                f"{label} were computed with other parts than the release has: {differing}. "
                "Measure again, which creates both."
            )

    def _verify_preprocessing(self) -> None:
        if self.preprocessing is None:
            return
        expected = self.evidence.source.preprocess_sha256
        if expected is None:
            raise EvidenceError(
                f"{self.preprocessing} was submitted, but the evidence was measured without "
                "preprocessing. Measure with it (gate check --preprocessing), or leave it out."
            )
        label = str(self.preprocessing)
        try:
            preprocess_spec = PreprocessSpec.from_file(self.preprocessing)
        except PolicyError as error:
            raise DigestMismatch(f"{label} is not a valid preprocessing spec: {error}") from error
        expected.verify(preprocess_spec.digest(), label=f"the preprocessing spec {label}")
        inputs = self.evidence.subject.inputs
        misfit = preprocess_spec.tensor.misfit((each.dtype, each.shape) for each in inputs)
        if misfit is not None:
            raise EvidenceError(
                f"{self.preprocessing} does not fit the inputs of {self.onnx_path}: {misfit}. "
                "Use the spec with which the model was trained."
            )


Outcome = Literal[
    "promoted", "passed", "handed_in", "unchanged", "refused", "dry_run", "rolled_back"
]


@dataclass(frozen=True, kw_only=True)
class Release(EvaluatedFile):
    """An evaluated file with its quantized twin, if the policy requires one."""

    model_name: str
    run_id: str = ""
    """ID of the MLflow run; empty before the run exists."""
    description: str = ""
    """Markdown for the registry; the first line is one plain sentence."""
    twin: EvaluatedFile | None = None
    trend: Trend = field(default_factory=Trend)
    """Trend of the releases before this one."""
    signers: tuple[str, ...] = ()
    """IDs of the keys whose signature of the verdict was verified; set on promotion."""
    measured_by: tuple[str, ...] = ()
    """IDs of further keys that signed the measurements."""

    def verified(self, policy: Policy, rules: VerificationRules) -> Self:
        """Verify that all parts of the release belong together, including the twin.

        Raises the exceptions of `EvaluatedFile.verified` and `verify_origin`; EvidenceError if the
        twin is missing, not allowed by the policy, or of another model.
        """
        verified = super().verified(policy, rules)
        if self.twin is None and policy.twin is None:
            return verified
        if self.twin is None or policy.twin is None:
            twin_text = "no quantized twin" if self.twin is None else "a quantized twin"
            section = "a section" if policy.twin is not None else "no section"
            raise EvidenceError(
                f"the release has {twin_text}, but the policy has {section} 'gate.twin'. Provide "
                "both or neither."
            )
        entry = rules.entry and rules.entry.model_copy(update={"incumbent": None})
        twin = self.twin.verified(policy.twin, replace(rules, entry=entry))
        verify_origin(self.twin, exact=self, limits=rules.limits)
        exact_model, twin_model = (_reference(each.evidence.source) for each in (self, self.twin))
        if exact_model != twin_model:
            raise EvidenceError(
                f"the twin was measured against {twin_model}, the file against {exact_model}. "
                "Measure both against the same model."
            )
        exact, quantized = self.evidence.source.code, self.twin.evidence.source.code
        if exact is not None and quantized is not None and exact != quantized:
            raise EvidenceError(
                "the evidence of the file and of its twin have different model code: "
                f"{', '.join(quantized.changes_since(exact))}. Measure both again."
            )
        return replace(verified, twin=twin)

    @property
    def evaluated_files(self) -> tuple[EvaluatedFile, ...]:
        """Return the exact file, and its twin if there is one."""
        return (self,) if self.twin is None else (self, self.twin)

    @property
    def refusal(self) -> str | None:
        """Return why the release must not be promoted; None if every decision is a PASS."""
        if self.refusal_reason is not None:
            return self.refusal_reason
        if self.twin is not None and self.twin.refusal_reason is not None:
            return f"the quantized twin: {self.twin.refusal_reason}"
        return None

    def age_problem(self, policy: Policy, *, at: datetime) -> str | None:
        """Return why the evidence of file or twin is too old or from the future, or None."""
        problem = None if self.twin is None else self.twin.age_problem(policy, at=at)
        return super().age_problem(policy, at=at) or (problem and f"the quantized twin: {problem}")

    def outdated(self) -> str | None:
        """Return which source files of the model changed since the measurement.

        None if none changed, or the source files do not exist here."""
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
        """Return the digest of the release's preprocessing spec."""
        return None if self.preprocessing is None else self.evidence.source.preprocess_sha256

    @property
    def extent(self) -> VersionSize:
        """Return size and number of the files, including twin and golden vectors."""
        golden = [each.golden.golden for each in self.evaluated_files if each.golden is not None]
        subjects = [each.evidence.subject for each in self.evaluated_files]
        return VersionSize(
            size_bytes=sum(each.size_bytes for each in subjects)
            + sum(each.size_bytes for each in golden),
            files=sum(1 + len(each.external_data) for each in subjects)
            + sum(len(files_of(each)) for each in golden),
        )

    def draft(self) -> Draft:
        """Return the version to be created from this release."""
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
        folders = {}
        if self.golden is not None:
            tags[Tag.GOLDEN] = self.golden.sha256.hex
            folders = {GOLDEN: self.golden.path}
        return Draft(
            self.onnx_path, self.evidence.subject, self.run_id, tags, self.description, folders
        )


@dataclass(frozen=True)
class PromotionResult:
    """The result of a promotion.

    version: the version that serves now; for a refusal, the version that the reason is about.
    """

    outcome: Outcome
    version: str | None
    previous_version: str | None
    reason: str
    signers: tuple[str, ...] = ()
    """IDs of the keys that signed the verdict; empty if no signature was verified."""


def digests_of(twin: EvaluatedFile) -> TwinDigests:
    """Return the digests of a loaded twin."""
    return TwinDigests(
        sha256=twin.decision.subject_sha256,
        evidence_sha256=twin.decision.evidence_sha256,
        golden_sha256=twin.golden_sha256,
    )


def verify_origin(
    twin: EvaluatedFile, *, exact: EvaluatedFile, limits: SandboxLimits | None
) -> None:
    """Verify that a twin was quantized from the exact file, as recorded in its metadata.

    The twin of a release of several files must have the same chain and parts. Each part must be the
    exact part of that name or quantized from it. Both files were verified before. limits: see
    `VerificationRules`. Raises EvidenceError, and the exceptions of `origin_within`.
    """
    has_parts = is_release_file(exact.onnx_path)
    if has_parts != is_release_file(twin.onnx_path):
        kinds = [
            "a release of several files" if each else "one file"
            for each in (has_parts, not has_parts)
        ]
        raise EvidenceError(
            f"{exact.onnx_path} is {kinds[0]}, its twin {twin.onnx_path} is {kinds[1]}. Quantize "
            "the release (gate quantize) and measure that twin."
        )
    if has_parts:
        _verify_parts(twin, exact, limits)
        return
    if twin.onnx_path.suffix != ".onnx":
        raise EvidenceError(
            f"the name of the twin {twin.onnx_path} must end in .onnx. Rename the file and measure "
            "it again."
        )
    origin = origin_within(twin.onnx_path, limits)
    sha256 = str(exact.evidence.subject.sha256)
    if origin != sha256:
        raise EvidenceError(
            f"the twin {twin.onnx_path} was quantized from {origin or 'an unknown file'}, but the "
            f"exact file is {sha256}. Quantize this file (gate quantize) and measure its twin."
        )


def _verify_parts(twin: EvaluatedFile, exact: EvaluatedFile, limits: SandboxLimits | None) -> None:
    exact_file, twin_file = (ReleaseFile.load(each.onnx_path) for each in (exact, twin))
    remedy = "Quantize this release (gate quantize) and measure its twin."
    if twin_file.chain != exact_file.chain:
        raise EvidenceError(
            f"the chain of the twin {twin.onnx_path} is {twin_file.chain}, that of the exact "
            f"release is {exact_file.chain}. {remedy}"
        )
    for name in sorted({*exact_file.references} | {*twin_file.references}):
        reference, twin_reference = exact_file.references.get(name), twin_file.references.get(name)
        if reference != twin_reference:
            raise EvidenceError(
                f"the part {name} has the reference {twin_reference or 'none'} in the twin "
                f"{twin.onnx_path}, but {reference or 'none'} in the exact release. {remedy}"
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
            f"no part of the twin {twin.onnx_path} is quantized: all equal the exact parts. "
            f"{remedy}"
        )


def _reference(source: Source) -> str:
    """Return a description of the reference. ONNX files are named by digest, because they may have
    moved."""
    reference = (
        f"the model {source.factory} with checkpoint {source.checkpoint_sha256}"
        if source.onnx_sha256 is None
        else f"the ONNX file {source.onnx_sha256}"
    )
    return f"{reference} and preprocessing {source.preprocess_sha256}"
