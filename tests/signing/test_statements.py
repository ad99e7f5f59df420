"""Evidence and decision statements are signed, stored, and refused when exchanged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from gate import Decision, Digest, Evidence, Policy, Verdict
from gate.errors import Untrusted
from gate.signing.predicates import Approval
from gate.signing.statement import Resource, SignedStatement
from gate.signing.subjects import resource_uri
from gate.signing.trust import Trust
from gate.signing.verification import (
    StatementPair,
    summary_in,
    verify_files,
    verify_measurement,
    verify_resource,
    verify_summary,
)
from tests import builders
from tests.signing import signing
from tests.signing.signing import NOW, key

EVIDENCE, DECISION = signing.evidence_and_decision()
MODEL = DECISION.subject_sha256
GOLDEN = Path(__file__).parents[1] / "golden" / "attestation"
"""Files written by version 0.1.0 with the key of seed 0. Later versions must read and verify them.
"""


def test_rejection_is_signed() -> None:
    evidence, decision = signing.evidence_and_decision(runtimes=())
    assert not decision.passed
    statements = signing.statements(evidence, decision)
    assert summary_in(statements.decision).verification_result == "FAILED"
    assert statements.verify(evidence, decision, trust=signing.trust(), now=NOW)


def test_comparison_with_nan_verifies(tmp_path: Path) -> None:
    decision = edit_decision(incumbent=builders.incumbent(noise_ratio=math.nan))
    signing.statements(EVIDENCE, decision).write(tmp_path)
    assert StatementPair.from_folder(tmp_path).verify(
        EVIDENCE, decision, trust=signing.trust(), now=NOW
    )


def edit_decision(**fields: object) -> Decision:
    return DECISION.model_copy(update=fields)


@pytest.mark.parametrize(
    "other",
    [
        edit_decision(checks=DECISION.checks[:-1]),
        edit_decision(verdict=Verdict.FAIL),
        edit_decision(subject_sha256=builders.digest("other")),
        edit_decision(policy_sha256=builders.digest("other")),
        edit_decision(evidence_sha256=builders.digest("other")),
        edit_decision(decided_at="2026-11-22T12:00:01+00:00"),
        edit_decision(incumbent=builders.incumbent()),
        edit_decision(runtimes=()),
    ],
)
def test_edited_decision_does_not_match_the_statement(other: Decision) -> None:
    statements = signing.statements(EVIDENCE, DECISION)
    with pytest.raises(Untrusted, match="The decision was edited, or belongs to another model"):
        statements.verify(EVIDENCE, other, trust=signing.trust(), now=NOW)


def test_evidence_and_decision_statements_are_not_interchangeable() -> None:
    pair = signing.statements(EVIDENCE, DECISION)
    swapped = StatementPair(pair.decision, pair.evidence)
    with pytest.raises(Untrusted, match="is of type"):
        swapped.verify(EVIDENCE, DECISION, trust=signing.trust(), now=NOW)
    review = Approval(
        word="approved",
        resource_uri="r",
        version="1",
        decision=Resource.from_digest(DECISION.digest()),
        reviewed_at=NOW.isoformat(),
    )
    with pytest.raises(Untrusted, match="urn:parity-gate:review:v1"):
        summary_in(SignedStatement.sign(review.about({"model": MODEL}), key()))


def sign_changed_predicate(change: Callable[[dict], object]) -> SignedStatement:
    """Return a verdict with another predicate, signed by a trusted key."""
    statement = signing.statements(EVIDENCE, DECISION).decision.statement
    predicate = json.loads(json.dumps(statement.predicate))
    change(predicate)
    return SignedStatement.sign(statement.model_copy(update={"predicate": predicate}), key())


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.clear(),
        lambda p: p.pop("policy"),
        lambda p: p.update(verificationResult="passed"),
        lambda p: p.update(verifiedLevels="PARITY_EXACT"),
        lambda p: p.update(parityGateModel="sha256:0"),
        lambda p: p.update(more=1),
    ],
)
def test_incomplete_predicate_is_refused(change) -> None:
    with pytest.raises(Untrusted, match="the predicate of .* is not valid"):
        summary_in(sign_changed_predicate(change))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.update(verifiedLevels=[]),
        lambda p: p.update(verifiedLevels=["PARITY_EXACT", "PARITY_QUANTIZED"]),
        lambda p: p.update(inputAttestations=[]),
        lambda p: p.update(inputAttestations=p["inputAttestations"] * 2),
        lambda p: p["policy"]["digest"].update(sha512="0"),
        lambda p: p["parityGateDecision"].update(digest={}),
    ],
)
def test_predicate_that_differs_from_the_decision_is_refused(change) -> None:
    with pytest.raises(Untrusted, match="The decision was edited, or belongs to another model"):
        verify_summary(sign_changed_predicate(change), DECISION, trust=signing.trust(), now=NOW)


REGISTRY = "https://mlflow.example.org"


@pytest.mark.parametrize(
    ("resource", "good"),
    [
        (resource_uri(REGISTRY, "digits"), True),
        (resource_uri(REGISTRY, "letters"), False),
        (resource_uri("https://other.example.org", "digits"), False),
        (resource_uri(f"{REGISTRY}#/models/x", "digits"), False),
        ("urn:sha256:0", False),
        ("digits", False),
    ],
)
def test_verdict_is_bound_to_one_model_in_one_registry(resource: str, good: bool) -> None:
    summary = summary_in(signing.statements(EVIDENCE, DECISION, resource=resource).decision)
    if good:
        verify_resource(summary, registries=frozenset({REGISTRY}), model="digits")
        return
    with pytest.raises(Untrusted, match="expected digits in https://mlflow"):
        verify_resource(summary, registries=frozenset({REGISTRY}), model="digits")


def test_subjects_have_names_and_digests() -> None:
    signed = signing.statements(EVIDENCE, DECISION).decision
    verify_files(signed, {"model.onnx": MODEL})
    for wrong in ({"model.onnx": builders.digest("x")}, {"other.onnx": MODEL}):
        with pytest.raises(Untrusted, match="The file was replaced"):
            verify_files(signed, wrong)


def test_missing_statement_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Untrusted, match=r"no statement evidence\.dsse\.json"):
        StatementPair.from_folder(tmp_path)
    signing.statements(EVIDENCE, DECISION).write(tmp_path)
    (tmp_path / "decision.dsse.json").unlink()
    (tmp_path / "decision.dsse.json").symlink_to(tmp_path / "evidence.dsse.json")
    with pytest.raises(Untrusted, match="it is a link"):
        StatementPair.from_folder(tmp_path)


def test_first_version_statements_verify() -> None:
    trust = Trust.from_file(GOLDEN / "trust.yaml")
    evidence = Evidence.load(GOLDEN / "evidence.json")
    decision = Decision.load(GOLDEN / "decision.json")
    Policy.from_json((GOLDEN / "policy.json").read_text())
    result = StatementPair.from_folder(GOLDEN)
    (signer,) = result.verify(evidence, decision, trust=trust, now=NOW)
    assert signer.name == "key 0"
    verify_files(result.decision, {"model.onnx": MODEL, "preprocessing": Digest("1" * 64)})
    assert verify_measurement(result.evidence, evidence, trust=trust, now=NOW)
    review = SignedStatement.from_bytes((GOLDEN / "review.dsse.json").read_bytes())
    assert Approval.model_validate_json(json.dumps(review.statement.predicate)).word == "approved"
    assert trust.signers(review, role="reviewers", timestamp=NOW.isoformat(), now=NOW, label="it")


@pytest.mark.parametrize("name", ["evidence", "decision", "review"])
def test_first_version_statements_are_still_written_identically(name: str) -> None:
    data = (GOLDEN / f"{name}.dsse.json").read_bytes()
    assert SignedStatement.sign(SignedStatement.from_bytes(data).statement, key()).data == data
