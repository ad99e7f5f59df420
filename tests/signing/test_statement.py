"""Statements are in-toto's, by in-toto's own reader."""

from __future__ import annotations

import json

import pytest
from google.protobuf import json_format
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement as InToto

from gate.errors import EvidenceError
from gate.signing.predicates import Approval
from gate.signing.statement import Resource, Statement, resources
from gate.signing.subjects import file_resource
from tests import builders
from tests.signing import signing


def every() -> dict[str, Statement]:
    """One of each kind."""
    evidence, decision = signing.judged()
    both = signing.statements(evidence, decision)
    model = decision.subject_sha256
    review = Approval(
        word="approved",
        resource_uri=file_resource(model),
        version="3",
        decision=Resource.from_digest(decision.digest(), uri="decision.json"),
        reviewed_at=signing.NOW.isoformat(),
    )
    return {
        "measurement": both.evidence.statement,
        "verdict": both.decision.statement,
        "review": review.about({"model": model}),
    }


@pytest.mark.parametrize("kind", ["measurement", "verdict", "review"])
def test_in_toto_takes_it_and_loses_nothing(kind: str) -> None:
    plain = every()[kind].to_plain()
    read = json_format.ParseDict(plain, statement_pb2.Statement())  # type: ignore[attr-defined]
    InToto.copy_from_pb(read).validate()
    again = json_format.MessageToDict(read)
    assert again["subject"] == plain["subject"]
    assert again["predicateType"] == plain["predicateType"]
    assert again["predicate"].keys() == plain["predicate"].keys()


@pytest.mark.parametrize("kind", ["measurement", "verdict", "review"])
def test_it_comes_back(kind: str) -> None:
    statement = every()[kind]
    assert Statement.from_json(statement.to_json()) == statement
    assert json.loads(statement.to_json()).keys() == {
        "_type", "subject", "predicateType", "predicate",
    }  # fmt: skip


def test_subjects_by_name() -> None:
    one, two = builders.digest("one"), builders.digest("two")
    statement = Statement(
        subject=resources({"a": one, "b/c": two}), predicate_type="t", predicate={"x": 1}
    )
    assert statement.digest_of("b/c") == two.hex
    assert statement.digest_of("c") is None
    assert statement.names(one)
    assert not statement.names(builders.digest("three"))


def test_a_name_stands_for_one_digest() -> None:
    twice = [{"name": "a", "digest": {"sha256": digit * 64}} for digit in "01"]
    plain = {**every()["verdict"].to_plain(), "subject": twice}
    with pytest.raises(EvidenceError, match="two subjects have one name"):
        Statement.from_json(json.dumps(plain))


def test_a_subject_of_another_algorithm_has_no_sha256() -> None:
    assert Resource(digests={"sha512": "0"}).sha256 is None
