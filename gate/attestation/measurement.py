"""The evidence as a statement: what measured which bytes, where and with which code.

The predicate is our own; its schema is in docs/attestation.md.
"""

from __future__ import annotations

from typing import Any, Self

from gate.attestation.statement import Resource, Statement, Worded, resources
from gate.records.evidence import Evidence
from gate.records.names import EVIDENCE
from gate.storage.digest import Digest
from gate.storage.record import Sha256, later

MEASUREMENT_TYPE = "urn:parity-gate:measurement:v1"


class CodeVersion(Worded):
    """The code that measured. None: it is not in Git."""

    parity_gate: str
    commit: str | None = None
    dirty: bool | None = None
    """Whether files differed from that commit."""


class MeasuredRuntime(Worded):
    """What shows that a runtime was what its name says."""

    name: str
    provider_requested: str
    providers_active: tuple[str, ...]
    nodes_per_provider: dict[str, int]
    fallback_nodes: tuple[str, ...]
    session_options: dict[str, str]
    identity: dict[str, Any] | None = later(None)
    """As the evidence has it: what measured under a name that promises nothing by itself."""
    absent_reason: str | None = later(None)
    failure: str | None = later(None)


class MeasurementPredicate(Worded):
    """The predicate."""

    evidence: Resource
    """By the digest of its canonical JSON."""
    model: Sha256
    """As evidence counts it: with external data, the digest of a manifest."""
    measured_at: str
    environment: dict[str, Any]
    """As the evidence has it."""
    code: CodeVersion
    dataset: Resource
    samples: int
    runtimes: tuple[MeasuredRuntime, ...]

    @classmethod
    def of(cls, evidence: Evidence, *, code: CodeVersion) -> MeasurementPredicate:
        """Of evidence, at the moment when it was measured."""
        return cls(
            evidence=Resource.of(evidence.digest(), uri=EVIDENCE),
            model=evidence.subject.sha256,
            measured_at=evidence.measured_at,
            environment=evidence.environment.to_plain(),
            code=code,
            dataset=Resource.of(evidence.dataset.sha256, name="samples"),
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

    def in_words_of(self, signed: Self) -> Self:
        """The same, without what `signed` does not say because its words came later: the identity
        of a runtime. The digest of the evidence covers it."""
        if len(self.runtimes) != len(signed.runtimes):
            return self
        runtimes = tuple(
            mine.model_copy(update={"identity": None} if theirs.identity is None else {})
            for mine, theirs in zip(self.runtimes, signed.runtimes, strict=True)
        )
        return self.model_copy(update={"runtimes": runtimes})

    def about(self, subjects: dict[str, Digest]) -> Statement:
        """The statement about these files, by name."""
        return Statement(
            subject=resources(subjects),
            predicate_type=MEASUREMENT_TYPE,
            predicate=self.to_plain(),
        )
