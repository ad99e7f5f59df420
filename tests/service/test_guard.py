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
    RegistryDenied,
    RegistryError,
    RegistryUnavailable,
    ResourceGone,
    StorageError,
)
from gate.ledger.ledger import Ledger
from gate.ledger.maintenance import declare_addresses
from gate.registry.interface import Tag
from gate.registry.promotion import rollback
from gate.registry.release import Release
from gate.service.champion_guard import guard_champion
from gate.service.submissions import process_reviews
from tests import builders
from tests.ledger.rows import put, rows
from tests.registry.releases import NAME
from tests.registry.simulator import Watched
from tests.service.places import AUTOMATIC, PATIENT, REVIEWED, STRICT, Place
from tests.storage.test_foreign import DEEP

OTHER_POLICY = builders.policy(confidence=0.9)


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


@pytest.mark.parametrize("thoroughly", [True, False])
def test_what_the_gate_promoted_stays(place, thoroughly):
    assert look(place, thoroughly=thoroughly) == []
    assert place.champion == "2"


def test_without_champion_there_is_nothing_to_guard(tmp_path, place):
    assert look(Place(tmp_path / "empty")) == []
    place.registry.aliases.pop("champion")
    assert look(place) == []


def missing_records(place):
    place.stored("3").beside.clear()


def other_bytes(place):
    place.stored("3").data += b"\0"


def exchanged_evidence(place):
    beside = place.stored("3").beside
    beside["gate/evidence.json"] = place.stored("1").beside["gate/evidence.json"]


def edited_evidence(place):
    beside = place.stored("3").beside
    beside["gate/evidence.json"] = beside["gate/evidence.json"].replace(
        b'"samples": 4', b'"samples": 5'
    )


def edited_decision(place):
    beside = place.stored("3").beside
    beside["gate/decision.json"] = beside["gate/decision.json"].replace(b'"PASS"', b'"FAIL"', 1)


def nested_evidence(place):
    place.stored("3").beside["gate/evidence.json"] = DEEP


def nested_decision(place):
    place.stored("3").beside["gate/decision.json"] = DEEP


def rejected(place):
    place.tag("3", "rejected")


def rolled_back(place):
    """The line alone, without a tag."""
    about = place.model().history().approving_entry("2")
    place.model().write("rolled_back", "wrong", version="2", previous="3", about=about)


def unknown(place):
    put(place.ledger.state, rows(place.ledger.state)[:2])


SPOILED = {
    "missing records": (missing_records, "no evidence.json"),
    "other bytes": (other_bytes, "has digest"),
    "exchanged evidence": (exchanged_evidence, "exchanged"),
    "edited evidence": (edited_evidence, "exchanged"),
    "edited decision": (edited_decision, "edited"),
    "nested evidence": (nested_evidence, "nested 20000 deep"),
    "nested decision": (nested_decision, "nested 20000 deep"),
    "rejected": (rejected, "rejected"),
    "rolled back": (rolled_back, "rolled back"),
    "not in the ledger": (unknown, "no line of the ledger"),
}


def third_by_hand(place, **release):
    """Version 3 passed in its time, served, and was followed by a return to 2 by hand."""
    place.promote(3, **release)
    place.point("2")
    look(place)
    assert place.champion == "2"


@pytest.mark.rows(4)
@pytest.mark.parametrize("spoil", [spoil for spoil, _ in SPOILED.values()], ids=list(SPOILED))
def test_a_version_that_must_not_serve_is_taken_back(place, spoil):
    words = next(text for one, text in SPOILED.values() if one is spoil)
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

    monkeypatch.setattr("gate.registry.verify_release.Records.load", fail)
    assert look(place) == [("reverted", "2")]
    assert error.__name__ in place.ledger.entries()[-1].reason


AGES = {"too old": (91, "91.0 days old"), "of the future": (-30, "of the future")}


@pytest.mark.parametrize(("days", "words"), AGES.values(), ids=list(AGES))
def test_evidence_that_the_promoter_let_pass(place, monkeypatch, days, words):
    """The promoter's clock, or its gate, is another."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Release, "untimely", lambda *_, **__: None)
        place.promote(3, days=days)
    assert look(place, thoroughly=True) == [("reverted", "2")]
    assert words in place.ledger.entries()[-1].reason
    place.point("3")
    assert look(place) == [("reverted", "2")]


def test_the_promoter_s_patience_is_not_ours(place):
    assert place.promote(3, days=200, policy=PATIENT).outcome == "promoted"
    assert look(place, thoroughly=True) == [("reverted", "2")]
    reason = place.ledger.entries()[-1].reason
    assert "200.0 days old, the policy allows 90 (max_age_days)" in reason


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


@pytest.mark.parametrize("by_hand", [True, False])
def test_what_passed_by_another_policy_is_decided_anew(place, by_hand):
    """Also where it does not differ in anything that counts here."""
    if by_hand:
        place.point("1")
    assert look(place, policy=OTHER_POLICY, thoroughly=True) == [("accepted", "1")] * by_hand


@pytest.mark.parametrize("by_hand", [True, False])
def test_what_passed_by_a_weaker_policy_is_refused_with_the_check(place, by_hand):
    place.deployed("1")
    place.promote(3)
    if by_hand:
        place.deployed("3")
        place.point("2")
        look(place)
        place.point("3")
    assert look(place, policy=STRICT, thoroughly=True) == [("reverted", "1")]
    reason = place.ledger.entries()[-1].reason
    assert "judged by another policy" in reason
    assert "400 samples" in reason
    assert "500" in reason


def test_nothing_that_passed_by_a_weaker_policy_is_gone_back_to(place):
    """Versions 1 and 2 were not deployed here: the service never judged them."""
    assert look(place, policy=STRICT, thoroughly=True) == [("reverted", None)]
    assert place.champion is None


def test_a_policy_that_changed_takes_nothing_out_of_service(place):
    place.deployed("2")
    assert look(place, policy=STRICT, thoroughly=True) == []
    assert place.champion == "2"


def test_what_waits_again_may_be_gone_back_to(place):
    """It was deployed by the policy of its day; that it was handed in again takes that from nobody."""
    place.deployed("1")
    place.model().write(
        "passed", "waits", version="1", about=place.model().history().approving_entry("1")
    )
    place.point(place.hand_made(7))
    place.stored("2").data += b"x"
    assert look(place, policy=REVIEWED) == [("reverted", "1")]


def test_a_version_that_is_promoted_again_is_judged_again(place):
    place.deployed("1")
    place.deployed("2")
    place.promote(1)
    assert look(place, policy=STRICT, thoroughly=True) == [("reverted", "2")]


def test_the_service_s_review_is_not_undercut(place):
    """The promoter's policy says automatic, the service's required."""
    place.deployed("1")
    assert look(place, policy=REVIEWED, thoroughly=True) == [("reverted", "1")]
    assert place.lines()[-2:] == [("passed", "2"), ("reverted", "1")]
    assert "waits for review" in place.ledger.entries()[-1].reason
    assert look(place, policy=REVIEWED, thoroughly=True) == []
    place.point("2")
    assert look(place, policy=REVIEWED) == [("reverted", "1")]
    place.tag("2", "approved")
    (taken,) = process_reviews(place.model(), REVIEWED)
    assert (taken.kind, taken.outcome) == ("review", "promoted")
    assert look(place, policy=REVIEWED, thoroughly=True) == []
    assert place.champion == "2"


@pytest.mark.parametrize("thoroughly", [True, False])
def test_a_tag_of_the_gate_without_a_line_takes_nothing_down(place, caplog, thoroughly):
    place.tag("2", "2026: by one editor", Tag.ROLLED_BACK)
    place.tag("2", "2026: by one editor", Tag.REVERTED)
    place.tag("2", "FAIL", Tag.VERDICT)
    for _ in range(3):
        assert look(place, thoroughly=thoroughly) == []
    assert place.champion == "2"
    assert [record.levelname for record in caplog.records] in (["WARNING"], [])


def test_a_rolled_back_version_stays_out_when_its_tag_is_deleted(place):
    rollback(place.registry, NAME, ledger=place.ledger, reason="worse")
    place.stored("2").tags.clear()
    place.point("2")
    assert look(place) == [("reverted", "1")]
    assert "rolled back" in place.ledger.entries()[-1].reason
    assert "worse" in place.ledger.entries()[-1].reason


def test_a_good_version_may_be_chosen_by_hand(place):
    place.point("1")
    assert look(place) == [("accepted", "1")]
    assert place.lines()[-1] == ("promoted", "1")
    assert look(place) == []


def test_a_version_without_the_gate_is_taken_back(place):
    place.point(place.hand_made(7))
    assert look(place) == [("reverted", "2")]


def test_a_second_time_is_a_second_line(place):
    number = place.hand_made(7)
    for _ in range(2):
        place.point(number)
        assert look(place) == [("reverted", "2")]
    assert place.lines()[-2:] == [("reverted", "2")] * 2


def test_where_nothing_good_is_left_nothing_serves(tmp_path):
    place = Place(tmp_path, REVIEWED)
    place.promote(1)
    place.point(place.hand_made(7))
    assert look(place, policy=REVIEWED) == [("reverted", None)]
    assert place.champion is None
    assert "was taken away" in place.ledger.entries()[-1].reason


@pytest.mark.parametrize("thoroughly", [True, False])
def test_a_ledger_that_knows_nothing_of_the_model_touches_nothing(place, tmp_path, thoroughly):
    place.ledger = Ledger(tmp_path / "another.jsonl")
    with pytest.raises(RegistryError, match="--same-registry"):
        look(place, thoroughly=thoroughly)
    assert place.champion == "2"
    assert place.lines() == []


def test_the_same_registry_under_another_address(place):
    place.registry.identity = "http://Mlflow:80/"
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


def test_a_store_that_is_away_for_a_while_condemns_nothing(place):
    away(place.registry, "1", "2")
    before = place.lines()
    with pytest.raises(ArtifactMissing):
        look(place, thoroughly=True)
    assert (place.champion, place.lines()) == ("2", before)
    del place.registry.download
    assert look(place, thoroughly=True) == []


def test_what_somebody_pointed_at_has_to_be_there(place):
    place.point("1")
    away(place.registry, "1")
    assert look(place) == [("reverted", "2")]


@pytest.mark.parametrize("error", [RegistryError("it is a pipe"), MismatchUnconfirmed("a page")])
def test_what_an_editor_s_files_make_of_a_download_excuses_nothing(place, error):
    place.point("1")
    away(place.registry, "1", error=error)
    assert look(place) == [("reverted", "2")]
    assert str(error) in place.ledger.entries()[-1].reason


def test_one_version_out_of_reach_does_not_hide_an_older_one(place):
    """Of the name of a file MLflow's error is made, in which `timed out` may stand."""
    place.promote(4)
    place.point(place.hand_made(7))
    away(place.registry, "3", error=RegistryUnavailable("timed out"))
    assert look(place) == [("reverted", "2")]


def test_a_name_that_is_no_text_is_told_all_the_same(place):
    place.point("1")
    away(place.registry, "1", error=DigestMismatch("a file called a\udcff\0.onnx"))
    assert look(place) == [("reverted", "2")]
    assert r"a\udcff\0.onnx" in place.ledger.entries()[-1].reason


WEATHER = [
    ArtifactMissing("its store is away"),
    RegistryUnavailable("no answer of the store"),
    StorageError("the temporary folder is full"),
    RegistryDenied("for a while"),
]


@pytest.mark.parametrize("error", WEATHER, ids=lambda error: type(error).__name__)
def test_while_no_other_can_be_proven_nothing_serves_and_then_it_comes_back(place, error):
    bad = place.hand_made(7)
    place.point(bad)
    away(place.registry, "1", "2", error=error)
    assert look(place) == [("reverted", None)]
    assert place.champion is None
    line = place.ledger.entries()[-1]
    assert (line.action, line.version, line.previous_version) == ("reverted", None, bad)
    assert str(error) in line.reason
    before = place.lines()
    for _ in range(2):
        with pytest.raises(type(error)):
            look(place)
    assert (place.champion, place.lines()) == (None, before)
    del place.registry.download
    assert look(place) == [("restored", "2")]
    assert place.champion == "2"
    assert look(place, thoroughly=True) == []
    rolled_back = rollback(place.registry, NAME, ledger=place.ledger, reason="worse")
    assert rolled_back.version == "1"


def test_what_comes_back_passes_by_our_policy_or_was_deployed(place):
    place.point(place.hand_made(7))
    away(place.registry, "1", "2")
    assert look(place, policy=STRICT) == [("reverted", None)]
    del place.registry.download
    assert look(place, policy=STRICT) == []
    place.deployed("1")
    assert look(place, policy=STRICT) == [("restored", "1")]


def test_what_was_not_reviewed_waits_while_no_other_can_be_proven(place):
    place.deployed("1")
    away(place.registry, "1")
    assert look(place, policy=REVIEWED) == [("reverted", None)]
    assert place.lines()[-2:] == [("passed", "2"), ("reverted", None)]
    with pytest.raises(ArtifactMissing):
        look(place, policy=REVIEWED)
    place.tag("2", "approved")
    (taken,) = process_reviews(place.model(), REVIEWED)
    assert (taken.kind, taken.outcome) == ("review", "promoted")
    assert look(place, policy=REVIEWED, thoroughly=True) == []
    assert place.champion == "2"


def test_what_was_taken_away_itself_does_not_come_back(place):
    place.tag("1", "rejected")
    place.stored("2").data += b"\0"
    assert look(place, thoroughly=True) == [("reverted", None)]
    for _ in range(2):
        assert look(place) == []
    assert place.champion is None


def test_what_served_once_and_was_taken_away_now_does_not_come_back(place):
    place.deployed("1")
    place.tag("2", "rejected")
    place.point("1")
    assert look(place, policy=STRICT) == [("reverted", None)]
    assert look(place, policy=STRICT) == []
    assert place.champion is None


def test_what_somebody_else_took_away_stays_away(place):
    place.registry.delete_alias(NAME, "champion")
    assert look(place, thoroughly=True) == []
    assert place.champion is None


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


@pytest.mark.parametrize("error", [ResourceGone, RegistryError])
def test_a_version_that_was_deleted_stands_in_nobody_s_way(place, error):
    place.promote(3)
    place.point(place.hand_made(7))
    version = place.registry.version

    def deleted(name, number):
        if number == "3":
            raise error("there is no version 3")
        return version(name, number)

    place.registry.version = deleted
    assert look(place) == [("reverted", "2")]


def test_rejecting_the_champion_is_a_rejection(place):
    place.tag("2", "rejected")
    assert look(place) == [("reverted", "1")]
    assert place.lines()[-2:] == [("rejected", "2"), ("reverted", "1")]
    place.tag("2", "approved")
    place.point("2")
    assert look(place) == [("reverted", "1")]


def test_after_a_revert_a_rollback_has_somewhere_to_go(place):
    place.promote(3)
    place.tag("3", "rejected")
    assert look(place) == [("reverted", "2")]
    assert place.registry.aliases["previous"] == "1"
    assert rollback(place.registry, NAME, ledger=place.ledger, reason="worse").version == "1"


PAGES = [b"{}", b"", b"<html>busy</html>", b"Bad Gateway"]


@pytest.mark.parametrize("page", PAGES)
def test_wrong_bytes_in_two_downloads_take_the_alias_back(place, page):
    place.stored("2").data = page
    assert look(place, thoroughly=True) == [("reverted", "1")]


@pytest.mark.parametrize("page", PAGES)
def test_what_somebody_pointed_at_has_to_be_proven(place, page):
    place.point("1")
    place.stored("1").data = page
    assert look(place) == [("reverted", "2")]


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


def test_the_last_good_one_is_proven_before_it_serves_again(place):
    place.promote(3)
    place.point(place.hand_made(7))
    place.stored("3").data += b"\0"
    assert look(place) == [("reverted", "2")]


def test_where_several_mismatch_none_is_condemned_and_the_alias_is_taken_back(place):
    place.promote(3)
    place.stored("2").data += b"\0"
    place.stored("3").data += b"\0"
    place.point(place.hand_made(7))
    assert look(place) == [("reverted", "1")]
    for _ in range(3):
        assert look(place) == []
    assert place.champion == "1"


@pytest.mark.parametrize("deployed", [True, False])
def test_what_served_rightly_comes_back_when_it_can_be_proven(place, deployed):
    """A store gave a page while somebody had pointed elsewhere; another one served meanwhile."""
    if deployed:
        place.deployed("2")
    good, place.stored("2").data = place.stored("2").data, b"<html>busy</html>"
    place.point(place.hand_made(7))
    assert look(place) == [("reverted", "1")]
    assert look(place) == []
    place.stored("2").data = good
    assert look(place) == ([("restored", "2")] if deployed else [])
    assert look(place, thoroughly=True) == []
    assert place.champion == ("2" if deployed else "1")


def test_what_the_guard_took_the_alias_from_does_not_come_back_in_another_s_place(place):
    place.deployed("2")
    good = place.stored("2").data
    place.stored("2").data += b"\0"
    assert look(place, thoroughly=True) == [("reverted", "1")]
    place.stored("2").data = good
    assert look(place, thoroughly=True) == []
    place.point("2")
    assert look(place) == [("accepted", "2")]


def test_what_is_whole_again_comes_back_where_nothing_serves(place):
    place.tag("1", "rejected")
    good = place.stored("2").data
    place.stored("2").data += b"\0"
    assert look(place, thoroughly=True) == [("reverted", None)]
    assert look(place) == []
    place.stored("2").data = good
    assert look(place) == [("restored", "2")]
    assert look(place, thoroughly=True) == []


def test_bytes_that_change_under_the_champion(place):
    place.stored("2").data += b"\0"
    assert look(place) == []  # without a thorough look nothing is downloaded
    assert look(place, thoroughly=True) == [("reverted", "1")]
    assert place.lines()[-1] == ("reverted", "1")


def test_a_reviewer_s_no_takes_the_champion_out_of_service(place):
    place.tag("2", "rejected")
    assert look(place) == [("reverted", "1")]


def test_what_waits_for_review_does_not_serve(tmp_path):
    place = Place(tmp_path, REVIEWED)
    place.promote(1)
    place.point("1")
    assert look(place, policy=REVIEWED) == [("reverted", None)]
    place.point("1")
    place.tag("1", "approved", Tag.REVIEW)
    assert look(place, policy=REVIEWED) == [("accepted", "1")]


def test_a_rollback_is_no_offence(place):
    rollback(place.registry, NAME, ledger=place.ledger, reason="worse")
    assert look(place, thoroughly=True) == []
    assert place.champion == "1"


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
