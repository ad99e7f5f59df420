"""A reviewer's word as a statement: this digest, this decision, this model, now."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from pydantic import ValidationError

from gate.attestation.envelope import SignedStatement
from gate.attestation.keys import PublicKey, SigningKey
from gate.attestation.resource import registered, resource_of
from gate.attestation.statement import Resource, Statement, Worded, resources
from gate.attestation.trust import Trust, time_of
from gate.errors import Untrusted, first_line
from gate.records.names import DECISION
from gate.storage.digest import Digest, canonical_json
from gate.storage.record import later

APPROVAL_TYPE = "urn:parity-gate:review:v1"
Word = Literal["approved", "rejected"]
_MODEL = "model"
"""The subject's name."""


class Approval(Worded):
    """The predicate."""

    word: Word
    resource_uri: str
    """The registered model (`gate.attestation.resource`)."""
    version: str
    """Its number there."""
    decision: Resource
    """By the digest of its canonical JSON."""
    reviewed_at: str
    """UTC, ISO 8601."""
    comment: str | None = later(None)

    @classmethod
    def of(cls, word: Word, *, resource: str, version: str, decision: Digest, at: str) -> Approval:
        """Of a reviewer's word."""
        return cls(
            word=word,
            resource_uri=resource,
            version=version,
            decision=Resource.of(decision, uri=DECISION),
            reviewed_at=at,
        )

    def about(self, model: Digest) -> Statement:
        """The statement about the model of this digest, as evidence counts it."""
        return Statement(
            subject=resources({_MODEL: model}),
            predicate_type=APPROVAL_TYPE,
            predicate=self.to_plain(),
        )


@dataclass(frozen=True, kw_only=True)
class Reviewable:
    """What a review is of: a version of a registered model, its bytes, and the decision on them."""

    registry: str
    """Its identity, as `gate.ledger.addresses.plain` writes it."""
    model: str
    version: str
    sha256: Digest
    """Of the model, as evidence counts it."""
    decision: Digest

    def signed(
        self, word: Word, key: SigningKey, *, at: datetime, comment: str | None = None
    ) -> SignedStatement:
        """A reviewer's word on it. Raises KeyUnusable."""
        approval = Approval.of(
            word,
            resource=resource_of(self.registry, self.model),
            version=self.version,
            decision=self.decision,
            at=at.isoformat(),
        )
        approval = approval.model_copy(update={"comment": comment})
        return SignedStatement.sign(approval.about(self.sha256), key)

    def verify(self, signed: SignedStatement, *, registries: frozenset[str]) -> Approval:
        """What a statement says, if it is about exactly this; whose word it is stays open.
        `registries`: all addresses of this one. Raises Untrusted."""
        found = _predicate(signed)
        place = registered(found.resource_uri)
        subjects = signed.statement.subject
        for what, actual, expected in (
            ("registry", place and place[0], registries | {self.registry}),
            ("model", place and place[1], {self.model}),
            ("version", found.version, {self.version}),
            ("file", subjects[0].sha256 if len(subjects) == 1 else None, {self.sha256.hex}),
            ("decision", found.decision.sha256, {self.decision.hex}),
        ):
            if actual not in expected:
                raise Untrusted(
                    f"it is about {what} {str(actual)[:200]}, expected "
                    f"{' or '.join(sorted(expected))}: sign this version anew"
                )
        return found


def signers_of(
    signed: SignedStatement, approval: Approval, *, trust: Trust, now: datetime
) -> tuple[PublicKey, ...]:
    """The reviewers whose word a statement is, at least one; how many it takes is counted over all
    statements. Raises Untrusted."""
    made = time_of(approval.reviewed_at)
    if made is not None and now - made > timedelta(days=trust.max_age_days):
        raise Untrusted(
            f"it was signed on {made:%Y-%m-%d}, more than {trust.max_age_days:g} days ago "
            "(trust.max_age_days): sign it anew"
        )
    one = trust.model_copy(update={"reviewers_threshold": 1})
    at = approval.reviewed_at
    return one.signers(signed, role="reviewers", made_at=at, now=now, what="it")


def _predicate(signed: SignedStatement) -> Approval:
    if signed.statement.predicate_type != APPROVAL_TYPE:
        kind = signed.statement.predicate_type[:200]
        raise Untrusted(f"it is of type {kind}, expected {APPROVAL_TYPE}: use gate approve")
    try:
        return Approval.model_validate_json(canonical_json(signed.statement.predicate))
    except (ValidationError, ValueError) as error:
        raise Untrusted(f"it has no whole predicate: {first_line(error)[:300]}") from error
