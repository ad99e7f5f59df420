"""Verify evidence and decision statements against files and trust."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from gate.decision.decide import Decision, decide
from gate.errors import DigestMismatch, EvidenceError, Untrusted
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.records.layout import DECISION_STATEMENT, EVIDENCE_STATEMENT
from gate.signing.keys import PublicKey, SigningKey
from gate.signing.predicates import (
    CodeVersion,
    MeasurementPredicate,
    VerificationSummary,
)
from gate.signing.statement import ENVELOPE_LIMIT, SignedStatement
from gate.signing.subjects import (
    GOLDEN,
    PREPROCESSING,
    model_files,
    parse_resource_uri,
    verify_golden_files,
    verify_model,
)
from gate.signing.trust import Trust, parse_time
from gate.storage.digest import Digest
from gate.storage.files import write_bytes
from gate.storage.untrusted_files import read_untrusted
from gate.storage.workspace import split_identity

_EVIDENCE, _DECISION = "the statement on the evidence", "the statement on the decision"


@dataclass(frozen=True)
class Signatory:
    """A signing key, with the version of the code that measured."""

    key: SigningKey
    code: CodeVersion

    def sign_measurement(
        self, evidence: Evidence, subjects: Mapping[str, Digest]
    ) -> SignedStatement:
        """Sign the measurement of these files. Raises KeyUnusable."""
        statement = MeasurementPredicate.from_evidence(evidence, code=self.code).about(subjects)
        return SignedStatement.sign(statement, self.key)

    def sign_decision(
        self, decision: Decision, subjects: Mapping[str, Digest], *, precision: str, resource: str
    ) -> SignedStatement:
        """Sign the decision on these files, for a resource. Raises KeyUnusable."""
        version = self.code.parity_gate
        summary = VerificationSummary.from_decision(
            decision, precision=precision, resource=resource, version=version
        )
        return SignedStatement.sign(summary.about(subjects), self.key)


@dataclass(frozen=True)
class StatementPair:
    """The statement on the evidence and the statement on the decision."""

    evidence: SignedStatement
    decision: SignedStatement

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read both. Raises Untrusted if one is missing or not valid, StorageError."""
        return cls(_read(folder / EVIDENCE_STATEMENT), _read(folder / DECISION_STATEMENT))

    @property
    def decided_at(self) -> datetime:
        """Return the verdict's own time, to verify it at any age. Raises Untrusted."""
        text = summary_in(self.decision).time_verified
        decided_at = parse_time(text)
        if decided_at is None:
            raise Untrusted(f"the verdict was made at '{text}', which is not an ISO 8601 time.")
        return decided_at

    def write(self, folder: Path) -> None:
        """Write both, atomically. Raises StorageError."""
        write_bytes(folder / EVIDENCE_STATEMENT, self.evidence.data)
        write_bytes(folder / DECISION_STATEMENT, self.decision.data)

    def check_age(self, trust: Trust, *, at: datetime) -> None:
        """Verify that both are still trusted at a time: neither is too old, and enough of the keys
        are valid. Expects verified statements. Raises Untrusted."""
        measurement = MeasurementPredicate.from_statement(self.evidence, label=_EVIDENCE)
        for signed, time, label in (
            (self.evidence, measurement.measured_at, _EVIDENCE),
            (self.decision, summary_in(self.decision).time_verified, _DECISION),
        ):
            trust.signers(signed, role="measurers", timestamp=time, now=at, label=label)

    def verify(
        self, evidence: Evidence, decision: Decision, *, trust: Trust, now: datetime
    ) -> tuple[PublicKey, ...]:
        """Verify both statements against this evidence and decision; return the decision's signers.

        Raises Untrusted if a statement is about other evidence or another decision, or is not
        signed by trusted keys.
        """
        verify_measurement(self.evidence, evidence, trust=trust, now=now)
        return verify_summary(self.decision, decision, trust=trust, now=now)


def verify_measurement(
    signed: SignedStatement, evidence: Evidence, *, trust: Trust, now: datetime
) -> tuple[PublicKey, ...]:
    """Verify that trusted keys signed exactly this evidence, and return them. Raises Untrusted."""
    label = _EVIDENCE
    stated = MeasurementPredicate.from_statement(signed, label=label)
    actual = MeasurementPredicate.from_evidence(evidence, code=stated.code)
    if stated.to_plain() != actual.to_plain():  # As JSON values: NaN does not equal itself.
        raise Untrusted(
            f"{label} is about evidence {stated.evidence.sha256}, on {stated.model}; this is "
            f"{evidence.digest()}, on {evidence.subject.sha256}. The evidence was edited, or "
            "belongs to another model: measure and sign again."
        )
    timestamp = stated.measured_at
    return trust.signers(signed, role="measurers", timestamp=timestamp, now=now, label=label)


def verify_summary(
    signed: SignedStatement, decision: Decision, *, trust: Trust, now: datetime
) -> tuple[PublicKey, ...]:
    """Verify that trusted keys signed exactly this decision, and return them. Raises Untrusted."""
    label = _DECISION
    stated = summary_in(signed)
    (level,) = stated.verified_levels if len(stated.verified_levels) == 1 else ("",)
    actual = VerificationSummary.from_decision(
        decision,
        precision=level.removeprefix("PARITY_"),
        resource=stated.resource_uri,
        version=stated.verifier.version.get("parity-gate", ""),
    )
    if stated.to_plain() != actual.to_plain():  # As JSON values: NaN does not equal itself.
        raise Untrusted(
            f"{label} is about decision {stated.decision.sha256} ({stated.verification_result}) on "
            f"{stated.model}; this is {decision.digest()} ({decision.verdict}) on "
            f"{decision.subject_sha256}. The decision was edited, or belongs to another model: "
            "decide again."
        )
    timestamp = stated.time_verified
    return trust.signers(signed, role="measurers", timestamp=timestamp, now=now, label=label)


def summary_in(signed: SignedStatement) -> VerificationSummary:
    """Return the verdict summary in a statement, without verifying it. Raises Untrusted."""
    return VerificationSummary.from_statement(signed, label=_DECISION)


def verify_resource(
    summary: VerificationSummary, *, registries: frozenset[str], model: str
) -> None:
    """Verify that a verdict is for this model in the registry with these addresses. Raises
    Untrusted."""
    resource = parse_resource_uri(summary.resource_uri)
    if resource is None or resource[0] not in registries or resource[1] != model:
        remedy = ""
        if resource is not None and resource[1] == model:
            address, workspace = split_identity(resource[0])
            if workspace in {split_identity(each)[1] for each in registries}:
                remedy = (
                    f" If {address} is another address of this registry, declare that when you "
                    f"start the service: gate serve --same-registry {shlex.quote(address)}"
                )
        raise Untrusted(
            f"the statement on the decision is for {summary.resource_uri}, expected {model} in "
            f"{' or '.join(sorted(registries))}. Sign it for this model: gate check --name, or "
            f"gate promote with the measurer's key.{remedy}"
        )


def verify_files(signed: SignedStatement, files: Mapping[str, Digest]) -> None:
    """Verify that a statement names these files with these digests. Raises Untrusted."""
    for name, digest in files.items():
        named = signed.statement.digest_of(name)
        if named != digest.hex:
            raise Untrusted(
                f"the statement names {name} with digest {named or 'none'}, this is {digest.hex}. "
                "The file was replaced: fetch it again, or promote it again."
            )


def _read(path: Path) -> SignedStatement:
    try:
        data = read_untrusted(path, limit=ENVELOPE_LIMIT)
    except (EvidenceError, DigestMismatch) as error:
        raise Untrusted(
            f"the verdict has no statement {path.name}: {error} Check the file with a signing "
            "key: gate check --report --key."
        ) from error
    return SignedStatement.from_bytes(data, label=path.name)


Check = Literal[
    "signature", "result", "model", "resource", "evidence", "measurement", "policy", "decision",
    "golden", "preprocessing",
]  # fmt: skip


@dataclass(frozen=True)
class ComparedArtifacts:
    """The artifacts that a statement is compared with. An artifact that is None is not checked."""

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
    """The content of the statement, not trusted unless `trusted` is True. None: not a verdict."""
    signers: tuple[PublicKey, ...] = ()
    """Trusted keys that signed it."""
    checked: tuple[Check, ...] = ()
    """The checks that passed."""
    unchecked: tuple[str, ...] = ()
    """Subjects without an artifact to compare them with."""
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
    signed: SignedStatement, artifacts: ComparedArtifacts, *, trust: Trust, now: datetime
) -> VerdictVerification:
    """Verify a verdict's statement and the artifacts that belong to it; list all problems.

    Needs neither torch, MLflow, ONNX Runtime nor a network. Raises StorageError if a file can't be
    read.
    """
    try:
        summary = summary_in(signed)
    except Untrusted as error:
        return VerdictVerification(trusted=False, summary=None, problems=(str(error),))
    results: dict[Check, Any] = {}
    problems: list[str] = []
    for check, verify in _checks(signed, summary, artifacts, trust=trust, now=now):
        try:
            results[check] = verify()
        except (Untrusted, DigestMismatch, EvidenceError) as error:
            problems.append(str(error))
    files = {*(results.get("model") or model_files(signed))}
    files |= {GOLDEN} if artifacts.golden is not None else set()
    files |= {PREPROCESSING} if artifacts.preprocessing is not None else set()
    names = (each.name or "a subject without a name" for each in signed.statement.subject)
    signers = results.get("signature", ())
    return VerdictVerification(
        trusted=not problems and bool(signers),
        summary=summary,
        signers=signers,
        checked=tuple(results),
        unchecked=tuple(name for name in names if name not in files),
        problems=tuple(problems),
    )


def _checks(
    signed: SignedStatement,
    summary: VerificationSummary,
    artifacts: ComparedArtifacts,
    *,
    trust: Trust,
    now: datetime,
) -> Iterator[tuple[Check, Callable[[], object]]]:
    """Yield the checks for which there is an artifact. Each raises an exception if it fails."""
    evidence, policy = artifacts.evidence, artifacts.policy
    verify_signature = partial(trust.signers, signed, role="measurers", label=_DECISION)
    yield "signature", partial(verify_signature, timestamp=summary.time_verified, now=now)
    yield "result", partial(_verify_result, summary)
    yield "model", partial(verify_model, signed, artifacts.model, model=summary.model)
    if artifacts.registered is not None:
        registries, name = artifacts.registered
        yield "resource", partial(verify_resource, summary, registries=registries, model=name)
    if evidence is not None:
        yield "evidence", partial(_verify_evidence, summary, evidence)
        if artifacts.measurement is not None:
            verify = partial(verify_measurement, artifacts.measurement, evidence)
            yield "measurement", partial(verify, trust=trust, now=now)
    if policy is not None:
        yield "policy", partial(_verify_policy, summary, policy)
        applied = _applied_policy(summary, policy)
        if evidence is not None and applied is not None:
            yield "decision", partial(_verify_decision, summary, evidence, applied)
    if artifacts.golden is not None:
        golden = artifacts.golden
        yield "golden", partial(verify_golden_files, signed, golden, model=summary.model)
    if artifacts.preprocessing is not None:
        files = {PREPROCESSING: artifacts.preprocessing}
        yield "preprocessing", partial(verify_files, signed, files)


def _verify_result(summary: VerificationSummary) -> None:
    if summary.verification_result != "PASSED":
        raise Untrusted(
            f"the verdict is {summary.verification_result}: the file was rejected, or its check "
            "ended with an error. The report has the reason. Use another version."
        )


def _verify_evidence(summary: VerificationSummary, evidence: Evidence) -> None:
    named = [each.sha256 for each in summary.input_attestations]
    if named != [evidence.digest().hex] or evidence.subject.sha256 != summary.model:
        raise Untrusted(
            f"the verdict was made on evidence {', '.join(map(str, named))} of {summary.model}, "
            f"this is {evidence.digest().hex} of {evidence.subject.sha256}. The evidence was "
            "edited, or belongs to another model."
        )


def _applied_policy(summary: VerificationSummary, policy: Policy) -> Policy | None:
    """Return the policy or its twin's policy, whichever the statement names; None if neither."""
    policies = (policy, policy.twin)
    return next((p for p in policies if p and p.digest().hex == summary.policy.sha256), None)


def _verify_policy(summary: VerificationSummary, policy: Policy) -> None:
    if _applied_policy(summary, policy) is None:
        raise Untrusted(
            f"the verdict was made by policy {summary.policy.sha256}, this is "
            f"{policy.digest().hex}. Use the policy that was applied: policy.json of the report."
        )


def _verify_decision(summary: VerificationSummary, evidence: Evidence, policy: Policy) -> None:
    """Decide again and compare."""
    again = decide(policy, evidence, incumbent=summary.incumbent, decided_at=summary.time_verified)
    version = summary.verifier.version.get("parity-gate", "")
    recomputed = VerificationSummary.from_decision(
        again, precision=policy.precision, resource=summary.resource_uri, version=version
    )
    if recomputed.to_plain() != summary.to_plain():  # As JSON values: NaN does not equal itself.
        raise Untrusted(
            f"this evidence and policy lead to the verdict {again.verdict} ({again.digest().hex}), "
            f"the statement has {summary.verification_result} ({summary.decision.sha256}). It was "
            f"edited, or the rules of parity-gate {version or '?'} differ from this version: "
            "decide again, or verify with that version."
        )
