"""`gate keys` creates, shows and trusts keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.signing.keys import SigningKey
from gate.signing.trust import Trust
from tests.commands.running import Capture, create_runner

run, as_json = create_runner("keys")


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_name_refers_to_the_key_folder(capsys: Capture) -> None:
    code, plain = as_json(capsys, "new", "ci")
    assert (code, plain["path"], plain["scheme"]) == (0, ".gate/keys/ci.pem", "ed25519")
    key = SigningKey.load(".gate/keys/ci.pem")
    assert plain["key_id"] == key.public.key_id
    private = Path(".gate/keys/ci.pem").read_text().splitlines()[1]
    code, out, err = run(capsys, "new", "ci")
    assert code == 2
    assert "already exists" in err
    code, out, err = run(capsys, "new", "sub/other.pem", "--scheme", "ecdsa", "--debug")
    assert code == 0
    assert "gate keys trust sub/other.pub" in out
    assert "--as measurer if the key signs verdicts" in out
    assert "--as reviewer if it approves versions" in out
    assert SigningKey.load("sub/other.pem").public.scheme == "ecdsa-sha2-nistp256"
    assert private not in out + err


def test_show_hides_the_private_key(capsys: Capture) -> None:
    run(capsys, "new", "ci")
    shown = [as_json(capsys, "show", f".gate/keys/ci.{end}") for end in ("pem", "pub")]
    assert shown[0] == shown[1]
    code, plain = shown[0]
    assert code == 0
    assert plain["name"] == "ci"
    assert plain["public"] == Path(".gate/keys/ci.pub").read_text()
    code, out, _ = run(capsys, "show", ".gate/keys/ci.pem")
    assert "PRIVATE" not in out
    assert Path(".gate/keys/ci.pem").read_text().splitlines()[1] not in out
    assert plain["key_id"] in out


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("none.pem", "No such file"),
        ("awskms:alias/x", r"securesystemslib[awskms]"),
        ("awskm:x", "use one of file:, awskms:"),
        ("text.pub", "text.pub is not a public key"),
        (".", "Is a directory"),
    ],
)
def test_invalid_key_is_refused(capsys: Capture, place: str, why: str) -> None:
    Path("text.pub").write_text("hello")
    code, _, err = run(capsys, "show", place)
    assert code == 2
    assert why in err


def test_trust_entry_is_a_valid_trust_file(capsys: Capture) -> None:
    run(capsys, "new", "ci.pem")
    code, out, _ = run(capsys, "trust", "ci.pub", "--as", "measurer", "--as", "writer")
    assert code == 0
    assert "PRIVATE" not in out
    Path("trust.yaml").write_text(out)
    trust = Trust.from_file(Path("trust.yaml"))
    assert [each.name for each in (*trust.measurers, *trust.writers)] == ["ci", "ci"]
