"""The measurement statement names the evidence, the machine and the code version."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gate import Evidence
from gate.errors import Untrusted
from gate.records.runtime import RuntimeIdentity
from gate.signing.predicates import MeasurementPredicate
from gate.signing.statement import SignedStatement
from gate.signing.verification import verify_measurement
from tests import builders
from tests.signing import signing

EVIDENCE, DECISION = signing.evidence_and_decision()
SIGNED = signing.statements(EVIDENCE, DECISION).evidence


def test_statement_lists_the_proof_of_each_runtime() -> None:
    predicate = MeasurementPredicate.from_evidence(EVIDENCE, code=signing.CODE)
    assert predicate.evidence.sha256 == EVIDENCE.digest().hex
    assert predicate.dataset.sha256 == EVIDENCE.dataset.sha256.hex
    by_name = {each.name: each for each in predicate.runtimes}
    assert by_name["ort-cpu"].nodes_per_provider == {"CPUExecutionProvider": 49}
    assert by_name["ort-cuda"].absent_reason == "no CUDA device"
    assert predicate.environment["versions"]["torch"] == "2.15.0"
    assert MeasurementPredicate.from_json(predicate.to_json()) == predicate


def edit_evidence(**fields: Any) -> Evidence:
    return EVIDENCE.model_copy(update=fields)


@pytest.mark.parametrize(
    "other",
    [
        edit_evidence(measured_at="2026-11-22T12:00:01+00:00"),
        edit_evidence(runtimes=EVIDENCE.runtimes[:-1]),
        edit_evidence(subject=EVIDENCE.subject.model_copy(update={"sha256": builders.digest("x")})),
        edit_evidence(environment=EVIDENCE.environment.model_copy(update={"cpu": "other"})),
    ],
)
def test_edited_evidence_does_not_match_the_statement(other: Evidence) -> None:
    trust = signing.trust()
    assert verify_measurement(SIGNED, EVIDENCE, trust=trust, now=signing.NOW)
    with pytest.raises(Untrusted, match="The evidence was edited, or belongs to another model"):
        verify_measurement(SIGNED, other, trust=trust, now=signing.NOW)


IDENTITY = RuntimeIdentity(
    kind="openvino", options={"precision_hint": "f32"}, provider="OpenVINO CPU",
    versions={"openvino": "2026.4.1"}, device="AMD EPYC", precision="float32",
)  # fmt: skip


def with_identity(identity: RuntimeIdentity = IDENTITY) -> Evidence:
    edited = EVIDENCE.runtimes[0].model_copy(update={"runtime": "mine", "identity": identity})
    return edit_evidence(runtimes=(edited, *EVIDENCE.runtimes[1:]))


def sign_changed_runtimes(
    evidence: Evidence, change: Callable[[list[dict[str, Any]]], object]
) -> Any:
    """Return a signed measurement of the evidence with changed runtimes."""
    statement = signing.statements(evidence, DECISION).evidence.statement
    predicate = json.loads(json.dumps(statement.predicate))
    change(predicate["runtimes"])
    return SignedStatement.sign(
        statement.model_copy(update={"predicate": predicate}), signing.key()
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda runtimes: runtimes.pop(),
        lambda runtimes: runtimes.append(runtimes[-1]),
        lambda runtimes: runtimes[0].pop("identity"),
        lambda runtimes: runtimes[0]["identity"].update(precision="bfloat16"),
        lambda runtimes: runtimes[1].update(identity=runtimes[0]["identity"]),
        lambda runtimes: runtimes[0].update(identity={}),
    ],
)
def test_statement_with_other_runtimes_is_refused(change: Any) -> None:
    measured = with_identity()
    with pytest.raises(Untrusted, match="The evidence was edited"):
        verify_measurement(
            sign_changed_runtimes(measured, change),
            measured,
            trust=signing.trust(),
            now=signing.NOW,
        )


def test_statement_contains_the_identity_of_a_runtime() -> None:
    measured = with_identity()
    signed = signing.statements(measured, DECISION).evidence
    first, second, *_ = signed.statement.predicate["runtimes"]
    assert first["identity"] == IDENTITY.to_plain()
    assert "identity" not in second
    assert verify_measurement(signed, measured, trust=signing.trust(), now=signing.NOW)
