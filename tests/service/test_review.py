"""An approval by tag promotes a version that passed and still passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gate.errors import (
    LimitExceeded,
    RegistryUnavailable,
    StorageError,
)
from gate.registry.interface import CANDIDATE, CHAMPION, Tag
from gate.registry.registered_model import MismatchMemory, Reading
from gate.registry.reviews import COMMENT_LIMIT
from gate.registry.version_page import STATUS_LIMIT, PageUpdater
from gate.service.monitoring import Failed
from gate.service.submissions import process_reviews
from tests import builders
from tests.registry.releases import NAME
from tests.registry.simulator import Watched
from tests.service.registry_setup import REVIEWED, RegistrySetup, failing


@pytest.fixture
def setup(tmp_path) -> RegistrySetup:
    """A model whose champion is version 1; version 2 passed and waits for review."""
    created = RegistrySetup(tmp_path, REVIEWED)
    created.promote(1)
    created.tag("1", "approved")
    review_once(created)
    created.promote(2)
    return created


def review_once(setup: RegistrySetup, policy=REVIEWED):
    return [(t.outcome, t.version) for t in process_reviews(setup.model(), policy)]


INVALID_VALUES = ["yes", "", "approved?", "not rejected"]


@pytest.mark.parametrize("word", INVALID_VALUES)
def test_other_tag_value_is_answered_once(setup, word):
    setup.tag("2", word)
    watched = Watched(setup.registry)
    setup.registry = watched
    for _ in range(2):
        assert review_once(setup) == []
    assert watched.calls.count("set_tag") == 1
    assert setup.champion == "1"
    result = watched.inner.version(NAME, "2").tags[Tag.REVIEW_RESULT]
    assert result == f'write approved or rejected; seen: "{word}"'
    assert setup.lines() == [("passed", "1"), ("promoted", "1"), ("passed", "2")]
    setup.tag("2", "something else" * 100)
    review_once(setup)
    result = watched.inner.version(NAME, "2").tags[Tag.REVIEW_RESULT]
    assert 'seen: "something elsesome' in result
    assert len(result) < 150


def test_failing_answer_does_not_block_other_reviews(setup):
    setup.tag("2", "yes")
    setup.promote(3)
    setup.tag("3", "approved")
    make_unavailable(setup, "set_tag")
    assert review_once(setup) == [("promoted", "3")]


def make_unavailable(setup, name):
    """Let this call of the registry fail."""

    setattr(setup.registry, name, failing(RegistryUnavailable("no answer")))


ANSWERS = {
    "approved": ("Approved", "approved: became champion at 20"),
    "rejected": ("Rejected ", "rejected at 20"),
}


@pytest.mark.parametrize(("word", "begins"), ANSWERS.values(), ids=list(ANSWERS))
def test_valid_value_replaces_the_answer_to_an_invalid_one(setup, word, begins):
    setup.tag("2", "yes")
    review_once(setup)
    setup.tag("2", word)
    review_once(setup)
    assert setup.stored("2").tags[Tag.REVIEW_RESULT].startswith(begins)


def test_refused_approval_is_answered_with_the_reason(setup):
    setup.tag("2", "approved")
    assert review_once(setup, builders.policy(review="required", min_samples=500)) == [
        ("refused", "2")
    ]
    result = setup.stored("2").tags[Tag.REVIEW_RESULT]
    assert result.startswith("approved, but not promoted: ")
    assert "400 samples" in result
    assert status(setup, "2").startswith("Status: approved, but not promoted: ")


@pytest.mark.parametrize("word", ["approved", "rejected"])
def test_review_comment_is_sanitized_and_recorded(setup, word):
    setup.tag("2", "looks\n \x1b[31mgood \u202e" + "x" * 1000, Tag.REVIEW_COMMENT)
    setup.tag("2", word)
    review_once(setup)
    line = setup.ledger.entries()[-1]
    assert line.cause == "delivery 1"
    assert line.evidence_sha256 == setup.ledger.entries()[-2].evidence_sha256
    assert line.comment.startswith("looks �[31mgood �xxx")
    assert len(line.comment) == COMMENT_LIMIT
    assert "MLflow does not say who" in line.reason
    assert "looks �(31mgood" in status(setup, "2")
    assert len(status(setup, "2")) <= STATUS_LIMIT


def status(setup, number):
    return setup.stored(number).description.partition("\n")[0]


@pytest.mark.rows(4)
@pytest.mark.parametrize("word", ["approved", "rejected"])
@pytest.mark.parametrize("call", ["set_description", "set_tag", "delete_alias"])
def test_unwritable_page_does_not_undo_the_review(setup, call, word):
    setup.tag("2", word)
    make_unavailable(setup, call)
    assert review_once(setup) == [("promoted" if word == "approved" else "rejected", "2")]
    assert setup.champion == ("2" if word == "approved" else "1")
    delattr(setup.registry, call)
    PageUpdater().follow(setup.model(), thoroughly=False)
    assert (CANDIDATE in setup.registry.aliases) is (word == "approved")
    assert setup.stored("2").tags[Tag.REVIEW_RESULT].startswith(word)
    assert status(setup, "2").startswith(
        "Status: champion" if word == "approved" else "Status: rejected"
    )


def test_unavailable_registry_reviews_nothing(setup):
    make_unavailable(setup, "version")
    before = setup.lines()
    with pytest.raises(RegistryUnavailable):
        review_once(setup)
    assert setup.lines() == before


@pytest.mark.parametrize("error", [StorageError("ended by SIGTERM"), LimitExceeded("SIGKILL")])
def test_killed_sandbox_does_not_consume_the_approval(setup, monkeypatch, error):
    """The service may be stopped in the middle of a pass."""
    setup.tag("2", "approved")
    before = setup.lines()
    reading = Reading(mismatches=MismatchMemory(60.0, wait=None))
    with monkeypatch.context() as stopped:
        stopped.setattr("gate.onnx_file.sandboxed_reading.run_in_sandbox", failing(error))
        (failed,) = process_reviews(replace(setup.model(), reading=reading), REVIEWED)
    assert isinstance(failed, Failed)
    assert setup.lines() == before
    assert review_once(setup) == [("promoted", "2")]


def test_rejected_old_champion_does_not_become_previous(setup):
    setup.model().write("rejected", "a reviewer's no", version="1")
    setup.tag("2", "approved")
    assert review_once(setup) == [("promoted", "2")]
    assert setup.registry.aliases == {CANDIDATE: "2", CHAMPION: "2"}


def test_approval_of_old_evidence_is_refused(tmp_path):
    setup = RegistrySetup(tmp_path, builders.policy(review="required", max_age_days=365.0))
    setup.promote(1, days=100)
    setup.tag("1", "approved")
    assert review_once(setup, REVIEWED) == [("refused", "1")]
    assert "days old" in setup.ledger.entries()[-1].reason
    assert setup.champion is None
