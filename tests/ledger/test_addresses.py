from __future__ import annotations

import pytest

from gate.errors import EvidenceError
from gate.ledger.entry import plain
from gate.ledger.ledger import Ledger
from gate.ledger.maintenance import NOTE, declare_addresses, same
from gate.ledger.notes import Notes
from tests.ledger.rows import put, spoil_note


@pytest.mark.parametrize(
    ("address", "seen"),
    [
        ("http://mlflow:5000/", "http://mlflow:5000"),
        ("HTTP://MLflow:80", "http://mlflow"),
        ("https://mlflow:443/base/", "https://mlflow/base"),
        ("https://mlflow:80", "https://mlflow:80"),
        ("http://me:secret@mlflow:5000", "http://mlflow:5000"),
        ("sqlite:////srv/MLflow.db", "sqlite:////srv/MLflow.db"),
        ("postgresql://me:secret@db/mlflow", "postgresql://db/mlflow"),
    ],
)
def test_what_makes_no_difference_is_left_out(address, seen):
    assert plain(address) == seen


def test_without_a_word_every_registry_is_its_own(ledger):
    assert same(ledger, "http://a/") == {"http://a"}


def test_the_same_is_the_same_from_both_sides_and_across(ledger):
    declare_addresses(ledger, "http://a", ["sqlite:///x.db"])
    declare_addresses(ledger, "http://c", ["http://d"])
    declare_addresses(ledger, "http://b/", ["sqlite:///x.db"])
    for one in ("http://a", "http://b", "sqlite:///x.db"):
        assert same(ledger, one) == {"http://a", "http://b", "sqlite:///x.db"}
    assert same(ledger, "http://d") == {"http://c", "http://d"}


def test_it_is_said_by_a_line_once(ledger):
    for _ in range(2):
        declare_addresses(ledger, "http://me:secret@a/", ["http://b"])
        declare_addresses(ledger, "http://b", ["http://a"])
    (line,) = ledger.entries()
    assert (line.action, line.registry, line.model) == ("same_registry", "http://a", "")
    assert line.addresses == ("http://a", "http://b")
    assert same(Ledger(ledger.state), "http://b") == {"http://a", "http://b"}


def test_a_ledger_that_becomes_another_says_something_else(ledger):
    declare_addresses(ledger, "http://a", ["http://b"])
    assert len(same(ledger, "http://a")) == 2
    put(ledger.state, [])
    assert same(ledger, "http://a") == {"http://a"}


def old_note(ledger: Ledger, text: str = '[["http://a", "http://b"], ["http://c", "http://d"]]'):
    """As an older version kept it."""
    Notes(ledger).write(NOTE, text)


def test_what_an_older_version_kept_counts_and_goes_into_lines(ledger):
    old_note(ledger)
    assert same(ledger, "http://a") == {"http://a", "http://b"}
    declare_addresses(ledger, "http://a", ["http://e"])
    spoil_note(ledger.state, NOTE, '[["http://a", "http://evil"]]')  # nobody reads it any more
    assert same(ledger, "http://b") == {"http://a", "http://b", "http://e"}
    assert same(ledger, "http://c") == {"http://c", "http://d"}
    assert {line.action for line in ledger.entries()} == {"same_registry"}


@pytest.mark.parametrize("taken", [True, False])
def test_a_note_that_is_put_back_or_removed_takes_nothing_back(ledger, taken):
    old_note(ledger, "[]")
    declare_addresses(ledger, "http://a", ["http://b"])
    if taken:
        Notes(ledger).remove(NOTE)
    assert same(ledger, "http://a") == {"http://a", "http://b"}


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}x'])
def test_a_damaged_note_is_an_error_until_it_is_said_again(ledger, text):
    old_note(ledger, text)
    with pytest.raises(EvidenceError, match="--same-registry"):
        same(ledger, "http://a")
    declare_addresses(ledger, "http://a", ["http://c"])
    assert same(ledger, "http://a") == {"http://a", "http://c"}
