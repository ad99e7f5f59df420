"""gate history: table widths, JSON, full output, and verification of forged rows."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gate import Digest, cli
from gate.commands.history import _Line, _show_short
from gate.commands.promote import version_page
from gate.ledger.entry import LedgerEntry, Row
from gate.ledger.ledger import Ledger
from tests.ledger import test_signature as forged
from tests.ledger.keys import Writers
from tests.ledger.rows import entry, replace_rows, rows
from tests.service.conftest import database as url  # noqa: F401
from tests.service.conftest import postgres_server  # noqa: F401

SHA256 = Digest.from_bytes(b"model")
REASON = "PASS on ort-cpu, ort-cpu-optimized; waived: torch-cuda / runtime,\nort-cuda / \x1b[2J"


def entries(*models: str) -> list[_Line]:
    actions = ("promoted", "rolled_back", "violation", "refused")
    return [
        _Line(
            LedgerEntry(
                at="2026-11-22T17:55:01+00:00", action=action, registry="r", model=model,
                version=None if action == "refused" else "12", sha256=SHA256, reason=REASON,
                signers=("ab" * 32,), approvers=("cd" * 32, "ef" * 32),
            ),
            number, "12" * 32,
        )
        for number, (action, model) in enumerate(product(actions, models), start=1)
    ]  # fmt: skip


def print_entries(show, of: list[_Line], width: int) -> list[str]:
    stream = io.StringIO()
    show(of, Console(file=stream, width=width, markup=False, highlight=False))
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("models", [("digits",), ("digits", "a-model-with-a-very-long-name")])
@pytest.mark.parametrize("width", [45, 80, 200, 10_000])
def test_one_line_per_entry(width: int, models: tuple[str, ...]) -> None:
    lines = print_entries(_show_short, entries(*models), width)
    assert len(lines) == 4 * len(models)
    assert max(map(len, lines)) <= width
    for line, action in zip(lines[:: len(models)], ("promoted", "rolled_back"), strict=False):
        assert line.startswith("2026-11-22 17:55  " if width > 45 else "11-22 17:55  ")
        assert f"  {action} " in line
        assert "  12  " in line
        assert (SHA256.short in line) == (width > 45)
        assert ("a-model" in "".join(lines)) == (len(models) > 1)
        assert line.endswith("…") == (width < 200)


@pytest.mark.parametrize(
    ("uri", "version", "page"),
    [
        ("http://127.0.0.1:5000/", "3", "http://127.0.0.1:5000/#/models/my%20model/versions/3"),
        ("http://127.0.0.1:5000", None, None),
        ("sqlite:///mlflow.db", "3", None),
    ],
)
def test_link_to_the_version_page(uri: str, version: str | None, page: str | None) -> None:
    assert version_page(uri, "my model", version) == page


def test_link_to_the_version_page_has_no_password() -> None:
    page = version_page("https://me:secret@mlflow.example.com/x", "m", "1")
    assert page is not None
    assert "secret" not in page
    assert page.endswith("/x/#/models/m/versions/1")


class AuditedLedger:
    """A ledger of four signed entries, and an auditor with a trust file and a checkpoint of three
    entries."""

    def __init__(self, state: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.url, self.folder, self.capsys = state, folder, capsys
        self.writers = Writers(folder)
        self.trusted("ci")
        ledger = Ledger(state, key=self.writers.key("ci"))
        for reason in ("one", "two", "three"):
            ledger.append(entry(reason))
        created = ("checkpoint", "-o", "checkpoint.json", "--key", "ci.pem")
        assert self.call(*created)[0] == 0
        ledger.append(entry("four"))
        self.good = rows(state)

    def trusted(self, *names: str, **more: Any) -> None:
        trust = self.writers.trusting(names, **more)
        (self.folder / "trust.yaml").write_text(json.dumps({"trust": trust.to_plain()}))

    def call(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        code = cli.main(["history", *arguments, "--state", self.url, "--json"])
        plain: dict[str, Any] = json.loads(self.capsys.readouterr().out)
        return code, plain

    def verify(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        return self.call("--verify", "--trust", "trust.yaml", *arguments)


@pytest.fixture
def audited(
    url: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> AuditedLedger:
    for name in ("GATE_STATE", "GATE_TRUST", "GATE_SIGNING_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return AuditedLedger(url, tmp_path, capsys)


def test_valid_ledger_is_verified_and_shown(audited: AuditedLedger) -> None:
    code, plain = audited.verify("--checkpoint", "checkpoint.json")
    key = audited.writers.key("ci").public
    assert (code, plain["holds"], plain["lines"]) == (0, True, 4)
    assert plain["head"] == str(Digest.from_bytes(audited.good[-1].line))
    assert plain["signed_by"] == {key.key_id: 4}
    assert (plain["checkpoint"]["lines"], plain["checkpoint"]["since"]) == (3, 1)
    assert plain["checkpoint"]["signers"] == [key.key_id]
    arguments = ["history", "--verify", "--state", audited.url]
    assert cli.main([*arguments, "--trust", "trust.yaml", "--checkpoint", "checkpoint.json"]) == 0
    shown = audited.capsys.readouterr().out
    assert f"4 by {key.label}" in shown
    assert "all 3 lines exist, 1 were added since" in shown
    assert cli.main(arguments) == 0  # without trust
    assert "signatures were not verified" in audited.capsys.readouterr().out


def remove_first(stored_rows: list[Row]) -> list[Row]:
    return stored_rows[1:]


def edit_line(stored_rows: list[Row]) -> list[Row]:
    line = stored_rows[1].line.replace(b'"two"', b'"ten"')
    return [stored_rows[0], stored_rows[1]._replace(line=line), *stored_rows[2:]]


def remove_signature(stored_rows: list[Row]) -> list[Row]:
    return [stored_rows[0], stored_rows[1]._replace(signature=None), *stored_rows[2:]]


@pytest.mark.parametrize(
    ("forge", "number"), [(remove_first, 1), (edit_line, 3), (remove_signature, 2)]
)
def test_forged_entry_is_reported_with_its_number(
    audited: AuditedLedger, forge: Callable[[list[Row]], list[Row]], number: int
) -> None:
    replace_rows(audited.url, forge(audited.good))
    code, plain = audited.verify()
    assert (code, plain["holds"]) == (1, False)
    assert f"{plain['ledger']}:{number}: " in plain["problem"]
    replace_rows(audited.url, audited.good)
    assert audited.verify()[0] == 0


def rewrite_with_key(audited: AuditedLedger) -> list[Row]:
    return forged.rebuild_chain(
        forged.rewrite_first_entry(audited.good), key=audited.writers.key("ci")
    )


@pytest.mark.parametrize(
    "forge",
    [lambda _: [], lambda audited: audited.good[:2], rewrite_with_key],
    ids=["all removed", "end removed", "rewritten by a trusted writer"],
)
def test_checkpoint_detects_removed_entries(
    audited: AuditedLedger, forge: Callable[[AuditedLedger], list[Row]]
) -> None:
    replace_rows(audited.url, forge(audited))
    assert audited.verify()[0] == 0  # the chain alone can't see it
    code, plain = audited.verify("--checkpoint", "checkpoint.json")
    assert (code, plain["holds"]) == (1, False)
    assert "had 3 entries" in plain["problem"]


@pytest.mark.parametrize(
    "tamper",
    [
        lambda audited, path: audited.call("checkpoint", "-o", path.name, "--key", "stranger.pem"),
        lambda audited, path: path.write_bytes(path.read_bytes().replace(b'"sig"', b'"gis"')),
        lambda audited, path: path.write_bytes(b"{}"),
        lambda audited, path: audited.trusted("ci", revoked=("ci",)),
    ],
    ids=["of a stranger", "signature stripped", "no envelope", "key revoked"],
)
def test_untrusted_checkpoint_is_refused(
    audited: AuditedLedger, tamper: Callable[[AuditedLedger, Path], object]
) -> None:
    audited.writers.key("stranger")
    tamper(audited, Path("checkpoint.json"))
    code, plain = audited.verify("--checkpoint", "checkpoint.json")
    assert (code, plain["holds"]) == (1, False)


@pytest.mark.rows(5)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--verify", "--trust", "missing.yaml"],
        ["--verify", "--trust", "ci.pub"],
        ["--verify", "--trust", "trust.yaml", "--checkpoint", "missing.json"],
        ["--verify", "--checkpoint", "checkpoint.json"],
        ["--checkpoint", "checkpoint.json"],
        ["checkpoint", "--key", "missing.pem"],
        ["checkpoint"],
        ["export"],
        ["import", "missing.jsonl"],
    ],
)
def test_unreadable_input_is_an_error(audited: AuditedLedger, arguments: list[str]) -> None:
    code, plain = audited.call(*arguments)
    assert code == 2
    assert plain["error"]["message"]


def test_lost_signature_can_be_accepted(audited: AuditedLedger) -> None:
    replace_rows(audited.url, remove_signature(audited.good))
    assert audited.verify()[0] == 1
    accept = ["accept-ledger", "--reason", "compared with Monday's copy", "--state", audited.url]
    assert cli.main([*accept, "--trust", "trust.yaml", "--key", "ci.pem"]) == 0
    audited.capsys.readouterr()
    code, plain = audited.verify()
    assert (code, plain["accepted"]) == (0, [2])


def test_export_prints_the_lines(audited: AuditedLedger) -> None:
    assert cli.main(["history", "export", "--state", audited.url]) == 0
    printed = audited.capsys.readouterr().out.encode()
    assert printed == b"".join(row.line + b"\n" for row in audited.good)
    code, plain = audited.call("export", "-o", "lines.jsonl")
    assert (code, plain["lines"], Path("lines.jsonl").read_bytes()) == (0, 4, printed)


def test_export_without_a_ledger_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Writers(tmp_path).key("ci")
    for arguments in ([], ["--verify"], ["export"], ["checkpoint", "--key", "ci.pem"]):
        assert cli.main(["history", *arguments]) == 2
        assert "there is no ledger at .gate/state.db" in capsys.readouterr().err
    assert not Path(".gate").exists()
