"""The in-toto library can read the statements and predicates."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from in_toto_attestation.predicates.vsa.v1 import vsa_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement as InToto

from gate import Digest
from gate.errors import EvidenceError
from gate.signing.predicates import Approval, VerificationSummary
from gate.signing.statement import Resource, Statement
from gate.signing.subjects import (
    GOLDEN,
    PREPROCESSING,
    file_resource,
    parse_resource_uri,
    resource_uri,
    statement_subjects,
)
from tests import builders
from tests.registry.releases import evidence, onnx_file, onnx_file_with_data
from tests.signing import signing


def make_statements() -> dict[str, Statement]:
    """Return one statement of each kind."""
    evidence, decision = signing.evidence_and_decision()
    pair = signing.statements(evidence, decision)
    model = decision.subject_sha256
    review = Approval(
        word="approved",
        resource_uri=file_resource(model),
        version="3",
        decision=Resource.from_digest(decision.digest(), uri="decision.json"),
        reviewed_at=signing.NOW.isoformat(),
    )
    return {
        "measurement": pair.evidence.statement,
        "verdict": pair.decision.statement,
        "review": review.about({"model": model}),
    }


@pytest.mark.parametrize("kind", ["measurement", "verdict", "review"])
def test_statement_round_trips_through_in_toto(kind: str) -> None:
    plain = make_statements()[kind].to_plain()
    read = json_format.ParseDict(plain, statement_pb2.Statement())  # type: ignore[attr-defined]
    InToto.copy_from_pb(read).validate()
    again = json_format.MessageToDict(read)
    assert again["subject"] == plain["subject"]
    assert again["predicateType"] == plain["predicateType"]
    assert again["predicate"].keys() == plain["predicate"].keys()


@given(st.text(min_size=1).filter(lambda name: name.isprintable()))
def test_any_model_name_round_trips_through_the_uri(name: str) -> None:
    registry = "https://mlflow.example.org/x#/models/y"
    assert parse_resource_uri(resource_uri(registry, name)) == (registry, name)


def test_model_name_cannot_change_the_registry() -> None:
    first = resource_uri("https://a", "b#/models/c")
    assert parse_resource_uri(first) == ("https://a", "b#/models/c")
    assert first != resource_uri("https://a#/models/b", "c")


@pytest.mark.parametrize("resource", ["", "urn:sha256:0", "https://mlflow.example.org"])
def test_other_uri_is_not_a_registered_model(resource: str) -> None:
    assert parse_resource_uri(resource) is None


VECTORS = builders.digest("golden.json")


def test_subjects_of_file_vectors_and_spec(tmp_path: Path) -> None:
    path, spec = onnx_file(tmp_path / "model.onnx"), builders.digest("spec")
    measured = evidence(path)
    file = {"model.onnx": Digest.from_file(path)}
    assert statement_subjects(path, measured, golden=None) == file
    source = measured.source.model_copy(update={"preprocess_sha256": spec})
    with_spec = measured.model_copy(update={"source": source})
    assert statement_subjects(path, with_spec, golden=VECTORS) == {
        **file,
        GOLDEN: VECTORS,
        PREPROCESSING: spec,
    }
    assert statement_subjects(path, with_spec, golden=None, preprocessing=False) == file


def test_external_data_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    path = onnx_file_with_data(tmp_path / "model.onnx")
    measured = evidence(path)
    subject = measured.subject.model_copy(update={"external_data": ("../secret",)})
    with pytest.raises(EvidenceError, match="inside of the model's folder"):
        statement_subjects(path, measured.model_copy(update={"subject": subject}), golden=None)


PASSED = signing.evidence_and_decision()
FAILED = signing.evidence_and_decision(runtimes=())


def summary(evaluated=PASSED, precision: str = "exact") -> VerificationSummary:
    return VerificationSummary.from_decision(
        evaluated[1], precision=precision, resource="urn:sha256:0", version="1.2"
    )


def test_summary_predicate_is_read_by_in_toto() -> None:
    plain = summary().to_plain()
    # The released schema has verifiedLevels as one text and digests as a list, unlike SLSA.
    for field in ("verifiedLevels", "policy", "inputAttestations"):
        del plain[field]
    read = json_format.ParseDict(
        plain,
        vsa_pb2.VerificationSummary(),
        ignore_unknown_fields=True,  # type: ignore[attr-defined]
    )
    assert read.verification_result == "PASSED"
    assert read.resource_uri == "urn:sha256:0"
    assert read.verifier.id == "urn:parity-gate:gate"
    assert read.time_verified.ToDatetime(signing.NOW.tzinfo) == signing.NOW


@pytest.mark.parametrize(
    ("which", "precision", "result", "levels"),
    [
        (PASSED, "exact", "PASSED", ("PARITY_EXACT",)),
        (PASSED, "quantized", "PASSED", ("PARITY_QUANTIZED",)),
        (FAILED, "exact", "FAILED", ("FAILED",)),
    ],
)
def test_verdict_maps_to_slsa_result(which, precision, result, levels) -> None:
    actual = summary(which, precision)
    assert (actual.verification_result, actual.verified_levels) == (result, levels)
