"""Predicates: measurement, SLSA verification summary, approval."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from gate.decision.decide import Decision
from gate.errors import Untrusted
from gate.records.champion_comparison import ChampionComparison
from gate.records.evidence import Evidence
from gate.records.layout import DECISION, EVIDENCE
from gate.signing.keys import PublicKey, SigningKey
from gate.signing.statement import CamelCaseRecord, Predicate, Resource, SignedStatement
from gate.signing.subjects import parse_resource_uri, resource_uri
from gate.signing.trust import Trust, parse_time
from gate.storage.digest import Digest
from gate.storage.record import Sha256, added_field

APPROVAL_TYPE = "urn:parity-gate:review:v1"

Word = Literal["approved", "rejected"]


class Approval(Predicate):
    """A review of one version."""

    type_uri: ClassVar[str] = APPROVAL_TYPE

    word: Word
    resource_uri: str
    """URI of the registered model (`gate.signing.subjects`)."""
    version: str
    """Version number of the registered model."""
    decision: Resource
    """Its digest is that of the decision's canonical JSON."""
    reviewed_at: str
    """UTC, ISO 8601."""
    comment: str | None = added_field(None)


@dataclass(frozen=True, kw_only=True)
class Reviewable:
    """The subject of a review: a registered model version, its digest, and the decision on it."""

    registry: str
    """Identity of the registry, as `gate.ledger.entry.plain` writes it."""
    model: str
    version: str
    sha256: Digest
    """Digest of the model, as in the evidence."""
    decision: Digest

    def sign(
        self, word: Word, key: SigningKey, *, at: datetime, comment: str | None = None
    ) -> SignedStatement:
        """Sign an approval or rejection. Raises KeyUnusable."""
        approval = Approval(
            word=word,
            resource_uri=resource_uri(self.registry, self.model),
            version=self.version,
            decision=Resource.from_digest(self.decision, uri=DECISION),
            reviewed_at=at.isoformat(),
            comment=comment,
        )
        return SignedStatement.sign(approval.about({"model": self.sha256}), key)

    def verify(self, signed: SignedStatement, *, registries: frozenset[str]) -> Approval:
        """Return the approval in a statement, if it is about exactly this version.

        Does not verify the signature. `registries`: all addresses of this registry. Raises
        Untrusted.
        """
        approval = Approval.from_statement(signed, label="it")
        resource = parse_resource_uri(approval.resource_uri)
        subjects = signed.statement.subject
        for label, actual, expected in (
            ("registry", resource and resource[0], registries | {self.registry}),
            ("model", resource and resource[1], {self.model}),
            ("version", approval.version, {self.version}),
            ("file", subjects[0].sha256 if len(subjects) == 1 else None, {self.sha256.hex}),
            ("decision", approval.decision.sha256, {self.decision.hex}),
        ):
            if actual not in expected:
                raise Untrusted(
                    f"it is about {label} {str(actual)[:200]}, expected "
                    f"{' or '.join(sorted(expected))}: sign this version again"
                )
        return approval


def trusted_reviewers(
    signed: SignedStatement, approval: Approval, *, trust: Trust, now: datetime
) -> tuple[PublicKey, ...]:
    """Return the trusted reviewers who signed a statement, at least one.

    The caller compares their number over all statements with the threshold. Raises Untrusted.
    """
    signed_at = parse_time(approval.reviewed_at)
    if signed_at is not None and now - signed_at > timedelta(days=trust.max_age_days):
        raise Untrusted(
            f"it was signed on {signed_at:%Y-%m-%d}, more than {trust.max_age_days:g} days ago "
            "(trust.max_age_days): sign it again"
        )
    single = trust.model_copy(update={"reviewers_threshold": 1})
    at = approval.reviewed_at
    return single.signers(signed, role="reviewers", timestamp=at, now=now, label="it")


MEASUREMENT_TYPE = "urn:parity-gate:measurement:v1"


class CodeVersion(CamelCaseRecord):
    """The version of the code that measured. Git fields are None outside a repository."""

    parity_gate: str
    commit: str | None = None
    dirty: bool | None = None
    """Whether tracked files differed from the commit."""


class MeasuredRuntime(CamelCaseRecord):
    """The proof of which runtime and providers computed."""

    name: str
    provider_requested: str
    providers_active: tuple[str, ...]
    nodes_per_provider: dict[str, int]
    fallback_nodes: tuple[str, ...]
    session_options: dict[str, str]
    identity: dict[str, Any] | None = added_field(None)
    """As in the evidence: identifies a runtime whose name does not."""
    absent_reason: str | None = added_field(None)
    failure: str | None = added_field(None)


class MeasurementPredicate(Predicate):
    """The measurement of one file, with the code and runtimes that measured it."""

    type_uri: ClassVar[str] = MEASUREMENT_TYPE

    evidence: Resource
    """Its digest is that of the evidence's canonical JSON."""
    model: Sha256
    """As in the evidence: with external data, the digest of a manifest."""
    measured_at: str
    environment: dict[str, Any]
    """As in the evidence."""
    code: CodeVersion
    dataset: Resource
    samples: int
    runtimes: tuple[MeasuredRuntime, ...]

    @classmethod
    def from_evidence(cls, evidence: Evidence, *, code: CodeVersion) -> MeasurementPredicate:
        """Create the predicate from evidence, dated when the evidence was measured."""
        return cls(
            evidence=Resource.from_digest(evidence.digest(), uri=EVIDENCE),
            model=evidence.subject.sha256,
            measured_at=evidence.measured_at,
            environment=evidence.environment.to_plain(),
            code=code,
            dataset=Resource.from_digest(evidence.dataset.sha256, name="samples"),
            samples=evidence.dataset.samples,
            runtimes=tuple(
                MeasuredRuntime(
                    name=each.runtime,
                    provider_requested=each.provider_requested,
                    providers_active=each.providers_active,
                    nodes_per_provider=each.nodes_per_provider,
                    fallback_nodes=each.fallback_nodes,
                    session_options=each.session_options,
                    identity=None if each.identity is None else each.identity.to_plain(),
                    absent_reason=each.absent_reason,
                    failure=each.failure,
                )
                for each in evidence.runtimes
            ),
        )


_TIMEOUT_S = 10.0
_COMMIT = "# branch.oid "
_NOT_YET = "(initial)"


def code_version(project: Path) -> CodeVersion:
    """Return the version of parity-gate, and the Git state of the project around a folder.

    The Git fields are None without Git or a repository, or if Git does not answer in time.
    """
    version = metadata.version("parity-gate")
    lines = _status(project)
    commits = [line.removeprefix(_COMMIT) for line in lines if line.startswith(_COMMIT)]
    if not commits or commits[0] == _NOT_YET:
        return CodeVersion(parity_gate=version)
    dirty = any(not line.startswith("#") for line in lines)
    return CodeVersion(parity_gate=version, commit=commits[0], dirty=dirty)


def _status(project: Path) -> list[str]:
    """Return the lines of `git status`: the commit, and the tracked files that differ from it."""
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    # Without this, Git would write its refreshed index.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run(
            command, cwd=project, env=environment, capture_output=True, timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        return result.stdout.decode(errors="replace").splitlines()
    return []


# https://slsa.dev/spec/v1.1/verification_summary
SUMMARY_TYPE = "https://slsa.dev/verification_summary/v1"
VERIFIER = "urn:parity-gate:gate"
POLICY_URI = "urn:parity-gate:policy"


class Verifier(CamelCaseRecord):
    """The verifier of a SLSA summary: parity-gate."""

    id: str = VERIFIER
    version: dict[str, str]


class VerificationSummary(Predicate):
    """A verdict. Fields that SLSA does not define have the prefix `parityGate`."""

    type_uri: ClassVar[str] = SUMMARY_TYPE

    verifier: Verifier
    time_verified: str
    """Time of the decision: UTC, ISO 8601."""
    resource_uri: str
    """A model in a registry (`resource_uri` in `gate.signing.subjects`), or only the file."""
    policy: Resource
    input_attestations: tuple[Resource, ...]
    """The evidence of the decision."""
    verification_result: Literal["PASSED", "FAILED"]
    verified_levels: tuple[str, ...]
    """`PARITY_EXACT`, `PARITY_REDUCED` or `PARITY_QUANTIZED`; `FAILED`."""
    decision: Annotated[Resource, Field(alias="parityGateDecision")]
    """Its digest is that of the decision's canonical JSON."""
    model: Annotated[Sha256, Field(alias="parityGateModel")]
    """As in the evidence: with external data, the digest of a manifest."""
    incumbent: Annotated[ChampionComparison | None, Field(alias="parityGateIncumbent")] = (
        added_field(None)
    )
    """The comparison with the champion, which is needed to repeat the decision."""

    @classmethod
    def from_decision(
        cls, decision: Decision, *, precision: str, resource: str, version: str
    ) -> VerificationSummary:
        """Create the summary of a decision by a policy with this precision.

        `version`: the version of parity-gate that decided.
        """
        passed = decision.passed
        return cls(
            verifier=Verifier(version={"parity-gate": version}),
            time_verified=decision.decided_at,
            resource_uri=resource,
            policy=Resource.from_digest(decision.policy_sha256, uri=POLICY_URI),
            input_attestations=(Resource.from_digest(decision.evidence_sha256, uri=EVIDENCE),),
            verification_result="PASSED" if passed else "FAILED",
            verified_levels=(f"PARITY_{precision.upper()}",) if passed else ("FAILED",),
            decision=Resource.from_digest(decision.digest(), uri=DECISION),
            model=decision.subject_sha256,
            incumbent=decision.incumbent,
        )
