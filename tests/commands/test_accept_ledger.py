"""gate accept-ledger: a user accepts a changed ledger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gate import cli
from gate.errors import PastChanged
from gate.ledger.database import DEFAULT
from gate.ledger.entry import LedgerEntry
from gate.ledger.ledger import Ledger
from gate.service.reconciler import stored_head
from tests.ledger.rows import replace_rows, rows


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """The ledger of a service with default paths in this folder; its newest entry was deleted."""
    monkeypatch.chdir(tmp_path)
    created = Ledger(DEFAULT, stored_head=stored_head(Path(".gate/store")))
    for reason in ("one", "two"):
        created.append(LedgerEntry(action="conflict", registry="here", model="m", reason=reason))
    replace_rows(created.state, rows(created.state)[:1])
    return created


def test_default_paths_are_those_of_the_service(ledger: Ledger, capsys) -> None:
    with pytest.raises(PastChanged):
        ledger.verify()
    assert cli.main(["accept-ledger", "--reason", "the disk died"]) == 0
    shown = capsys.readouterr().out
    assert "the store .gate/store recorded 2 entries" in shown
    assert "accepted" in shown
    assert [e.action for e in ledger.entries()] == ["conflict", "ledger_accepted"]
    assert cli.main(["accept-ledger", "--reason", "again"]) == 0
    assert "nothing to accept" in capsys.readouterr().out
    assert cli.main(["history"]) == 0
    assert "the disk died" in capsys.readouterr().out


def test_environment_variables_of_the_service_apply(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir("/")
    monkeypatch.setenv("GATE_STATE", f"sqlite:///{tmp_path}/.gate/state.db")
    monkeypatch.setenv("GATE_STORE", str(tmp_path / ".gate/store"))
    assert cli.main(["accept-ledger", "--reason", "the disk died", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["accepted"], len(answer["lost"]), len(answer["asked"])) == (True, 1, 1)


@pytest.mark.parametrize("reason", [[], ["--reason", " "]])
def test_reason_is_required(ledger: Ledger, capsys, reason: list[str]) -> None:
    before = rows(ledger.state)
    assert cli.main(["accept-ledger", *reason]) == 2
    assert "--reason" in capsys.readouterr().err
    assert rows(ledger.state) == before


@pytest.mark.parametrize(
    "words",
    [
        ("--champion", "second", "--reason", "meant"),
        ("--champion", "-1", "--reason", "meant"),
        ("--champion", "1", "--reason", " "),
        ("--champion", "1"),
        ("--reason", "meant"),
    ],
)
def test_override_requires_version_and_reason(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["override", "digits", *words]) == 2
    assert not (tmp_path / ".gate").exists()
