"""The review tag ignores case and whitespace, and a rejection is never missed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.errors import RegistryError
from gate.policy.sections import ReviewTag
from gate.registry import reviews
from gate.registry.eligibility import veto
from gate.registry.interface import CANDIDATE, CHAMPION, PREVIOUS, Tag
from gate.registry.promotion import rollback
from gate.registry.registered_model import RegisteredModel
from gate.registry.reviews import ReviewSettings
from gate.service.champion_guard import guard_champion
from gate.service.submissions import process_reviews
from tests import builders
from tests.registry.promoting import promote
from tests.registry.releases import NAME, release
from tests.registry.simulator import Simulator

POLICY = builders.policy()
TAG = ReviewTag()
REJECTIONS = [
    "rejected",
    "Rejected",
    " REJECTED\n",
    "\u00a0rejected\u200b",
    "rejected!",
    "\uff32ejected",
]


def test_no_tag_is_neither_approval_nor_rejection():
    assert not reviews.approves({}, TAG)
    assert not reviews.rejects({}, TAG)
    assert reviews.correction({}, TAG) is None


@given(st.text())
def test_any_other_text_gets_a_correction(text):
    tags = {Tag.REVIEW: text}
    approved, rejected = reviews.approves(tags, TAG), reviews.rejects(tags, TAG)
    assert not (approved and rejected)
    assert (reviews.correction(tags, TAG) is None) == (approved or rejected)
    assert approved == (text.strip().casefold() == "approved")


CUSTOM = ReviewTag(name="Approval_Check", approved="Approved", rejected="No-Go")
WORDS: dict[str, tuple[dict[str, str], str]] = {
    "the configured yes": ({"approval_check": " APPROVED "}, "yes"),
    "the configured no": ({"Approval_Check": "no go"}, "no"),
    "the default no in the configured tag": ({"Approval_Check": "Rejected."}, "no"),
    "the default no": ({"gate.review": "rejected"}, "no"),
    "the default no in other letters": ({"Gate.Review": "Rejected"}, "no"),
    "the configured no in the default tag": ({"gate.review": "NoGo"}, "no"),
    "the default yes is none": (
        {"gate.review": "approved"},
        'write Approved or No-Go into the tag Approval_Check; seen: "approved" in gate.review'),
    "both": ({"Approval_Check": "Approved", "gate.review": "rejected"}, "no"),
    "two of one name": ({"Approval_Check": "Approved", "approval_check": "no-go"}, "no"),
    "no word": ({"APPROVAL_CHECK": "ok"}, 'write Approved or No-Go; seen: "ok"'),
    "another tag": ({"Approval": "Approved", "gate.review_comment": "rejected"}, "nothing"),
}  # fmt: skip


@pytest.mark.parametrize(("tags", "expected"), WORDS.values(), ids=list(WORDS))
def test_configured_tag_and_values(tags, expected):
    approved, rejected = reviews.approves(tags, CUSTOM), reviews.rejects(tags, CUSTOM)
    words = {(True, False): "yes", (False, True): "no"}
    assert (
        words.get((approved, rejected), reviews.correction(tags, CUSTOM) or "nothing") == expected
    )
    assert reviews.has_review(tags, CUSTOM) == (approved or rejected)


TAGS = [(Tag.REVIEW, word, TAG) for word in REJECTIONS]
TAGS += [
    (key, word, CUSTOM)
    for key in ("gate.review", "APPROVAL_CHECK")
    for word in ("rejected", "nogo")
]


@pytest.mark.rows(3)
@pytest.mark.parametrize("tag_value", TAGS)
def test_rejection_blocks_promotion_rollback_and_serving(ledger, first, second, third, tag_value):
    key, word, tag = tag_value
    policy = builders.policy(review_tag=tag)
    registry = Simulator()
    for each in (first, second):
        promote(registry, release(each.onnx_path, policy=policy), policy=policy, ledger=ledger)
    model = RegisteredModel(registry, ledger, NAME, reviews=ReviewSettings.from_policy(policy))
    for number in ("1", "2"):
        registry.set_tag(NAME, number, key=key, value=word)
        problem = veto(model, number, history=model.history()).problem
        assert problem == f"a reviewer rejected version {number}"
    again = release(first.onnx_path, policy=policy)
    assert promote(registry, again, policy=policy, ledger=ledger).outcome == "refused"
    new = release(third.onnx_path, policy=policy)
    promote(registry, new, policy=policy, ledger=ledger)
    assert registry.aliases[PREVIOUS] != "2"
    registry.aliases[CHAMPION] = "2"
    (result,) = guard_champion(model, policy, thoroughly=False)
    assert (result.outcome, registry.aliases[CHAMPION]) == ("reverted", "3")
    assert ("rejected", "2") in [(e.action, e.version) for e in ledger.entries()]
    with pytest.raises(RegistryError, match="can't be rolled back to version 1: a reviewer reje"):
        rollback(
            registry,
            NAME,
            ledger=ledger,
            reason="worse",
            reviews=ReviewSettings.from_policy(policy),
        )


def test_guard_entry_contains_the_review_comment(ledger, first, second):
    registry = Simulator()
    for each in (first, second):
        promote(registry, each, ledger=ledger)
    registry.set_tag(NAME, "2", key=Tag.REVIEW_COMMENT, value="sevens\nread as ones")
    registry.set_tag(NAME, "2", key=Tag.REVIEW, value="Rejected")
    guard_champion(RegisteredModel(registry, ledger, NAME), POLICY, thoroughly=False)
    (line,) = [e for e in ledger.entries() if e.action == "rejected"]
    assert line.comment == "sevens read as ones"
    assert 'sevens read as ones" (gate.review_comment; MLflow does not say who)' in line.reason
    assert 'because "sevens read as ones"' in registry.versions[1].description
    assert registry.aliases[CHAMPION] == "1"
    assert CANDIDATE not in registry.aliases
    assert list(process_reviews(RegisteredModel(registry, ledger, NAME), POLICY)) == []
