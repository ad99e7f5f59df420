"""What a promotion asks of statements, and signing a verdict for a model on what was measured.

Statements are looked at before anything else of a release: they say which digests it must have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from gate.attestation.envelope import SignedStatement
from gate.attestation.keys import PublicKey
from gate.attestation.statements import Signatory, Statements, verify_files, verify_measurement
from gate.attestation.subjects import GOLDEN, subjects_of
from gate.attestation.trust import Trust
from gate.errors import DigestMismatch, EvidenceError, Untrusted
from gate.golden.folder import read_record
from gate.golden.record import Golden
from gate.policy.policy import Policy
from gate.registry.judged import Judged
from gate.registry.release import Release
from gate.registry.twin import QUANTIZED
from gate.registry.vouching import named_beside, verify_statements
from gate.storage.digest import Digest


def verify_signatures(
    release: Release, *, trust: Trust, registries: frozenset[str], now: datetime | None = None
) -> tuple[PublicKey, ...]:
    """Prove, as `verify_statements` does, that trusted keys vouch for all of a release, and that
    its verdict names what goes with it, by name, and nothing else. Gives who signed the verdict.
    `now`: None for when it was made, whatever its age.

    Raises Untrusted where they don't; DigestMismatch, EvidenceError and StorageError where the
    files are not those of the evidence.
    """
    statements = release.statements
    signers = verify_statements(
        release,
        files=named_beside(release),
        trust=trust,
        registries=registries,
        now=now or (datetime.now(UTC) if statements is None else statements.made_at),
    )
    _verify_names(release, subjects_of_release(release))
    if release.twin is not None:
        with _about_the_twin():
            _verify_names(release.twin, _subjects(release.twin))
    return signers


def subjects_of_release(release: Release) -> dict[str, Digest]:
    """What a verdict on a release names: its files, and those of its twin, with the golden vectors
    of both. Raises as `subjects_of`."""
    subjects = _subjects(release)
    if release.twin is not None:
        twin = release.twin
        golden = twin.golden_sha256
        named = subjects_of(twin.onnx_path, twin.evidence, golden=golden, preprocessing=False)
        subjects |= {f"{QUANTIZED}/{name}": digest for name, digest in named.items()}
    return subjects


@dataclass(frozen=True)
class MeasuredFile:
    """What was signed when a file was measured, and the folder of the golden vectors that were
    written then."""

    statement: SignedStatement
    vectors: Path


@dataclass(frozen=True)
class VerdictSigning:
    """Signing verdicts for one resource, on what this trust vouches for."""

    signatory: Signatory
    trust: Trust
    resource: str

    @property
    def is_trusted(self) -> bool:
        """Whether the key may say what was decided, now."""
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
        """The release with statements, and its twin with its own. `measured`, `twin`: what was
        signed when the file and its twin were measured.

        Raises Untrusted, and signs nothing, where that does not vouch for what is decided on;
        KeyUnusable; otherwise as `subjects_of`.
        """
        self._prove(release, measured)
        if release.twin is not None and policy.twin is not None:
            with _about_the_twin():
                signed = self._signed_twin(release.twin, policy.twin, measured=twin)
            release = replace(release, twin=signed)
        subjects = subjects_of_release(release)
        statements = self._signed(release, subjects, measured, precision=policy.precision)
        return replace(release, statements=statements)

    def _signed_twin(
        self, twin: Judged, policy: Policy, *, measured: MeasuredFile | None
    ) -> Judged:
        if measured is None:
            raise Untrusted("nobody signed its evidence. Measure it: gate check --report.")
        self._prove(twin, measured)
        subjects = _subjects(twin)
        statements = self._signed(twin, subjects, measured, precision=policy.precision)
        return replace(twin, statements=statements)

    def _prove(self, judged: Judged, measured: MeasuredFile) -> None:
        """That what is decided on is what was measured."""
        now = datetime.now(UTC)
        verify_measurement(measured.statement, judged.evidence, trust=self.trust, now=now)
        if judged.golden is not None:
            _verify_vectors(judged.golden.golden, measured)
        elif judged.decision.passed and measured.statement.statement.digest_of(GOLDEN) is not None:
            raise Untrusted(
                f"golden vectors were signed when {judged.onnx_path} was measured, and are not "
                f"handed in with it. They belong into {measured.vectors}: bring them back."
            )

    def _signed(
        self,
        judged: Judged,
        subjects: Mapping[str, Digest],
        measured: MeasuredFile,
        *,
        precision: str,
    ) -> Statements:
        decided = self.signatory.decided(
            judged.decision, subjects, precision=precision, resource=self.resource
        )
        return Statements(measured.statement, decided)


@contextlib.contextmanager
def _about_the_twin() -> Iterator[None]:
    try:
        yield
    except Untrusted as error:
        raise Untrusted(f"the quantized twin: {error}") from error


def _verify_names(judged: Judged, subjects: Mapping[str, Digest]) -> None:
    assert judged.statements is not None  # by verify_statements
    signed = judged.statements.decision
    verify_files(signed, subjects)
    beyond = sorted({each.name or "" for each in signed.statement.subject} - {*subjects})
    if beyond:
        raise Untrusted(
            f"the statement on the decision names {', '.join(beyond)}, which was not handed in. "
            "Hand in all that was judged, or sign the verdict anew."
        )


def _subjects(judged: Judged) -> dict[str, Digest]:
    return subjects_of(
        judged.onnx_path,
        judged.evidence,
        golden=judged.golden_sha256,
        preprocessing=judged.preprocessing is not None,
    )


def _verify_vectors(golden: Golden, measured: MeasuredFile) -> None:
    """Golden vectors that go with the file have the arrays and pictures of those that were
    measured; the tolerances are the policy's."""
    named = measured.statement.statement.digest_of(GOLDEN)
    if named is None:
        raise Untrusted(
            "golden vectors go with the file, and none were signed when it was measured. Leave "
            "them out, or measure anew."
        )
    try:
        then, _ = read_record(measured.vectors, sha256=Digest(named))
    except (DigestMismatch, EvidenceError) as error:
        raise Untrusted(
            f"the golden vectors in {measured.vectors} are not those that were signed when the "
            f"file was measured: {error}"
        ) from error
    if _contents(golden) != _contents(then):
        raise Untrusted(
            "the golden vectors that go with the file have other arrays than those that were "
            f"signed when it was measured, in {measured.vectors}. They were exchanged: measure it "
            "anew."
        )


def _contents(golden: Golden) -> tuple[object, ...]:
    """All of the vectors but what a policy says of them."""
    arrays = tuple((each.name, each.dtype, each.shape, each.sha256) for each in golden.arrays)
    parts = tuple((name, part.model, part.samples) for name, part in golden.parts.items())
    pictures = golden.pictures
    shown = pictures and (pictures.input, pictures.spec, tuple(f.sha256 for f in pictures.files))
    return (golden.model, golden.samples, parts, arrays, shown, golden.origin.code_sha256)
