"""The journal keeps one move of one model; files of older versions stay readable."""

from __future__ import annotations

import json
import re

import pytest

from gate.deploy.store import ModelStore
from gate.errors import EvidenceError
from gate.ledger.entry import LedgerEntry
from gate.ledger.journal import Journal
from gate.registry import alias
from gate.registry.interface import CHAMPION, PREVIOUS
from gate.registry.promotion import rollback
from gate.registry.registered_model import RegisteredModel
from gate.service.monitoring import Failed
from gate.service.reconciler import Reconciler
from gate.storage.digest import Digest
from tests.ledger.rows import notes, spoil_note
from tests.registry.simulator import Crash, CrashingLedger
from tests.service.places import Place

ENTRY = LedgerEntry(
    action="promoted", registry="here", model="digits", version="2", previous_version="1",
    reason="because",
)  # fmt: skip


@pytest.fixture
def journal(ledger) -> Journal:
    return Journal(ledger, model="digits", registry="here")


@pytest.mark.parametrize("previous", [None, "7"])
def test_a_move_is_kept_until_it_ends(journal, previous):
    assert journal.pending() is None
    move = journal.begin(ENTRY, previous=previous)
    assert journal.pending() == move
    assert (move.seen, move.target, move.previous) == ("1", "2", previous)
    assert move.entry == ENTRY.model_copy(update={"operation": move.operation})
    journal.end()
    journal.end()
    assert journal.pending() is None


def test_every_move_has_an_id_of_its_own(journal):
    assert journal.begin(ENTRY).operation != journal.begin(ENTRY).operation


@pytest.mark.parametrize(("model", "registry"), [("letters", "here"), ("digits", "there")])
def test_moves_of_other_models_and_registries_are_others(journal, ledger, model, registry):
    journal.begin(ENTRY)
    assert Journal(ledger, model=model, registry=registry).pending() is None


SPOILED = ["", "{", "{}", "[]", "null", "\ufffd", "[" * 100_000]


@pytest.mark.parametrize("text", SPOILED, ids=range(len(SPOILED)))
def test_a_damaged_journal_is_named(journal, ledger, text):
    spoil_note(ledger.state, journal.name, text)
    with pytest.raises(EvidenceError, match=re.escape(f"the journal {journal.place} is damaged")):
        journal.pending()


@pytest.mark.parametrize("text", SPOILED, ids=range(len(SPOILED)))
def test_a_damaged_journal_is_set_aside_once(tmp_path, text):
    place = Place(tmp_path)
    place.promote(1)
    journal = Journal(place.ledger, model="digits", registry="simulator")
    spoil_note(place.ledger.state, journal.name, text)
    for _ in range(2):
        with alias.model_lock(place.model()) as finished:
            assert finished is None
    ((aside, kept),) = notes(place.ledger.state).items()
    assert "damaged" in aside
    assert kept == text
    line = place.ledger.entries()[-1]
    assert place.lines() == [("promoted", "1"), ("conflict", "1")]
    assert journal.place in line.reason
    assert aside in line.reason
    assert "Nobody knows" in line.reason


@pytest.mark.parametrize("good", [True, False])
def test_a_move_whose_journal_was_damaged_is_judged_like_one_by_hand(tmp_path, good):
    """The alias was moved, the line was not written, and the journal can't be read."""
    place = Place(tmp_path)
    for seed in (1, 2):
        place.promote(seed)
    store = ModelStore(tmp_path / "store")
    look = Reconciler(place.registry, place.ledger, place.policy, store=store)
    look("digits", cause="timer")
    target = "1" if good else place.hand_made(5)
    entry = place.model().entry("promoted", "PASS", version=target, previous="2")
    crashing = RegisteredModel(
        place.registry, CrashingLedger(place.ledger.state, "before"), "digits"
    )
    with pytest.raises(Crash):
        alias.move_alias(crashing, entry)
    assert place.champion == target
    name = Journal(place.ledger, model="digits", registry="simulator").name
    spoil_note(place.ledger.state, name, notes(place.ledger.state)[name][:40])
    done = look("digits", cause="timer")
    assert not [one for one in done if isinstance(one, Failed)]
    assert place.champion == ("1" if good else "2")
    assert ("conflict", target) in place.lines()
    live = store.live("digits")
    assert live is not None
    wanted = Digest.of_bytes(place.stored("1" if good else "2").data)
    assert live.slots["exact"].sha256 == wanted
    assert look("digits", cause="timer") == []


def test_a_damaged_journal_of_one_model_is_none_of_another_s(tmp_path):
    place = Place(tmp_path)
    place.promote(1)
    name = Journal(place.ledger, model="letters", registry="simulator").name
    spoil_note(place.ledger.state, name, "{")
    with alias.model_lock(place.model()):
        assert place.lines() == [("promoted", "1")]
    assert notes(place.ledger.state) == {name: "{"}


def test_a_rollback_that_an_older_version_began_is_finished(tmp_path):
    """Its journal says nothing of `previous`, nor of where the ledger ended."""
    place = Place(tmp_path)
    place.promote(1)
    place.promote(2)
    journal = Journal(place.ledger, model="digits", registry="simulator")
    crashing = RegisteredModel(
        place.registry, CrashingLedger(place.ledger.state, "before"), "digits"
    )
    with pytest.raises(Crash):
        rollback(crashing.registry, "digits", ledger=crashing.ledger, reason="worse")
    fields = json.loads(notes(place.ledger.state)[journal.name])
    assert fields.pop("previous") == "2"
    assert (fields.pop("lines"), fields.pop("head")) == (2, str(place.ledger.digest(2)))
    spoil_note(place.ledger.state, journal.name, json.dumps(fields))
    done = rollback(place.registry, "digits", ledger=place.ledger, reason="again")
    assert (done.version, done.previous_version, done.reason) == ("1", "2", "worse")
    assert place.registry.aliases[CHAMPION] == "1"
    assert place.registry.aliases[PREVIOUS] == "2"
    assert place.lines()[2:] == [("rolled_back", "1")]
