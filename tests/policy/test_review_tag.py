"""The reviewers' tag has a configurable name, and a rejection is never read as an approval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gate.errors import PolicyError
from gate.policy.policy import Policy
from gate.policy.sections import REVIEW_TAG, ReviewTag
from gate.registry.interface import Tag
from tests import builders

CUSTOM = ReviewTag(name="Approval_Check", approved="Approved", rejected="No-Go")

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "the digest's": ({"name": "gate.sha256"}, "is reserved"),
    "in other letters": ({"name": " Gate.SHA256"}, "is reserved"),
    "a statement's": ({"name": "gate.review_statement.0123"}, "is reserved"),
    "the comment's": ({"name": Tag.REVIEW_COMMENT}, "is reserved"),
    "any of ours": ({"name": "gate.approval"}, "is reserved"),
    "MLflow's": ({"name": "mlflow.note"}, "is reserved"),
    "empty": ({"name": ""}, "pattern"),
    "a space": ({"name": " "}, "pattern"),
    "what MLflow refuses": ({"name": "a,b"}, "pattern"),
    "too long": ({"name": "x" * 251}, "250"),
    "no word": ({"approved": ""}, "at least 1 character"),
    "no letter": ({"rejected": "-1"}, "each contain a letter"),
    "one word": ({"approved": "done", "rejected": "Done!"}, "with different letters"),
    "a yes that is a no": ({"approved": "Rejected", "rejected": "no"}, "with different letters"),
    "a no that is a yes": ({"approved": "yes", "rejected": "approved"}, "with different letters"),
    "unknown": ({"value": "yes"}, "Extra inputs"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "text"), REFUSED.values(), ids=list(REFUSED))
def test_invalid_review_tag_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        ReviewTag(**fields)


@pytest.mark.parametrize("name", ["gate.review", "Gate.Review", "approval", "Approval check:1/2"])
def test_reserved_tag_name_is_refused(name: str) -> None:
    assert ReviewTag(name=name).is_named(f" {name.upper()} ")


def test_each_tag_of_the_gate_is_reserved() -> None:
    ours = {value for key, value in vars(Tag).items() if key.isupper()} - {REVIEW_TAG}
    assert len(ours) > 10
    for name in ours:
        with pytest.raises(ValidationError):
            ReviewTag(name=name)


def test_rejection_is_recognized_by_both_names_and_words() -> None:
    assert [CUSTOM.may_reject(key) for key in ("approval_CHECK", "gate.review", "other")] == [
        True, True, False,
    ]  # fmt: skip
    for word in ("rejected", "REJECTED!", "no-go", "No Go", "\uff2eo\u200bgo"):
        assert CUSTOM.is_no(word)
    assert not CUSTOM.is_no("approved")


@given(st.text(min_size=1), st.text(min_size=1), st.text())
def test_value_is_never_approved_and_rejected(approved: str, rejected: str, value: str) -> None:
    try:
        tag = ReviewTag(approved=approved, rejected=rejected)
    except ValidationError:
        return
    for each in (value, approved, rejected, "rejected", "approved"):
        assert not (tag.is_yes(each) and tag.is_no(each))
    assert tag.is_yes(approved)
    assert tag.is_no(rejected)
    assert tag.is_no("rejected")


def test_default_review_tag_does_not_change_the_digest(tmp_path: Path) -> None:
    policy = builders.policy()
    assert "review_tag" not in policy.to_plain()
    assert policy.digest() == builders.policy(review_tag=ReviewTag()).digest()
    assert policy.digest() != builders.policy(review_tag=CUSTOM).digest()
    path = tmp_path / "policy.yaml"
    path.write_text(builders.policy(review="signed", review_tag=CUSTOM).to_json())
    assert Policy.from_file(path).review_tag == CUSTOM


def test_review_tag_in_twin_is_refused(tmp_path: Path) -> None:
    twin = Policy.quantized().to_plain() | {"review_tag": CUSTOM.to_plain()}
    path = tmp_path / "policy.yaml"
    plain = Policy.default(task="classification").to_plain() | {"twin": twin}
    path.write_text(json.dumps(plain))
    with pytest.raises(PolicyError, match="review_tag, max_age_days and incumbent apply to both"):
        Policy.from_file(path)
