"""The two statements that go with a judged file: on its evidence, and on its decision."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Self, TypeVar

from pydantic import ValidationError

from gate.attestation.envelope import ENVELOPE_LIMIT, SignedStatement
from gate.attestation.keys import PublicKey, SigningKey
from gate.attestation.measurement import MEASUREMENT_TYPE, CodeVersion, MeasurementPredicate
from gate.attestation.resource import registered
from gate.attestation.summary import SUMMARY_TYPE, Summary
from gate.attestation.trust import Trust, time_of
from gate.decision.decision import Decision
from gate.errors import DigestMismatch, EvidenceError, Untrusted, first_line
from gate.records.evidence import Evidence
from gate.records.names import DECISION_STATEMENT, EVIDENCE_STATEMENT
from gate.storage.atomic import write_bytes
from gate.storage.digest import Digest, canonical_json
from gate.storage.foreign import read_foreign

T = TypeVar("T", MeasurementPredicate, Summary)


@dataclass(frozen=True)
class Signatory:
    """Who signs, and what is said of the code that measured."""

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
        summary = Summary.of(decision, precision=precision, resource=resource, version=version)
        return SignedStatement.sign(summary.about(dict(subjects)), self.key)


@dataclass(frozen=True)
class Statements:
    """Both, as they travel."""

    evidence: SignedStatement
    decision: SignedStatement

    @classmethod
    def beside(cls, folder: Path) -> Self:
        """Those in a folder. Raises Untrusted where one is missing or none, StorageError."""
        return cls(_read(folder / EVIDENCE_STATEMENT), _read(folder / DECISION_STATEMENT))

    @property
    def made_at(self) -> datetime:
        """When the verdict was made, as it says itself: for who asks whose it is, at whatever age.
        Raises Untrusted."""
        text = summary_in(self.decision).time_verified
        made = time_of(text)
        if made is None:
            raise Untrusted(f"the verdict was made at '{text}', which is no time (ISO 8601).")
        return made

    def write(self, folder: Path) -> None:
        """Write both, atomically. Raises StorageError."""
        write_bytes(folder / EVIDENCE_STATEMENT, self.evidence.data)
        write_bytes(folder / DECISION_STATEMENT, self.decision.data)

    def verify(
        self, evidence: Evidence, decision: Decision, *, trust: Trust, now: datetime
    ) -> tuple[PublicKey, ...]:
        """Whose word both are: on exactly this evidence and this decision. Gives who signed the
        decision.

        Raises Untrusted where a statement is about another one, or trusted keys do not vouch.
        """
        verify_measurement(self.evidence, evidence, trust=trust, now=now)
        return verify_summary(self.decision, decision, trust=trust, now=now)


def verify_measurement(
    signed: SignedStatement, evidence: Evidence, *, trust: Trust, now: datetime
) -> tuple[PublicKey, ...]:
    """Who vouches that exactly this was measured. Raises Untrusted."""
    what = "the statement on the evidence"
    found = _predicate(MeasurementPredicate, signed, MEASUREMENT_TYPE, what=what)
    expected = MeasurementPredicate.of(evidence, code=found.code).in_words_of(found)
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
    """Who vouches that exactly this was decided. Raises Untrusted."""
    what = "the statement on the decision"
    found = summary_in(signed)
    (level,) = found.verified_levels if len(found.verified_levels) == 1 else ("",)
    expected = Summary.of(
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


def summary_in(signed: SignedStatement) -> Summary:
    """What a statement says of a verdict; believed by nobody yet. Raises Untrusted."""
    return _predicate(Summary, signed, SUMMARY_TYPE, what="the statement on the decision")


def verify_resource(summary: Summary, *, registries: frozenset[str], model: str) -> None:
    """Prove that a verdict is for this model, in the registry of these addresses. Raises
    Untrusted."""
    place = registered(summary.resource_uri)
    if place is None or place[0] not in registries or place[1] != model:
        remedy = ""
        if place is not None and place[1] == model:
            remedy = (
                f" If {place[0]} is another address of this registry, whoever runs the service "
                f"says so: gate serve --same-registry {shlex.quote(place[0])}"
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
        data = read_foreign(path, limit=ENVELOPE_LIMIT)
    except (EvidenceError, DigestMismatch) as error:
        raise Untrusted(
            f"there is no statement {path.name} with the verdict: {error} Judge the file with a "
            "signing key: gate check --report --key."
        ) from error
    return SignedStatement.of(data, what=path.name)
