"""Verify evidence and decision statements against files and trust."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import ValidationError

from gate.decision.decide import Decision, decide
from gate.errors import DigestMismatch, EvidenceError, Untrusted, first_line
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.records.layout import DECISION_STATEMENT, EVIDENCE_STATEMENT
from gate.signing.keys import PublicKey, SigningKey
from gate.signing.predicates import (
    MEASUREMENT_TYPE,
    SUMMARY_TYPE,
    CodeVersion,
    MeasurementPredicate,
    VerificationSummary,
)
from gate.signing.statement import ENVELOPE_LIMIT, SignedStatement
from gate.signing.subjects import (
    GOLDEN,
    PREPROCESSING,
    model_files,
    registered,
    verify_golden_files,
    verify_model,
)
from gate.signing.trust import Trust, time_of
from gate.storage.digest import Digest, canonical_json
from gate.storage.files import write_bytes
from gate.storage.untrusted_files import read_untrusted
from gate.storage.workspace import split_identity

T = TypeVar("T", MeasurementPredicate, VerificationSummary)


@dataclass(frozen=True)
class Signatory:
    """A signing key, with the version of the code that measured."""

    key: SigningKey
    code: CodeVersion

    def measured(self, evidence: Evidence, subjects: Mapping[str, Digest]) -> SignedStatement:
        """Sign what was measured of these files. Raises KeyUnusable."""
        statement = MeasurementPredicate.of(evidence, code=self.code).about(dict(subjects))
        return SignedStatement.sign(statement, self.key)

    def decided(
        self, decision: Decision, subjects: Mapping[str, Digest], *, precision: str, resource: str
    ) -> SignedStatement:
        """Sign what was decided on these files, for a resource. Raises KeyUnusable."""
        version = self.code.parity_gate
        summary = VerificationSummary.of(
            decision, precision=precision, resource=resource, version=version
        )
        return SignedStatement.sign(summary.about(dict(subjects)), self.key)


@dataclass(frozen=True)
class StatementPair:
    """Both, as they travel."""

    evidence: SignedStatement
    decision: SignedStatement

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Those in a folder. Raises Untrusted where one is missing or none, StorageError."""
        return cls(_read(folder / EVIDENCE_STATEMENT), _read(folder / DECISION_STATEMENT))

    @property
    def made_at(self) -> datetime:
        """Return when the verdict was made, as it states itself, for verification at any age.

        Raises Untrusted.
        """
        text = summary_in(self.decision).time_verified
        made = time_of(text)
        if made is None:
            raise Untrusted(f"the verdict was made at '{text}', which is no time (ISO 8601).")
        return made

    def write(self, folder: Path) -> None:
        """Write both, atomically. Raises StorageError."""
        write_bytes(folder / EVIDENCE_STATEMENT, self.evidence.data)
        write_bytes(folder / DECISION_STATEMENT, self.decision.data)

    def check_age(self, trust: Trust, *, at: datetime) -> None:
        """Prove that both, which are verified, still count at a moment: neither is too old, and
        enough of the keys are valid. Raises Untrusted."""
        made = _predicate(MeasurementPredicate, self.evidence, MEASUREMENT_TYPE, what=_EVIDENCE)
        for signed, time, what in (
            (self.evidence, made.measured_at, _EVIDENCE),
            (self.decision, summary_in(self.decision).time_verified, _WHAT),
        ):
            trust.signers(signed, role="measurers", made_at=time, now=at, what=what)

    def verify(
        self, evidence: Evidence, decision: Decision, *, trust: Trust, now: datetime
    ) -> tuple[PublicKey, ...]:
        """Verify both statements against this evidence and decision; return the decision's signers.

        Raises Untrusted where a statement is about other evidence or another decision, or is not
        signed by trusted keys.
        """
        verify_measurement(self.evidence, evidence, trust=trust, now=now)
        return verify_summary(self.decision, decision, trust=trust, now=now)


def verify_measurement(
    signed: SignedStatement, evidence: Evidence, *, trust: Trust, now: datetime
) -> tuple[PublicKey, ...]:
    """Verify that trusted keys signed exactly this evidence, and return them. Raises Untrusted."""
    what = _EVIDENCE
    found = _predicate(MeasurementPredicate, signed, MEASUREMENT_TYPE, what=what)
    expected = MeasurementPredicate.of(evidence, code=found.code).with_fields_of(found)
    if found.to_plain() != expected.to_plain():  # NaN is not equal to itself
        raise Untrusted(
            f"{what} is about evidence {found.evidence.sha256}, on {found.model}; this is "
            f"{evidence.digest()}, on {evidence.subject.sha256}. The evidence was edited, or is "
            "another's: measure and sign anew."
        )
    made = found.measured_at
    return trust.signers(signed, role="measurers", made_at=made, now=now, what=what)


def verify_summary(
    signed: SignedStatement, decision: Decision, *, trust: Trust, now: datetime
) -> tuple[PublicKey, ...]:
    """Verify that trusted keys signed exactly this decision, and return them. Raises Untrusted."""
    what = "the statement on the decision"
    found = summary_in(signed)
    (level,) = found.verified_levels if len(found.verified_levels) == 1 else ("",)
    expected = VerificationSummary.of(
        decision,
        precision=level.removeprefix("PARITY_"),
        resource=found.resource_uri,
        version=found.verifier.version.get("parity-gate", ""),
    )
    if found.to_plain() != expected.to_plain():  # NaN is not equal to itself
        raise Untrusted(
            f"{what} is about decision {found.decision.sha256} ({found.verification_result}) on "
            f"{found.model}; this is {decision.digest()} ({decision.verdict}) on "
            f"{decision.subject_sha256}. The decision was edited, or is another's: decide anew."
        )
    made = found.time_verified
    return trust.signers(signed, role="measurers", made_at=made, now=now, what=what)


def summary_in(signed: SignedStatement) -> VerificationSummary:
    """Return the verdict summary in a statement, without verifying it. Raises Untrusted."""
    return _predicate(
        VerificationSummary, signed, SUMMARY_TYPE, what="the statement on the decision"
    )


def verify_resource(
    summary: VerificationSummary, *, registries: frozenset[str], model: str
) -> None:
    """Prove that a verdict is for this model, in the registry of these addresses. Raises
    Untrusted."""
    place = registered(summary.resource_uri)
    if place is None or place[0] not in registries or place[1] != model:
        remedy = ""
        if place is not None and place[1] == model:
            address, workspace = split_identity(place[0])
            if workspace in {split_identity(each)[1] for each in registries}:
                remedy = (
                    f" If {address} is another address of this registry, whoever runs the service "
                    f"says so: gate serve --same-registry {shlex.quote(address)}"
                )
        raise Untrusted(
            f"the statement on the decision is for {summary.resource_uri}, expected {model} in "
            f"{' or '.join(sorted(registries))}. Sign it for this one: gate check --name, or gate "
            f"promote with the measurer's key.{remedy}"
        )


def verify_files(signed: SignedStatement, files: Mapping[str, Digest]) -> None:
    """Prove that a statement names exactly these files among its subjects, each by its name.
    Raises Untrusted."""
    for name, digest in files.items():
        named = signed.statement.digest_of(name)
        if named != digest.hex:
            raise Untrusted(
                f"the statement names {name} with digest {named or 'none'}, this is {digest.hex}. "
                "The file was exchanged: fetch it again, or promote it anew."
            )


def _predicate(kind: type[T], signed: SignedStatement, type_uri: str, *, what: str) -> T:
    if signed.statement.predicate_type != type_uri:
        raise Untrusted(
            f"{what} is of type {signed.statement.predicate_type}, expected {type_uri}. "
            "It is another statement: sign anew."
        )
    try:
        return kind.model_validate_json(canonical_json(signed.statement.predicate))
    except ValidationError as error:
        raise Untrusted(f"{what} has no whole predicate: {first_line(error)}") from error


def _read(path: Path) -> SignedStatement:
    try:
        data = read_untrusted(path, limit=ENVELOPE_LIMIT)
    except (EvidenceError, DigestMismatch) as error:
        raise Untrusted(
            f"there is no statement {path.name} with the verdict: {error} Judge the file with a "
            "signing key: gate check --report --key."
        ) from error
    return SignedStatement.of(data, what=path.name)


# Needs files only: no torch, no MLflow, no ONNX Runtime, no network. Everything that is wrong is
# found, not only the first.


Check = Literal[
    "signature", "result", "model", "resource", "evidence", "measurement", "policy", "decision",
    "golden", "preprocessing",
]  # fmt: skip

_EVIDENCE, _WHAT = "the statement on the evidence", "the statement on the decision"


@dataclass(frozen=True)
class ComparedArtifacts:
    """The artifacts that a statement is compared with. None: that artifact is not checked."""

    model: Path
    registered: tuple[frozenset[str], str] | None = None
    """Addresses of the registry, and the name of the model there."""
    evidence: Evidence | None = None
    measurement: SignedStatement | None = None
    """The statement on the evidence."""
    policy: Policy | None = None
    golden: Path | None = None
    preprocessing: Digest | None = None
    """Digest of the spec's canonical JSON."""


@dataclass(frozen=True)
class VerdictVerification:
    """The result of verifying a verdict. Only `trusted` means that every check passed."""

    trusted: bool
    """A trusted measurer signed it, all artifacts checked match the statement, and it PASSED."""
    summary: VerificationSummary | None
    """The content of the statement, not trusted unless `trusted` is True. None: it is no
    verdict."""
    signers: tuple[PublicKey, ...] = ()
    """Trusted keys that signed it."""
    checked: tuple[Check, ...] = ()
    """The checks that passed."""
    unchecked: tuple[str, ...] = ()
    """Subjects that were not checked, because no file was given for them."""
    problems: tuple[str, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "trusted": self.trusted,
            "statement": self.summary and self.summary.to_plain(),
            "signers": [{"name": key.name, "key_id": key.key_id} for key in self.signers],
            "checked": list(self.checked),
            "unchecked": list(self.unchecked),
            "problems": list(self.problems),
        }


def verify_verdict(
    signed: SignedStatement, beside: ComparedArtifacts, *, trust: Trust, now: datetime
) -> VerdictVerification:
    """Verify a verdict's statement and the artifacts that belong to it.

    Raises StorageError where a file can't be read: then there is no result.
    """
    try:
        summary = summary_in(signed)
    except Untrusted as error:
        return VerdictVerification(trusted=False, summary=None, problems=(str(error),))
    look = VerdictChecks(signed, summary, beside)
    checked: list[Check] = []
    problems: list[str] = []
    signers: tuple[PublicKey, ...] = ()
    for check in look.wanted():
        try:
            if check == "signature":
                signers = trust.signers(
                    signed, role="measurers", made_at=summary.time_verified, now=now, what=_WHAT
                )
            elif check == "measurement":
                look.measurement(trust, now)
            else:
                getattr(look, check)()
        except (Untrusted, DigestMismatch, EvidenceError) as error:
            problems.append(str(error))
        else:
            checked.append(check)
    return VerdictVerification(
        trusted=not problems and bool(signers),
        summary=summary,
        signers=signers,
        checked=tuple(checked),
        unchecked=look.left(),
        problems=tuple(problems),
    )


class VerdictChecks:
    """One method a check, by its name; each raises what is wrong."""

    def __init__(
        self, signed: SignedStatement, summary: VerificationSummary, beside: ComparedArtifacts
    ) -> None:
        self._signed, self._summary, self._beside = signed, summary, beside
        self._files: tuple[str, ...] = ()

    def wanted(self) -> Iterator[Check]:
        """Yield the checks for which there is an artifact."""
        beside = self._beside
        yield from ("signature", "result", "model")
        if beside.registered is not None:
            yield "resource"
        if beside.evidence is not None:
            yield "evidence"
            if beside.measurement is not None:
                yield "measurement"
        if beside.policy is not None:
            yield "policy"
            if beside.evidence is not None and self._policy() is not None:
                yield "decision"
        if beside.golden is not None:
            yield "golden"
        if beside.preprocessing is not None:
            yield "preprocessing"

    def left(self) -> tuple[str, ...]:
        """Return the subjects for which no file was given."""
        brought = {*(self._files or model_files(self._signed))}
        brought |= {GOLDEN} if self._beside.golden is not None else set()
        brought |= {PREPROCESSING} if self._beside.preprocessing is not None else set()
        names = (each.name or "a subject without a name" for each in self._signed.statement.subject)
        return tuple(name for name in names if name not in brought)

    def result(self) -> None:
        """Verify that the verdict is PASSED."""
        if self._summary.verification_result != "PASSED":
            raise Untrusted(
                f"the verdict is {self._summary.verification_result}: the file was rejected, or "
                "could not be judged. Its report says why; take another version."
            )

    def model(self) -> None:
        """Verify the digests of the model's files."""
        self._files = verify_model(self._signed, self._beside.model, model=self._summary.model)

    def resource(self) -> None:
        """Verify the registered model that the verdict names."""
        assert self._beside.registered is not None
        registries, name = self._beside.registered
        verify_resource(self._summary, registries=registries, model=name)

    def evidence(self) -> None:
        """Verify the digest of the evidence."""
        evidence, summary = self._beside.evidence, self._summary
        assert evidence is not None
        named = [each.sha256 for each in summary.input_attestations]
        if named != [evidence.digest().hex] or evidence.subject.sha256 != summary.model:
            raise Untrusted(
                f"the verdict was made on evidence {', '.join(map(str, named))} of "
                f"{summary.model}, this is {evidence.digest().hex} of {evidence.subject.sha256}. "
                "The evidence was edited, or is another's."
            )

    def measurement(self, trust: Trust, now: datetime) -> None:
        """Verify the signed statement of the measurement."""
        assert self._beside.measurement is not None
        assert self._beside.evidence is not None
        verify_measurement(self._beside.measurement, self._beside.evidence, trust=trust, now=now)

    def policy(self) -> None:
        """Verify the digest of the policy."""
        policy = self._policy()
        if policy is None:
            assert self._beside.policy is not None
            raise Untrusted(
                f"the verdict was made by policy {self._summary.policy.sha256}, this is "
                f"{self._beside.policy.digest().hex}. Give the policy that was applied: "
                "policy.json of the report."
            )

    def decision(self) -> None:
        """Decide again and compare."""
        policy, evidence, summary = self._policy(), self._beside.evidence, self._summary
        assert policy is not None
        assert evidence is not None
        again = decide(
            policy, evidence, incumbent=summary.incumbent, decided_at=summary.time_verified
        )
        version = summary.verifier.version.get("parity-gate", "")
        made = VerificationSummary.of(
            again, precision=policy.precision, resource=summary.resource_uri, version=version
        )
        if made.to_plain() != summary.to_plain():  # NaN is not equal to itself
            raise Untrusted(
                f"decided again from this evidence and policy, the verdict is {again.verdict} "
                f"({again.digest().hex}), the statement says {summary.verification_result} "
                f"({summary.decision.sha256}). It was edited, or parity-gate {version or '?'} has "
                "other rules than this version: decide anew, or look with that one."
            )

    def golden(self) -> None:
        """Verify the golden vectors."""
        assert self._beside.golden is not None
        verify_golden_files(self._signed, self._beside.golden, model=self._summary.model)

    def preprocessing(self) -> None:
        """Verify the preprocessing spec."""
        assert self._beside.preprocessing is not None
        verify_files(self._signed, {PREPROCESSING: self._beside.preprocessing})

    def _policy(self) -> Policy | None:
        """The policy of the statement: the one that was brought, or that of the twin in it."""
        policy = self._beside.policy
        named = self._summary.policy.sha256
        each = (policy, policy.twin if policy else None)
        return next((one for one in each if one and one.digest().hex == named), None)
