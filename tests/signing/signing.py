"""Test keys, trust and signed statements, which are valid and have the same bytes in each run."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.signer import CryptoSigner

from gate import Decision, Digest, Evidence, decide
from gate.signing.keys import SigningKey, public_key_of
from gate.signing.predicates import CodeVersion
from gate.signing.statement import SignedStatement
from gate.signing.subjects import file_resource
from gate.signing.trust import Trust, TrustedKey
from gate.signing.verification import Signatory, StatementPair
from tests import builders

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
CODE = CodeVersion(parity_gate="0.1.0", commit="0" * 40, dirty=False)


def key(number: int = 0, *, name: str | None = None) -> SigningKey:
    """Return a key whose seed is the number."""
    signer = CryptoSigner(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32))
    return SigningKey(signer, public_key_of(signer, name=name or f"key {number}"))


def trusted_key(signing: SigningKey, **times: str) -> TrustedKey:
    return TrustedKey(**{**signing.public.to_plain(), **times})


def trust(*keys: SigningKey, **fields: Any) -> Trust:
    return Trust(measurers=tuple(trusted_key(each) for each in keys or (key(),)), **fields)


def evidence_and_decision(**overrides: Any) -> tuple[Evidence, Decision]:
    evidence = builders.evidence(**{"measured_at": NOW.isoformat(), **overrides})
    return evidence, decide(builders.policy(), evidence, decided_at=NOW.isoformat())


def statements(
    evidence: Evidence,
    decision: Decision,
    *,
    signer: SigningKey | None = None,
    files: dict[str, Digest] | None = None,
    resource: str | None = None,
) -> StatementPair:
    signatory = Signatory(signer or key(), CODE)
    files = files or {"model.onnx": decision.subject_sha256}
    resource = resource or file_resource(decision.subject_sha256)
    return StatementPair(
        signatory.sign_measurement(evidence, files),
        signatory.sign_decision(decision, files, precision="exact", resource=resource),
    )


def add_signature(statement: SignedStatement, second: SigningKey) -> SignedStatement:
    """Return the statement with a second signature in its envelope."""
    import json

    envelope = json.loads(statement.data)
    second_envelope = json.loads(SignedStatement.sign(statement.statement, second).data)
    envelope["signatures"] += second_envelope["signatures"]
    return SignedStatement.from_bytes(json.dumps(envelope).encode())
