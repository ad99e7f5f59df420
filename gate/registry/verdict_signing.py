"""Sign the verdict on a release, on the basis of signed measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from gate.errors import DigestMismatch, EvidenceError, Untrusted
from gate.golden.folder import read_record
from gate.golden.manifest import GoldenManifest
from gate.policy.policy import Policy
from gate.registry.release import EvaluatedFile, Release
from gate.registry.verify_release import subjects_of, subjects_of_release, twin_errors
from gate.signing.statement import SignedStatement
from gate.signing.subjects import GOLDEN
from gate.signing.trust import Trust
from gate.signing.verification import Signatory, StatementPair, verify_measurement
from gate.storage.digest import Digest


@dataclass(frozen=True)
class MeasuredFile:
    """The signed measurement of a file, and the folder of its golden vectors."""

    statement: SignedStatement
    vectors: Path


@dataclass(frozen=True)
class VerdictSigning:
    """Signing of verdicts for one resource, on measurements that this trust accepts."""

    signatory: Signatory
    trust: Trust
    resource: str

    @property
    def is_trusted(self) -> bool:
        """Return whether the key is currently trusted to sign decisions."""
        keys = self.trust.keys("measurers", at=datetime.now(UTC))
        return self.signatory.key.public.key_id in {key.key_id for key in keys}

    def sign(
        self,
        release: Release,
        policy: Policy,
        *,
        measured: MeasuredFile,
        twin: MeasuredFile | None = None,
    ) -> Release:
        """Sign the verdicts on a release and its twin; return the release with the statements.

        measured, twin: the signed measurements of the file and of its twin. Raises Untrusted before
        signing if they are not about the release's evidence; KeyUnusable; the exceptions of
        `statement_subjects`.
        """
        self._verify_measured(release, measured)
        if release.twin is not None and policy.twin is not None:
            with twin_errors():
                if twin is None:
                    raise Untrusted("its evidence is not signed. Measure it: gate check --report.")
                self._verify_measured(release.twin, twin)
                subjects = subjects_of(release.twin)
                statements = self._signed(release.twin, subjects, twin, policy.twin)
            release = replace(release, twin=replace(release.twin, statements=statements))
        statements = self._signed(release, subjects_of_release(release), measured, policy)
        return replace(release, statements=statements)

    def _verify_measured(self, evaluated: EvaluatedFile, measured: MeasuredFile) -> None:
        """Verify that a signed measurement is about the file's evidence and golden vectors."""
        now = datetime.now(UTC)
        verify_measurement(measured.statement, evaluated.evidence, trust=self.trust, now=now)
        signed = measured.statement.statement.digest_of(GOLDEN)
        if evaluated.golden is not None:
            _verify_vectors(evaluated.golden.golden, measured)
        elif evaluated.decision.passed and signed is not None:
            raise Untrusted(
                f"golden vectors were signed when {evaluated.onnx_path} was measured, but they are "
                f"missing. Restore them in {measured.vectors}."
            )

    def _signed(
        self,
        evaluated: EvaluatedFile,
        subjects: Mapping[str, Digest],
        measured: MeasuredFile,
        policy: Policy,
    ) -> StatementPair:
        decided = self.signatory.sign_decision(
            evaluated.decision, subjects, precision=policy.precision, resource=self.resource
        )
        return StatementPair(measured.statement, decided)


def _verify_vectors(golden: GoldenManifest, measured: MeasuredFile) -> None:
    """Verify that golden vectors have the arrays and pictures of the signed ones.

    The tolerances may differ, because they come from the policy."""
    sha256 = measured.statement.statement.digest_of(GOLDEN)
    if sha256 is None:
        raise Untrusted(
            "the file has golden vectors, but none were signed when it was measured. Leave them "
            "out, or measure the file again."
        )
    try:
        signed, _ = read_record(measured.vectors, sha256=Digest(sha256))
    except (DigestMismatch, EvidenceError) as error:
        raise Untrusted(
            f"the golden vectors in {measured.vectors} are not those that were signed when the "
            f"file was measured: {error}"
        ) from error
    if _contents(golden) != _contents(signed):
        raise Untrusted(
            "the arrays of the file's golden vectors differ from those that were signed when it "
            f"was measured, in {measured.vectors}. The vectors were replaced. Measure the file "
            "again."
        )


def _contents(golden: GoldenManifest) -> tuple[object, ...]:
    """Return the parts of a manifest that do not depend on the policy."""
    arrays = tuple((each.name, each.dtype, each.shape, each.sha256) for each in golden.arrays)
    parts = tuple((name, part.model, part.samples) for name, part in golden.parts.items())
    pictures = golden.pictures
    shown = pictures and (pictures.input, pictures.spec, tuple(f.sha256 for f in pictures.files))
    return (golden.model, golden.samples, parts, arrays, shown, golden.origin.code_sha256)
