"""--state in every command, and ledgers from versions before the database."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gate import Digest, cli
from gate.commands.loaders import open_writable_ledger, read_ledger
from gate.errors import Untrusted
from gate.ledger.database import DEFAULT
from gate.ledger.ledger import Ledger, LedgerHead, StoredHead
from gate.service.settings import write_secrets
from gate.signing.keys import SigningKey, read_public
from gate.signing.local_keys import LocalKeys
from pipelines.trust_file import EditedTrust, KeyTerms
from tests.commands.running import as_json
from tests.ledger.keys import Writers
from tests.ledger.rows import entry, rows
from tests.registry.conftest import _no_dvc_experiment, read_untrusted_files_in_process  # noqa: F401
from tests.registry.releases import NAME
from tests.service.conftest import database as url  # noqa: F401
from tests.service.conftest import postgres_server  # noqa: F401
from tests.service.deliveries import SECRET
from tests.service.registry_setup import AUTOMATIC

READING_COMMANDS = {
    "history": ["history"],
    "verify": ["history", "--verify"],
    "export": ["history", "export"],
    "checkpoint": ["history", "checkpoint", "--key", "key.pem"],
}
WRITING_COMMANDS = {
    "rollback": ["rollback", NAME, "--yes"],
    "accept-ledger": ["accept-ledger", "--reason", "it is meant"],
    "reconcile": ["reconcile", NAME, "--policy", "policy.yaml"],
    "serve": ["serve", "--model", NAME, "--secret-file", "secrets", "--port", "0"],
}
COMMANDS = READING_COMMANDS | WRITING_COMMANDS
OVERRIDE = ["override", NAME, "--champion", "1", "--reason", "it is meant"]


@pytest.fixture
def in_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a registry, a policy, the service's secret and a key."""
    for name in ("GATE_STATE", "GATE_SIGNING_KEY", "GATE_TRUST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    Writers(tmp_path).key("key")
    write_secrets(tmp_path / "secrets", [SECRET])
    (tmp_path / "policy.yaml").write_text(json.dumps({"gate": AUTOMATIC.to_plain()}))
    (tmp_path / "mlflow.db").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("", "the state is sqlite:///FILE"),
        ("mysql://gate:hunter2@db/gate", "the state is sqlite:///FILE"),
        ("sqlite://", "in memory"),
        ("postgresql://gate:hunter2@[::1/x", "Invalid IPv6 URL"),
        ("postgresql://gate:hunter2@db:port/x", "the database URL is not valid"),
        ("postgresql://gate:hunter2@127.0.0.1:1/x", "can't be used now"),
        ("sqlite:////proc", "the state is sqlite:///FILE"),
        ("\udcff", "unprintable"),
        ("@missing", "missing"),
        ("env:NOT_SET_IN_THE_TEST", "has no address"),
    ],
)
def test_invalid_state_is_refused(
    in_project: Path, capsys: pytest.CaptureFixture[str], state: str, message: str
) -> None:
    for name in ("history", "accept-ledger", "reconcile"):
        assert cli.main([*COMMANDS[name], "--state", state, "--debug"]) == 2
        printed = capsys.readouterr().err
        assert message in printed, name
        assert "unexpected" not in printed
        assert "hunter2" not in printed
        assert "[hidden]" not in printed
    assert not (in_project / ".gate").exists()


@pytest.mark.parametrize("command", [COMMANDS["rollback"], COMMANDS["accept-ledger"], OVERRIDE])
def test_missing_ledger_is_not_created(in_project: Path, command: list[str]) -> None:
    assert cli.main([*command, "--state", "none.db"]) == 2
    assert not (in_project / "none.db").exists()


def test_accept_ledger_requires_the_store(in_project: Path) -> None:
    command = [*COMMANDS["accept-ledger"], "--state", "state.db"]
    Ledger(in_project / "state.db").append(entry())
    assert cli.main(command) == 0
    assert cli.main([*command, "--store", "none"]) == 2


def test_override_refuses_a_folder_as_registry(in_project: Path) -> None:
    command = [*OVERRIDE, "--state", "state.db", "--tracking-uri"]
    Ledger(in_project / "state.db").append(entry())
    assert cli.main([*command, "http://127.0.0.1:1"]) == 0
    for uri in ("mlruns", "file:mlruns"):
        assert cli.main([*command, uri]) == 2


def test_signed_ledger_requires_a_key(in_project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Ledger(DEFAULT, key=SigningKey.from_file(in_project / "key.pem")).append(entry("signed"))
    before = rows(DEFAULT)
    for arguments in WRITING_COMMANDS.values():
        code, plain = as_json(capsys, *arguments)
        assert (code, plain["error"]["type"]) == (2, "KeyUnusable"), arguments
    assert rows(DEFAULT) == before


def test_local_key_signs_ledger_entries(
    in_project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Ledger(DEFAULT).append(entry())
    accept = ("accept-ledger", "--reason", "the disk died")
    head = LedgerHead(lines=9, sha256=Digest.from_bytes(b"lost"), at="2026-01-01T00:00:00+00:00")
    stored = StoredHead(Path(".gate/store/ledger-head.json"), location="the store")
    stored.replace(head)
    assert as_json(capsys, *accept)[0] == 0
    custom = Writers(in_project / ".gate/keys").key("local")
    stored.replace(head)
    assert as_json(capsys, *accept)[0] == 0
    signers = [item["signed_by"] for item in as_json(capsys, "history")[1]["entries"]]
    assert signers == [None, None, custom.public.key_id]


@pytest.fixture
def trusting_folder(in_project: Path) -> Path:
    """A folder with its own key, and a trust file with only this key."""
    LocalKeys(in_project / ".gate", print).signing_key()
    return in_project


def test_no_command_writes_untrusted_entries(
    trusting_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Use an untrusted key, with and without --trust."""
    for begin in (
        lambda: None,
        lambda: Ledger(DEFAULT, key=_load_local_key(trusting_folder)).append(entry("own")),
    ):
        begin()
        before = rows(DEFAULT)
        for name, arguments in WRITING_COMMANDS.items():
            code, plain = as_json(capsys, *arguments, "--key", "key.pem")
            assert (code, plain["error"]["type"]) == (2, "Untrusted"), name
            assert "the key key (" in plain["error"]["message"]
            assert "trusted as a writer by .gate/trust.yaml" in plain["error"]["message"]
        assert rows(DEFAULT) == before
    assert as_json(capsys, "history", "--verify")[1]["holds"]


def test_entries_of_an_untrusted_key_are_refused(
    trusting_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Ledger(DEFAULT, key=SigningKey.from_file(trusting_folder / "key.pem")).append(
        entry("a stranger's")
    )
    looking = {**WRITING_COMMANDS, "checkpoint": READING_COMMANDS["checkpoint"]}
    del looking["accept-ledger"]  # it is the remedy
    del looking["serve"]  # it reconciles repeatedly
    for name, arguments in looking.items():
        code, plain = as_json(capsys, *arguments)
        assert code == 2, name
        assert "Untrusted" in json.dumps(plain), name
        assert "is not trusted as a writer by .gate/trust.yaml" in json.dumps(plain)
        assert "gate keys trust --as writer" in json.dumps(plain)
    assert as_json(capsys, "history")[1]["total"] == 1  # reading is allowed
    trust = Path(".gate/trust.yaml")
    edited = EditedTrust(trust)
    edited.trust(read_public("key.pub"), ["writers"], KeyTerms())
    edited.save()
    assert as_json(capsys, *READING_COMMANDS["checkpoint"])[0] == 0


def test_unsigned_ledger_continues_until_its_first_signed_entry(
    in_project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Ledger(DEFAULT).append(entry("unsigned"))
    custom = LocalKeys(in_project / ".gate", print).signing_key()
    location = {"state": DEFAULT, "key": None, "trust": None}
    open_writable_ledger(location).append(entry("the first signed one"))  # type: ignore[arg-type]
    assert [row.signature is None for row in rows(DEFAULT)] == [True, False]
    assert read_ledger(DEFAULT).trust is not None
    # From now on an unsigned entry is untrusted.
    Ledger(DEFAULT).append(entry("unsigned again"))
    with pytest.raises(
        Untrusted, match="has no signature, expected one of a writer that is trusted by"
    ):
        read_ledger(DEFAULT).entries()
    assert custom.public.key_id in str(rows(DEFAULT)[1].signature)


def test_named_trust_refuses_an_unsigned_ledger(
    trusting_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Ledger(DEFAULT).append(entry("unsigned"))
    assert as_json(capsys, *READING_COMMANDS["checkpoint"])[0] == 0
    monkeypatch.setenv("GATE_TRUST", ".gate/trust.yaml")
    assert as_json(capsys, *READING_COMMANDS["checkpoint"])[1]["error"]["type"] == "Untrusted"


def _load_local_key(folder: Path) -> SigningKey:
    return SigningKey.from_file(folder / ".gate/keys/local.pem")
