from __future__ import annotations

import pytest

from gate.ledger.entry import plain
from gate.ledger.ledger import Ledger
from gate.ledger.maintenance import declare_addresses, registry_identities
from tests.ledger.rows import put


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
    assert registry_identities(ledger, "http://a/") == {"http://a"}


def test_the_same_is_the_same_from_both_sides_and_across(ledger):
    declare_addresses(ledger, "http://a", ["sqlite:///x.db"])
    declare_addresses(ledger, "http://c", ["http://d"])
    declare_addresses(ledger, "http://b/", ["sqlite:///x.db"])
    for one in ("http://a", "http://b", "sqlite:///x.db"):
        assert registry_identities(ledger, one) == {"http://a", "http://b", "sqlite:///x.db"}
    assert registry_identities(ledger, "http://d") == {"http://c", "http://d"}


def test_it_is_said_by_a_line_once(ledger):
    for _ in range(2):
        declare_addresses(ledger, "http://me:secret@a/", ["http://b"])
        declare_addresses(ledger, "http://b", ["http://a"])
    (line,) = ledger.entries()
    assert (line.action, line.registry, line.model) == ("same_registry", "http://a", "")
    assert line.addresses == ("http://a", "http://b")
    assert registry_identities(Ledger(ledger.state), "http://b") == {"http://a", "http://b"}


def test_a_ledger_that_becomes_another_says_something_else(ledger):
    declare_addresses(ledger, "http://a", ["http://b"])
    assert len(registry_identities(ledger, "http://a")) == 2
    put(ledger.state, [])
    assert registry_identities(ledger, "http://a") == {"http://a"}
