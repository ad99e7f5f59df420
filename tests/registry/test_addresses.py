from __future__ import annotations

import pytest

from gate.errors import EvidenceError
from gate.registry.addresses import declare, plain, same


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
    declare(ledger, "http://a", ["sqlite:///x.db"])
    declare(ledger, "http://c", ["http://d"])
    declare(ledger, "http://b/", ["sqlite:///x.db"])
    for one in ("http://a", "http://b", "sqlite:///x.db"):
        assert same(ledger, one) == {"http://a", "http://b", "sqlite:///x.db"}
    assert same(ledger, "http://d") == {"http://c", "http://d"}


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}x'])
def test_a_damaged_file_is_an_error(ledger, text):
    declare(ledger, "http://a", ["http://b"])
    ledger.path.with_name(f"{ledger.path.name}.same.json").write_text(text)
    with pytest.raises(EvidenceError, match="--same-registry"):
        same(ledger, "http://a")
