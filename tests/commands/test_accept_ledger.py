"""`gate accept-ledger`: what a person says about a past that was lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gate import cli
from gate.errors import PastChanged
from gate.registry.ledger import Ledger, LedgerEntry
from gate.service.inbox import Inbox
from gate.service.keeper import keepers


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Of a service with the default places in this folder; its newest line was lost."""
    monkeypatch.chdir(tmp_path)
    Inbox("sqlite:///.gate/inbox.db").close()
    seen_by = keepers(Path(".gate/store"), "sqlite:///.gate/inbox.db")
    made = Ledger(Path(".gate/ledger.jsonl"), keepers=seen_by)
    for reason in ("one", "two"):
        made.append(LedgerEntry(action="conflict", registry="here", model="m", reason=reason))
    made.path.write_bytes(made.path.read_bytes().splitlines(keepends=True)[0])
    return made


def test_the_default_places_are_those_of_the_service(ledger: Ledger, capsys) -> None:
    with pytest.raises(PastChanged):
        ledger.verify()
    assert cli.main(["accept-ledger", "--reason", "the disk died"]) == 0
    shown = capsys.readouterr().out
    assert "the store .gate/store saw 2 lines" in shown
    assert "the inbox sqlite:///.gate/inbox.db saw 2 lines" in shown
    assert "accepted" in shown
    assert [e.action for e in ledger.entries()] == ["conflict", "ledger_accepted"]
    assert cli.main(["accept-ledger", "--reason", "again"]) == 0
    assert "nothing to accept" in capsys.readouterr().out
    assert cli.main(["history"]) == 0
    assert "the disk died" in capsys.readouterr().out


def test_the_environment_of_the_service_names_its_places(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir("/")
    here = {"GATE_LEDGER": "ledger.jsonl", "GATE_STORE": "store"}
    for name, place in here.items():
        monkeypatch.setenv(name, str(tmp_path / ".gate" / place))
    monkeypatch.setenv("GATE_INBOX", f"sqlite:///{tmp_path}/.gate/inbox.db")
    assert cli.main(["accept-ledger", "--reason", "the disk died", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["accepted"], len(said["lost"]), len(said["asked"])) == (True, 2, 2)


@pytest.mark.parametrize("kept", ["@inbox", "env:INBOX_OF_THE_TEST"])
def test_the_address_of_the_inbox_is_kept_elsewhere(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, capsys, kept: str
) -> None:
    file = Path("inbox")
    file.write_text("sqlite:///.gate/inbox.db\n")
    file.chmod(0o600)
    monkeypatch.setenv("INBOX_OF_THE_TEST", "sqlite:///.gate/inbox.db")
    monkeypatch.setenv("GATE_INBOX", kept)
    assert cli.main(["accept-ledger", "--reason", "the disk died", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "the inbox sqlite:///.gate/inbox.db" in answer["asked"]
    assert len(answer["lost"]) == 2


@pytest.mark.parametrize(
    ("inbox", "message"),
    [
        ("inbox.db", "the inbox is sqlite:///FILE or"),
        ("mysql://gate:hunter2@db/gate", "the inbox is sqlite:///FILE or"),
        ("sqlite://", "in memory"),
        ("postgresql://gate:hunter2@[::1/x", "Invalid IPv6 URL"),
        ("postgresql://gate:hunter2@db:port/x", "the inbox's URL can't be read"),
        ("@missing", "missing"),
        ("env:NOT_SET_IN_THE_TEST", "holds no address"),
    ],
)
def test_an_address_that_is_none(ledger: Ledger, capsys, inbox: str, message: str) -> None:
    before = ledger.path.read_bytes()
    assert cli.main(["accept-ledger", "--reason", "the disk died", "--inbox", inbox]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "unexpected" not in printed
    assert "hunter2" not in printed
    assert ledger.path.read_bytes() == before


@pytest.mark.parametrize("reason", [[], ["--reason", " "]])
def test_a_reason_is_asked_for(ledger: Ledger, capsys, reason: list[str]) -> None:
    before = ledger.path.read_bytes()
    assert cli.main(["accept-ledger", *reason]) == 2
    assert "--reason" in capsys.readouterr().err
    assert ledger.path.read_bytes() == before
