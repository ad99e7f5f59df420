"""A verdict is SLSA's Verification Summary, by in-toto's own reader."""

from __future__ import annotations

import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.vsa.v1 import vsa_pb2

from gate.decision.decide import decide
from gate.signing.predicates import SUMMARY_TYPE, VerificationSummary
from tests import builders
from tests.signing import signing

PASSED = signing.judged()
FAILED = signing.judged(runtimes=())


def summary(which=PASSED, precision: str = "exact") -> VerificationSummary:
    return VerificationSummary.from_decision(
        which[1], precision=precision, resource="urn:sha256:0", version="1.2"
    )


def test_in_toto_reads_the_predicate() -> None:
    plain = summary().to_plain()
    # In the released schema the levels are one text, and a digest is a list: SLSA's are not.
    for known_wrong in ("verifiedLevels", "policy", "inputAttestations"):
        del plain[known_wrong]
    read = json_format.ParseDict(
        plain,
        vsa_pb2.VerificationSummary(),
        ignore_unknown_fields=True,  # type: ignore[attr-defined]
    )
    assert read.verification_result == "PASSED"
    assert read.resource_uri == "urn:sha256:0"
    assert read.verifier.id == "urn:parity-gate:gate"
    assert read.time_verified.ToDatetime(signing.NOW.tzinfo) == signing.NOW


def test_it_has_what_slsa_asks_for() -> None:
    plain = summary().to_plain()
    assert plain.keys() >= {"verifier", "timeVerified", "resourceUri", "policy",
                            "verificationResult", "verifiedLevels"}  # fmt: skip
    assert all(name.startswith("parityGate") for name in plain.keys() - {
        "verifier", "timeVerified", "resourceUri", "policy", "inputAttestations",
        "verificationResult", "verifiedLevels",
    })  # fmt: skip
    assert plain["policy"]["digest"] == {"sha256": builders.policy().digest().hex}
    assert plain["inputAttestations"][0]["digest"] == {"sha256": PASSED[0].digest().hex}


@pytest.mark.parametrize(
    ("which", "precision", "result", "levels"),
    [
        (PASSED, "exact", "PASSED", ("PARITY_EXACT",)),
        (PASSED, "quantized", "PASSED", ("PARITY_QUANTIZED",)),
        (FAILED, "exact", "FAILED", ("FAILED",)),
    ],
)
def test_a_verdict_in_slsas_words(which, precision, result, levels) -> None:
    found = summary(which, precision)
    assert (found.verification_result, found.verified_levels) == (result, levels)


def test_it_comes_back_with_the_incumbent() -> None:
    evidence, _ = PASSED
    policy = builders.policy()
    assert policy.incumbent is None
    decision = decide(policy, evidence, decided_at="2026-01-01T00:00:00+00:00").model_copy(
        update={"incumbent": builders.incumbent()}
    )
    found = summary((evidence, decision))
    assert VerificationSummary.from_json(found.to_json()) == found
    assert found.incumbent == builders.incumbent()
    assert found.about({"model.onnx": found.model}).predicate_type == SUMMARY_TYPE
