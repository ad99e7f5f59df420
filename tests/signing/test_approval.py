"""A reviewer's word: on this model, this version, this decision."""

from __future__ import annotations

import pytest

from gate.errors import EvidenceError
from gate.records.layout import DECISION
from gate.signing.predicates import APPROVAL_TYPE, Approval
from gate.signing.statement import Resource
from tests import builders

APPROVAL = Approval(
    word="approved",
    resource_uri="https://mlflow.example.org#/models/digits",
    version="3",
    decision=Resource.from_digest(builders.digest("decision"), uri=DECISION),
    reviewed_at="2026-11-22T12:00:00+00:00",
)


def test_it_comes_back_and_names_what_was_reviewed() -> None:
    assert Approval.from_json(APPROVAL.to_json()) == APPROVAL
    statement = APPROVAL.about({"model": builders.digest("model")})
    assert statement.predicate_type == APPROVAL_TYPE
    assert statement.digest_of("model") == builders.digest("model").hex
    assert statement.predicate == {
        "word": "approved",
        "resourceUri": "https://mlflow.example.org#/models/digits",
        "version": "3",
        "decision": {"uri": "decision.json", "digest": {"sha256": builders.digest("decision").hex}},
        "reviewedAt": "2026-11-22T12:00:00+00:00",
    }


@pytest.mark.parametrize("word", ["APPROVED", "yes", ""])
def test_there_are_two_words(word: str) -> None:
    text = APPROVAL.to_json().replace('"approved"', f'"{word}"')
    with pytest.raises(EvidenceError):
        Approval.from_json(text)
