"""The journal keeps one move of one model; files of older versions stay readable."""

from __future__ import annotations

import json

import pytest

from gate.errors import EvidenceError
from gate.registry import champion
from gate.registry.journal import Journal
from gate.registry.ledger import LedgerEntry
from gate.registry.port import CHAMPION, PREVIOUS
from gate.registry.promotion import rollback
from gate.registry.registered_model import RegisteredModel
from tests.registry.simulator import Crash, CrashingLedger
from tests.service.places import Place

ENTRY = LedgerEntry(
    action="promoted", registry="here", model="digits", version="2", previous_version="1",
    reason="because",
)  # fmt: skip


@pytest.fixture
def journal(ledger) -> Journal:
    ledger.path.parent.mkdir(parents=True)
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


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "null"])
def test_a_spoiled_journal_is_an_error(tmp_path, text):
    place = Place(tmp_path)
    place.promote(1)
    Journal(place.ledger, model="digits", registry="simulator").path.write_text(text)
    with pytest.raises(EvidenceError), champion.alone(place.model()):
        pass


def test_a_rollback_that_an_older_version_began_is_finished(tmp_path):
    """Its journal says nothing of `previous`."""
    place = Place(tmp_path)
    place.promote(1)
    place.promote(2)
    journal = Journal(place.ledger, model="digits", registry="simulator")
    crashing = RegisteredModel(
        place.registry, CrashingLedger(place.ledger.path, "before"), "digits"
    )
    with pytest.raises(Crash):
        rollback(crashing.registry, "digits", ledger=crashing.ledger, reason="worse")
    fields = json.loads(journal.path.read_text())
    assert fields.pop("previous") == "2"
    journal.path.write_text(json.dumps(fields))
    done = rollback(place.registry, "digits", ledger=place.ledger, reason="again")
    assert (done.version, done.previous_version, done.reason) == ("1", "2", "worse")
    assert place.registry.aliases[CHAMPION] == "1"
    assert place.registry.aliases[PREVIOUS] == "2"
    assert place.lines()[2:] == [("rolled_back", "1")]
