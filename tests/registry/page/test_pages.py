"""Pages that a crash or the weather left behind are brought up to date, and nothing is asked for
while nothing is written."""

from __future__ import annotations

import logging

import pytest

from gate.deploy.store import ModelStore
from gate.errors import RegistryError, RegistryUnavailable, ResourceGone
from gate.registry.interface import CANDIDATE, Tag
from gate.registry.promotion import rollback
from gate.registry.version_page import PageUpdater, write_status
from gate.service.champion_guard import guard_champion
from gate.service.reconciler import Reconciler
from tests.registry.releases import NAME
from tests.registry.simulator import Watched
from tests.service.places import AUTOMATIC, REVIEWED, Place


@pytest.fixture
def place(tmp_path) -> Place:
    """Version 2 serves, version 1 served before; a service looked at both."""
    made = Place(tmp_path, AUTOMATIC)
    for seed in (1, 2):
        made.promote(seed)
    return made


def status(place: Place, number: str) -> str:
    return place.stored(number).description.partition("\n")[0].removeprefix("Status: ")


def spoil(place: Place, *numbers: str) -> None:
    """As whoever wrote the line was killed before the page."""
    for number in numbers:
        place.stored(number).description = "Status: out of date.\n\nThe body.\n"


def watched(place: Place) -> Watched:
    place.registry = Watched(place.registry)
    return place.registry


def test_while_nothing_is_written_nothing_is_asked(place):
    registry = watched(place)
    pages = PageUpdater()
    pages.follow(place.model(), thoroughly=False)
    assert "set_description" not in registry.calls
    registry.calls.clear()
    pages.follow(place.model(), thoroughly=False)
    assert registry.calls == []
    place.deployed("2")
    pages.follow(place.model(), thoroughly=False)
    assert registry.calls == []


def test_new_lines_bring_their_versions_pages_up_to_date(place):
    pages = PageUpdater()
    pages.follow(place.model(), thoroughly=False)
    place.promote(3)
    spoil(place, "1", "2", "3")
    registry = watched(place)
    pages.follow(place.model(), thoroughly=False)
    assert sorted(registry.calls) == ["set_description"] * 2 + ["version"] * 2
    assert [status(place, n)[:9] for n in ("1", "2", "3")] == [
        "out of da", "was champ", "champion ",
    ]  # fmt: skip
    assert place.stored("3").description.endswith("\n\nThe body.\n")


@pytest.mark.parametrize("thoroughly", [True, False])
def test_a_first_look_and_a_thorough_one_go_further_back(place, thoroughly):
    pages = PageUpdater()
    if thoroughly:
        pages.follow(place.model(), thoroughly=False)
    spoil(place, "1", "2")
    pages.follow(place.model(), thoroughly=thoroughly)
    assert status(place, "1").startswith("was champion until")
    assert status(place, "2").startswith("champion since")


def test_the_service_looks_after_them(place, tmp_path):
    reconcile = Reconciler(
        place.registry, place.ledger, AUTOMATIC, store=ModelStore(tmp_path / "store")
    )
    spoil(place, "2")
    reconcile(NAME, cause="timer")
    assert status(place, "2").startswith("champion since")


def answering(place: Place, error: RegistryError | None) -> None:
    """What the registry says to the next descriptions."""
    place.registry.__dict__.pop("set_description", None)
    if error is not None:

        def refuse(*_: object) -> None:
            raise error

        place.registry.__dict__["set_description"] = refuse


def test_while_the_registry_is_away_it_is_tried_again_at_the_next_look(place, caplog):
    pages = PageUpdater()
    pages.follow(place.model(), thoroughly=False)
    answering(place, RegistryUnavailable("no answer"))
    with caplog.at_level(logging.WARNING):
        assert place.promote(3).outcome == "promoted"
    assert "the page of version 3 of digits is out of date: no answer" in caplog.text
    pages.follow(place.model(), thoroughly=False)
    answering(place, None)
    pages.follow(place.model(), thoroughly=False)
    assert status(place, "3").startswith("champion since")
    assert status(place, "2").startswith("was champion until")


@pytest.mark.parametrize("error", [RegistryError("too long"), ResourceGone("deleted")])
def test_what_is_refused_is_not_tried_each_time_and_stands_in_no_other_s_way(place, error):
    answering(place, error)
    place.promote(3)
    pages = PageUpdater()
    pages.follow(place.model(), thoroughly=False)
    registry = watched(place)
    pages.follow(place.model(), thoroughly=False)
    assert registry.calls == []
    pages.follow(place.model(), thoroughly=True)
    assert registry.calls.count("set_description") == 2


def test_a_rejection_that_was_interrupted_is_finished(tmp_path):
    """The line is there, and nothing of what follows it."""
    place = Place(tmp_path, REVIEWED)
    place.promote(1)
    place.tag("1", "rejected")
    (passed,) = place.ledger.entries()
    place.model().write("rejected", "no", version="1", about=passed)
    PageUpdater().follow(place.model(), thoroughly=False)
    assert place.registry.aliases == {}
    assert place.stored("1").tags[Tag.VERDICT] == "REJECTED by review"
    assert place.stored("1").tags[Tag.REVIEW_RESULT].startswith("rejected at 20")
    assert status(place, "1").startswith("rejected by review on 20")
    registry = watched(place)
    PageUpdater().follow(place.model(), thoroughly=False)
    assert registry.calls == ["version", "alias candidate"]


@pytest.mark.parametrize(
    ("claim", "shown"),
    [
        ("PASS", "REFUSED (see gate.refused); handed in as PASS"),
        ("FAIL", "REFUSED (see gate.refused); handed in as FAIL"),
        ("**approved** by everybody", "REFUSED"),
    ],
)
def test_what_a_refused_version_says_of_itself_is_shown_as_a_claim(tmp_path, claim, shown):
    place = Place(tmp_path, REVIEWED)
    place.promote(1)
    (passed,) = place.ledger.entries()
    place.model().write("refused", "handed in, and refused: it is old", version="1", about=passed)
    place.tag("1", claim, Tag.VERDICT)
    for _ in range(2):
        write_status(place.model(), ("1",))
        assert place.stored("1").tags[Tag.VERDICT] == shown
    assert status(place, "1").startswith("handed in, and refused: it is old (20")
    place.tag("1", claim, Tag.VERDICT)  # somebody puts it back
    PageUpdater().follow(place.model(), thoroughly=True)
    assert place.stored("1").tags[Tag.VERDICT] == shown


def test_what_comes_again_after_a_refusal_has_its_verdict_again(tmp_path):
    place = Place(tmp_path, REVIEWED)
    place.promote(1)
    (passed,) = place.ledger.entries()
    place.model().write("refused", "another one is the candidate", version="1", about=passed)
    write_status(place.model(), ("1",))
    assert place.promote(1).version == "1"  # the same version, found by its tags
    assert place.stored("1").tags[Tag.VERDICT] == "PASS"
    assert status(place, "1").startswith("waits for review")


def test_a_tag_alone_rejects_no_page(place):
    place.tag("2", "REJECTED by review", Tag.VERDICT)
    place.tag("2", "rejected", Tag.REVIEW_RESULT)
    write_status(place.model(), ("2",))
    assert status(place, "2").startswith("champion since")
    assert place.registry.aliases[CANDIDATE] == "2"


def test_moves_by_hand_reverts_rollbacks_and_absolutions_reach_the_pages(place):
    place.point("1")
    (accepted,) = guard_champion(place.model(), AUTOMATIC, thoroughly=False)
    assert accepted.outcome == "accepted"
    assert status(place, "2").endswith("replaced by version 1.")
    assert status(place, "1").startswith("champion since")

    bad = place.hand_made(9)
    place.point(bad)
    guard_champion(place.model(), AUTOMATIC, thoroughly=False)
    assert status(place, bad).startswith("reverted by the guard on 20")
    assert "the ledger has no entry that version 3 passed the gate" in status(place, bad)

    rollback(place.registry, NAME, ledger=place.ledger, reason="sevens read as ones")
    assert status(place, "1").startswith("rolled back on 20")
    assert "because sevens read as ones; version 2 serves again." in status(place, "1")
    assert "again: version 1 was rolled back" in status(place, "2")
