"""Review: approval promotes what passed and still is what passed; it waives nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gate.errors import (
    LimitExceeded,
    RegistryError,
    RegistryUnavailable,
    ResourceGone,
    StorageError,
)
from gate.registry.interface import CANDIDATE, CHAMPION, PREVIOUS, Tag
from gate.registry.registered_model import MismatchMemory, Reading
from gate.registry.reviews import COMMENT_LIMIT
from gate.registry.version_page import STATUS_LIMIT, PageUpdater
from gate.service.monitoring import Failed
from gate.service.submissions import process_reviews
from tests import builders
from tests.registry.releases import NAME
from tests.registry.simulator import Watched
from tests.service.places import REVIEWED, Place


@pytest.fixture
def place(tmp_path) -> Place:
    """Version 1 serves; version 2 passed and waits."""
    made = Place(tmp_path, REVIEWED)
    made.promote(1)
    made.tag("1", "approved")
    look(made)
    made.promote(2)
    return made


def look(place: Place, policy=REVIEWED):
    return [(t.outcome, t.version) for t in process_reviews(place.model(), policy)]


def test_approval_promotes(place):
    place.tag("2", "approved")
    assert look(place) == [("promoted", "2")]
    assert place.registry.aliases == {CANDIDATE: "2", CHAMPION: "2", PREVIOUS: "1"}
    line = place.ledger.entries()[-1]
    assert (line.action, line.version, line.previous_version) == ("promoted", "2", "1")
    assert line.cause == "delivery 1"
    assert line.evidence_sha256 == place.ledger.entries()[-2].evidence_sha256
    assert look(place) == []
    assert place.promote(2).outcome == "unchanged"


def test_an_old_champion_that_must_not_serve_is_nothing_to_roll_back_to(place):
    place.model().write("rejected", "a reviewer's no", version="1")
    place.tag("2", "approved")
    assert look(place) == [("promoted", "2")]
    assert place.registry.aliases == {CANDIDATE: "2", CHAMPION: "2"}


WRONG = ["yes", "", "approved?", "not rejected"]


@pytest.mark.parametrize("word", WRONG)
def test_other_words_are_none_and_are_answered_once(place, word):
    place.tag("2", word)
    watched = Watched(place.registry)
    place.registry = watched
    for _ in range(2):
        assert look(place) == []
    assert watched.calls.count("set_tag") == 1
    assert place.champion == "1"
    said = watched.inner.version(NAME, "2").tags[Tag.REVIEW_RESULT]
    assert said == f'write approved or rejected; seen: "{word}"'
    assert place.lines() == [("passed", "1"), ("promoted", "1"), ("passed", "2")]
    place.tag("2", "something else" * 100)
    look(place)
    said = watched.inner.version(NAME, "2").tags[Tag.REVIEW_RESULT]
    assert 'seen: "something elsesome' in said
    assert len(said) < 150


def test_a_reviewer_that_can_not_be_answered_keeps_nobody_waiting(place):
    place.tag("2", "yes")
    place.promote(3)
    place.tag("3", "approved")
    fail(place, "set_tag")
    assert look(place) == [("promoted", "3")]


def fail(place, name):
    """This call of the registry is never answered."""

    def away(*_: object, **_options: object) -> None:
        raise RegistryUnavailable("no answer")

    setattr(place.registry, name, away)


ANSWERS = {
    "approved": ("Approved", "approved: became champion at 20"),
    "rejected": ("Rejected ", "rejected at 20"),
}


@pytest.mark.parametrize(("word", "begins"), ANSWERS.values(), ids=list(ANSWERS))
def test_a_right_word_replaces_the_answer_to_a_wrong_one(place, word, begins):
    place.tag("2", "yes")
    look(place)
    place.tag("2", word)
    look(place)
    assert place.stored("2").tags[Tag.REVIEW_RESULT].startswith(begins)


def test_an_approval_that_promotes_nothing_is_answered_with_the_reason(place):
    place.tag("2", "approved")
    assert look(place, builders.policy(review="required", min_samples=500)) == [("refused", "2")]
    said = place.stored("2").tags[Tag.REVIEW_RESULT]
    assert said.startswith("approved, but not promoted: ")
    assert "400 samples" in said
    assert status(place, "2").startswith("Status: approved, but not promoted: ")


@pytest.mark.parametrize("word", ["approved", "rejected"])
def test_the_comment_goes_into_the_line_of_the_review(place, word):
    place.tag("2", "looks\n \x1b[31mgood \u202e" + "x" * 1000, Tag.REVIEW_COMMENT)
    place.tag("2", word)
    look(place)
    line = place.ledger.entries()[-1]
    assert line.comment.startswith("looks �[31mgood �xxx")
    assert len(line.comment) == COMMENT_LIMIT
    assert "MLflow does not say who" in line.reason
    assert "looks �(31mgood" in status(place, "2")
    assert len(status(place, "2")) <= STATUS_LIMIT


def status(place, number):
    return place.stored(number).description.partition("\n")[0]


def test_after_a_rejection_the_alias_goes_and_the_tag_says_so(place):
    place.tag("2", "too dark", Tag.REVIEW_COMMENT)
    place.tag("2", "Rejected")
    look(place)
    assert place.registry.aliases == {CHAMPION: "1"}
    assert place.stored("2").tags[Tag.VERDICT] == "REJECTED by review"
    assert status(place, "2").startswith("Status: rejected by review on 20")
    assert 'because "too dark"' in status(place, "2")


@pytest.mark.rows(4)
@pytest.mark.parametrize("word", ["approved", "rejected"])
@pytest.mark.parametrize("call", ["set_description", "set_tag", "delete_alias"])
def test_a_page_that_can_not_be_written_undoes_nothing(place, call, word):
    place.tag("2", word)
    fail(place, call)
    assert look(place) == [("promoted" if word == "approved" else "rejected", "2")]
    assert place.champion == ("2" if word == "approved" else "1")
    delattr(place.registry, call)
    PageUpdater().follow(place.model(), thoroughly=False)
    assert (CANDIDATE in place.registry.aliases) is (word == "approved")
    assert place.stored("2").tags[Tag.REVIEW_RESULT].startswith(word)
    assert status(place, "2").startswith(
        "Status: champion" if word == "approved" else "Status: rejected"
    )


def test_approval_of_what_is_too_old_now(tmp_path):
    place = Place(tmp_path, builders.policy(review="required", max_age_days=365.0))
    place.promote(1, days=100)
    place.tag("1", "approved")
    assert look(place, REVIEWED) == [("refused", "1")]
    assert "days old" in place.ledger.entries()[-1].reason
    assert place.champion is None


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ResourceGone("deleted"), ("refused", "2")),
        (RegistryError("a fault of the server"), "RegistryError"),
        (StorageError("the disk is full"), "StorageError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_that_can_not_be_looked_at_stands_in_no_other_s_way(place, error, outcome):
    place.promote(3)
    place.tag("3", "approved")
    read = place.registry.version

    def version(name, number):
        if number == "2":
            raise error
        return read(name, number)

    place.registry.version = version
    before = place.lines()
    found = [
        type(one.error).__name__ if isinstance(one, Failed) else (one.outcome, one.version)
        for one in process_reviews(place.model(), REVIEWED)
    ]
    assert found == [outcome, ("promoted", "3")]
    assert place.champion == "3"
    written = [outcome] if isinstance(outcome, tuple) else []
    assert place.lines() == [*before, *written, ("promoted", "3")]
    del place.registry.version
    assert place.promote(2).outcome == "passed"


def test_without_the_registry_none_is_looked_at(place):
    def away(name, number):
        raise RegistryUnavailable("no answer")

    place.registry.version = away
    before = place.lines()
    with pytest.raises(RegistryUnavailable):
        look(place)
    assert place.lines() == before


@pytest.mark.parametrize("error", [StorageError("ended by SIGTERM"), LimitExceeded("SIGKILL")])
def test_a_child_that_somebody_ended_uses_no_approval_up(place, monkeypatch, error):
    """As when the service is stopped in the middle of a look."""
    place.tag("2", "approved")
    before = place.lines()
    reading = Reading(mismatches=MismatchMemory(60.0, wait=None))
    with monkeypatch.context() as stopped:

        def ended(*_: object, **_options: object) -> None:
            raise error

        stopped.setattr("gate.onnx_file.sandboxed_reading.run_in_sandbox", ended)
        (failed,) = process_reviews(replace(place.model(), reading=reading), REVIEWED)
    assert isinstance(failed, Failed)
    assert place.lines() == before
    assert look(place) == [("promoted", "2")]
