"""A reviewer's word: forgiving about case and space, and a no is never missed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.errors import RegistryError
from gate.registry.may_serve import veto
from gate.registry.page import reviewer
from gate.registry.port import CANDIDATE, CHAMPION, PREVIOUS, Tag
from gate.registry.promotion import promote, rollback
from gate.registry.registered_model import RegisteredModel
from gate.service.guard import guard
from gate.service.review import review
from tests import builders
from tests.registry.releases import NAME
from tests.registry.simulator import Simulator

POLICY = builders.policy()
NOES = ["rejected", "Rejected", " REJECTED\n", "\u00a0rejected\u200b", "rejected!", "\uff32ejected"]


def test_nothing_is_neither():
    assert not reviewer.approves({})
    assert not reviewer.rejects({})
    assert reviewer.correction({}) is None


@given(st.text())
def test_no_word_is_both_and_what_is_neither_is_answered(text):
    tags = {Tag.REVIEW: text}
    yes, no = reviewer.approves(tags), reviewer.rejects(tags)
    assert not (yes and no)
    assert (reviewer.correction(tags) is None) == (yes or no)
    assert yes == (text.strip().casefold() == "approved")


@pytest.mark.parametrize("word", NOES)
def test_a_no_in_any_spelling_is_heard_wherever_a_version_may_come_to_serve(
    ledger, first, second, third, word
):
    registry = Simulator()
    for each in (first, second):
        promote(registry, each, policy=POLICY, ledger=ledger)
    model = RegisteredModel(registry, ledger, NAME)
    for number in ("1", "2"):
        registry.set_tag(NAME, number, key=Tag.REVIEW, value=word)
        problem = veto(model, number, history=model.history()).problem
        assert problem == f"a reviewer rejected version {number}"
    for each in (first, second):
        assert promote(registry, each, policy=POLICY, ledger=ledger).outcome == "refused"
    promote(registry, third, policy=POLICY, ledger=ledger)
    assert registry.aliases[PREVIOUS] != "2"
    registry.aliases[CHAMPION] = "2"
    (taken,) = guard(model, POLICY, thoroughly=False)
    assert (taken.outcome, registry.aliases[CHAMPION]) == ("reverted", "3")
    assert ("rejected", "2") in [(e.action, e.version) for e in ledger.entries()]
    with pytest.raises(RegistryError, match="can't be rolled back to version 1: a reviewer reje"):
        rollback(registry, NAME, ledger=ledger, reason="worse")


def test_the_guard_s_line_has_the_comment_too(ledger, first, second):
    registry = Simulator()
    for each in (first, second):
        promote(registry, each, policy=POLICY, ledger=ledger)
    registry.set_tag(NAME, "2", key=Tag.REVIEW_COMMENT, value="sevens\nread as ones")
    registry.set_tag(NAME, "2", key=Tag.REVIEW, value="Rejected")
    guard(RegisteredModel(registry, ledger, NAME), POLICY, thoroughly=False)
    (line,) = [e for e in ledger.entries() if e.action == "rejected"]
    assert line.comment == "sevens read as ones"
    assert 'sevens read as ones" (gate.review_comment; MLflow does not say who)' in line.reason
    assert 'because "sevens read as ones"' in registry.versions[1].description
    assert registry.aliases[CHAMPION] == "1"
    assert CANDIDATE not in registry.aliases
    assert list(review(RegisteredModel(registry, ledger, NAME), POLICY)) == []
