from __future__ import annotations

import pytest

from gate.ledger.entry import plain
from gate.ledger.ledger import Ledger
from gate.ledger.maintenance import declare_addresses, registry_identities
from tests.ledger.rows import replace_rows


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
def test_registry_address_is_normalized(address, seen):
    assert plain(address) == seen


def test_undeclared_registry_is_only_itself(ledger):
    assert registry_identities(ledger, "http://a/") == {"http://a"}


def test_declared_addresses_are_symmetric_and_transitive(ledger):
    declare_addresses(ledger, "http://a", ["sqlite:///x.db"])
    declare_addresses(ledger, "http://c", ["http://d"])
    declare_addresses(ledger, "http://b/", ["sqlite:///x.db"])
    for item in ("http://a", "http://b", "sqlite:///x.db"):
        assert registry_identities(ledger, item) == {"http://a", "http://b", "sqlite:///x.db"}
    assert registry_identities(ledger, "http://d") == {"http://c", "http://d"}


def test_declaration_writes_one_entry(ledger):
    for _ in range(2):
        declare_addresses(ledger, "http://me:secret@a/", ["http://b"])
        declare_addresses(ledger, "http://b", ["http://a"])
    (line,) = ledger.entries()
    assert (line.action, line.registry, line.model) == ("same_registry", "http://a", "")
    assert line.addresses == ("http://a", "http://b")
    assert registry_identities(Ledger(ledger.state), "http://b") == {"http://a", "http://b"}


def test_declaration_is_forgotten_with_its_ledger(ledger):
    declare_addresses(ledger, "http://a", ["http://b"])
    assert len(registry_identities(ledger, "http://a")) == 2
    replace_rows(ledger.state, [])
    assert registry_identities(ledger, "http://a") == {"http://a"}
