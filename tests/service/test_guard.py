"""Guard: whoever points `champion` at what must not serve finds it back where it was."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from gate.errors import (
    ArtifactMissing,
    DigestMismatch,
    MismatchUnconfirmed,
    RegistryError,
    RegistryUnavailable,
    StorageError,
)
from gate.ledger.ledger import Ledger
from gate.ledger.maintenance import declare_addresses
from gate.registry.interface import Tag
from gate.registry.release import Release
from gate.service.champion_guard import guard_champion
from gate.service.submissions import process_reviews
from tests.ledger.rows import put, rows
from tests.registry.simulator import Watched
from tests.service.places import AUTOMATIC, REVIEWED, Place
from tests.storage.test_foreign import DEEP


@pytest.fixture
def place(tmp_path) -> Place:
    """Versions 1 and 2 were promoted; 2 serves."""
    made = Place(tmp_path)
    made.promote(1)
    made.promote(2)
    return made


def look(place: Place, *, policy=AUTOMATIC, thoroughly: bool = False):
    return [
        (t.outcome, t.version) for t in guard_champion(place.model(), policy, thoroughly=thoroughly)
    ]


def beside(name, change):
    """A record of version 3 was changed in the registry."""

    def spoil(place):
        records = place.stored("3").beside
        records[f"gate/{name}.json"] = change(place, records[f"gate/{name}.json"])

    return spoil


def other_bytes(place):
    place.stored("3").data += b"\0"


def rolled_back(place):
    """The line alone, without a tag."""
    about = place.model().history().approving_entry("2")
    place.model().write("rolled_back", "wrong", version="2", previous="3", about=about)


SPOILED = {
    "missing records": (lambda place: place.stored("3").beside.clear(), "no evidence.json"),
    "other bytes": (other_bytes, "has digest"),
    "exchanged evidence": (
        beside("evidence", lambda place, _: place.stored("1").beside["gate/evidence.json"]),
        "exchanged"),
    "edited evidence": (
        beside("evidence", lambda _, data: data.replace(b'"samples": 4', b'"samples": 5')),
        "exchanged"),
    "edited decision": (
        beside("decision", lambda _, data: data.replace(b'"PASS"', b'"FAIL"', 1)), "edited"),
    "nested evidence": (beside("evidence", lambda *_: DEEP), "nested 20000 deep"),
    "nested decision": (beside("decision", lambda *_: DEEP), "nested 20000 deep"),
    "rejected": (lambda place: place.tag("3", "rejected"), "rejected"),
    "rolled back": (rolled_back, "rolled back"),
    "not in the ledger": (
        lambda place: put(place.ledger.state, rows(place.ledger.state)[:2]),
        "the ledger has no entry"),
}  # fmt: skip


def third_by_hand(place, **release):
    """Version 3 passed in its time, served, and was followed by a return to 2 by hand."""
    place.promote(3, **release)
    place.point("2")
    look(place)
    assert place.champion == "2"


@pytest.mark.rows(4)
@pytest.mark.parametrize(("spoil", "words"), SPOILED.values(), ids=SPOILED)
def test_a_version_that_must_not_serve_is_taken_back(place, spoil, words):
    third_by_hand(place)
    spoil(place)
    place.point("3")
    assert look(place) == [("reverted", "2")]
    assert place.champion == "2"
    line = place.ledger.entries()[-1]
    assert (line.action, line.version, line.previous_version) == ("reverted", "2", "3")
    assert line.cause == "delivery 1"
    assert words in line.reason
    assert words in place.stored("3").tags[Tag.REVERTED]
    before = place.lines()
    assert look(place, thoroughly=True) == []
    assert place.lines() == before


@pytest.mark.parametrize("error", [MemoryError, RecursionError])
def test_a_version_that_can_not_be_read_is_taken_back(place, monkeypatch, error):
    third_by_hand(place)
    place.deployed("2")
    place.point("3")

    def fail(*_arguments, **_options):
        raise error

    monkeypatch.setattr("gate.registry.verify_release.load_records", fail)
    assert look(place) == [("reverted", "2")]
    assert error.__name__ in place.ledger.entries()[-1].reason


AGES = {"too old": (91, "91.0 days old"), "of the future": (-30, "from the future")}


@pytest.mark.parametrize(("days", "words"), AGES.values(), ids=list(AGES))
def test_evidence_that_the_promoter_let_pass(place, monkeypatch, days, words):
    """The promoter's clock, or its gate, is another."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Release, "age_problem", lambda *_, **__: None)
        place.promote(3, days=days)
    assert look(place, thoroughly=True) == [("reverted", "2")]
    assert words in place.ledger.entries()[-1].reason
    place.point("3")
    assert look(place) == [("reverted", "2")]


@pytest.mark.parametrize("deployed", [True, False])
def test_a_champion_may_grow_old(place, monkeypatch, deployed):
    if deployed:
        place.deployed("2")
    monkeypatch.setattr("gate.registry.verify_release.datetime", shifted(days=400))
    assert look(place, thoroughly=True) == []
    assert place.champion == "2"


def test_by_hand_only_what_is_young_enough_now(place, monkeypatch):
    place.deployed("1")
    place.point("1")
    monkeypatch.setattr("gate.registry.verify_release.datetime", shifted(days=400))
    assert look(place) == [("reverted", "2")]
    assert "400.0 days old" in place.ledger.entries()[-1].reason


def shifted(**ahead):
    """A clock that is ahead."""

    class Shifted(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(**ahead)

    return Shifted


@pytest.mark.parametrize("thoroughly", [True, False])
def test_a_tag_of_the_gate_without_a_line_takes_nothing_down(place, caplog, thoroughly):
    place.tag("2", "2026: by one editor", Tag.ROLLED_BACK)
    place.tag("2", "2026: by one editor", Tag.REVERTED)
    place.tag("2", "FAIL", Tag.VERDICT)
    for _ in range(3):
        assert look(place, thoroughly=thoroughly) == []
    assert place.champion == "2"
    assert [record.levelname for record in caplog.records] in (["WARNING"], [])


@pytest.mark.parametrize("thoroughly", [True, False])
def test_a_ledger_that_knows_nothing_of_the_model_touches_nothing(place, tmp_path, thoroughly):
    known, place.ledger = place.ledger, Ledger(tmp_path / "another.jsonl")
    with pytest.raises(RegistryError, match="--same-registry"):
        look(place, thoroughly=thoroughly)
    assert (place.champion, place.lines()) == ("2", [])
    place.ledger, place.registry.identity = known, "http://Mlflow:80/"
    with pytest.raises(RegistryError):
        look(place)
    declare_addresses(place.ledger, "http://mlflow", ["simulator"])
    assert look(place, thoroughly=True) == []


def away(registry, *numbers, error=ArtifactMissing("its store is away")):  # noqa: B008
    """The files of these versions can't be had now."""
    download = registry.download

    def missing(name, number, folder, **options):
        if number in numbers:
            raise error
        return download(name, number, folder, **options)

    registry.download = missing


@pytest.mark.parametrize("error", [RegistryError("it is a pipe"), MismatchUnconfirmed("a page")])
def test_what_an_editor_s_files_make_of_a_download_excuses_nothing(place, error):
    place.point("1")
    away(place.registry, "1", error=error)
    assert look(place) == [("reverted", "2")]
    assert str(error) in place.ledger.entries()[-1].reason


def test_a_name_that_is_no_text_is_told_all_the_same(place):
    place.point("1")
    away(place.registry, "1", error=DigestMismatch("a file called a\udcff\0.onnx"))
    assert look(place) == [("reverted", "2")]
    assert r"a\udcff\0.onnx" in place.ledger.entries()[-1].reason


def test_without_a_temporary_folder_what_was_not_reviewed_does_not_serve(tmp_path, monkeypatch):
    place = Place(tmp_path, REVIEWED)
    place.promote(1)
    place.tag("1", "approved")
    list(process_reviews(place.model(), REVIEWED))
    place.promote(2)
    place.point("2")
    with monkeypatch.context() as broken:
        broken.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        assert look(place, policy=REVIEWED) == [("reverted", None)]
        with pytest.raises(StorageError, match="temporary folder"):
            look(place, policy=REVIEWED)
    assert look(place, policy=REVIEWED) == [("restored", "1")]


def test_a_version_that_nothing_vouches_for_is_refused_without_a_download(place):
    place.point(place.hand_made(7))
    watched = Watched(place.registry)
    numbers = []
    download = place.registry.download
    place.registry.download = lambda name, number, folder, **_: (
        numbers.append(number) or download(name, number, folder)
    )
    model = replace(place.model(), registry=watched)
    assert [t.version for t in guard_champion(model, AUTOMATIC, thoroughly=True)] == ["2"]
    assert numbers == ["2"]


def test_a_server_that_is_away_is_no_verdict(place):
    watched = Watched(place.registry)
    place.point(place.hand_made(7))

    def away(call: str, _: int) -> None:
        if call == "version":
            raise RegistryUnavailable("no answer")

    watched.before = away
    place.registry = watched
    before = place.lines()
    with pytest.raises(RegistryUnavailable):
        look(place)
    assert place.lines() == before
