"""The verdict as a statement: SLSA's Verification Summary, so that policy engines can read it.

https://slsa.dev/spec/v1.1/verification_summary
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gate.attestation.statement import Resource, Statement, Worded, resources
from gate.decision.decision import Decision
from gate.records.incumbent import Incumbent
from gate.records.names import DECISION, EVIDENCE
from gate.storage.digest import Digest
from gate.storage.record import Sha256, later

SUMMARY_TYPE = "https://slsa.dev/verification_summary/v1"
VERIFIER = "urn:parity-gate:gate"
POLICY_URI = "urn:parity-gate:policy"


class Verifier(Worded):
    """Who verified: this program."""

    id: str = VERIFIER
    version: dict[str, str]


class Summary(Worded):
    """The predicate. What SLSA has no name for has a name that begins with `parityGate`."""

    verifier: Verifier
    time_verified: str
    """When it was decided: UTC, ISO 8601."""
    resource_uri: str
    """What the verdict is for: a model in a registry (`resource_of`), or only the file."""
    policy: Resource
    input_attestations: tuple[Resource, ...]
    """The evidence that was decided on."""
    verification_result: Literal["PASSED", "FAILED"]
    verified_levels: tuple[str, ...]
    """`PARITY_EXACT`, `PARITY_REDUCED` or `PARITY_QUANTIZED`; `FAILED`."""
    decision: Annotated[Resource, Field(alias="parityGateDecision")]
    """By the digest of its canonical JSON."""
    model: Annotated[Sha256, Field(alias="parityGateModel")]
    """The model as evidence counts it: with external data, the digest of a manifest."""
    incumbent: Annotated[Incumbent | None, Field(alias="parityGateIncumbent")] = later(None)
    """What the decision took from the version that served, to decide again."""

    @classmethod
    def of(cls, decision: Decision, *, precision: str, resource: str, version: str) -> Summary:
        """Of a decision by a policy of this precision, made by this version of the gate."""
        passed = decision.passed
        return cls(
            verifier=Verifier(version={"parity-gate": version}),
            time_verified=decision.decided_at,
            resource_uri=resource,
            policy=Resource.of(decision.policy_sha256, uri=POLICY_URI),
            input_attestations=(Resource.of(decision.evidence_sha256, uri=EVIDENCE),),
            verification_result="PASSED" if passed else "FAILED",
            verified_levels=(f"PARITY_{precision.upper()}",) if passed else ("FAILED",),
            decision=Resource.of(decision.digest(), uri=DECISION),
            model=decision.subject_sha256,
            incumbent=decision.incumbent,
        )

    def about(self, subjects: dict[str, Digest]) -> Statement:
        """The statement about these files, by name."""
        return Statement(
            subject=resources(subjects),
            predicate_type=SUMMARY_TYPE,
            predicate=self.to_plain(),
        )
