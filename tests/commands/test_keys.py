"""`gate keys` as its users call it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.attestation.keys import SigningKey
from gate.attestation.trust import Trust
from tests.commands.running import Capture, runner

run, as_json = runner("keys")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_name_is_a_key_in_the_folder_of_keys(capsys: Capture) -> None:
    code, plain = as_json(capsys, "new", "ci")
    assert (code, plain["path"], plain["scheme"]) == (0, ".gate/keys/ci.pem", "ed25519")
    key = SigningKey.load(".gate/keys/ci.pem")
    assert plain["key_id"] == key.public.key_id
    private = Path(".gate/keys/ci.pem").read_text().splitlines()[1]
    code, out, err = run(capsys, "new", "ci")
    assert code == 2
    assert "there already" in err
    code, out, err = run(capsys, "new", "sub/other.pem", "--scheme", "ecdsa", "--debug")
    assert code == 0
    assert "gate keys trust sub/other.pub --trust FILE" in out
    assert "--as measurer where it signs verdicts" in out
    assert "--as reviewer where it approves versions" in out
    assert SigningKey.load("sub/other.pem").public.scheme == "ecdsa-sha2-nistp256"
    assert private not in out + err


def test_a_key_is_shown_without_its_private_part(capsys: Capture) -> None:
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
        ("awskm:x", "is none of file:, awskms:"),
        ("text", "no public key"),
        (".", "Is a directory"),
    ],
)
def test_what_is_no_key(capsys: Capture, place: str, why: str) -> None:
    Path("text").write_text("hello")
    code, _, err = run(capsys, "show", place)
    assert code == 2
    assert why in err


def test_a_life_of_a_trust(capsys: Capture) -> None:
    for name in ("ci", "new", "ann", "service"):
        run(capsys, "new", f"{name}.pem")
    given = ("--trust", "trust.yaml")
    assert run(capsys, "trust", "ci.pub", *given, "--as", "measurer", "--name", "CI")[0] == 0
    assert run(capsys, "trust", "ann.pub", *given, "--as", "reviewer", "--as", "reviewer")[0] == 0
    assert run(capsys, "trust", "service.pem", *given, "--as", "writer")[0] == 0
    code, plain = as_json(
        capsys, "trust", "new.pub", *given, "--as", "measurer", "--valid-from", "2026-01-01"
    )
    assert (code, plain["as"], plain["trusted"][0]["name"]) == (0, ["measurers"], "new")
    old = SigningKey.load("ci.pem").public
    code, out, _ = run(capsys, "trust", *given, "--revoke", old.short)
    assert code == 0
    assert old.key_id in out
    trust = Trust.of_file(Path("trust.yaml"))
    assert [each.name for each in trust.measurers] == ["CI", "new"]
    assert [each.name for each in trust.reviewers] == ["ann"]
    assert [each.name for each in trust.writers] == ["service"]
    assert trust.revoked == (old.key_id,)
    assert "PRIVATE" not in Path("trust.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "nothing to do"),
        (("ci.pub",), "say what the keys may do"),
        (("ci.pub", "--as", "king"), "is not one of"),
        (("ci.pub", "ci.pub", "--as", "measurer", "--name", "x"), "--name is for one key"),
        (("--revoke", "0" * 64, "--as", "measurer"), "are for keys"),
        (("ci.pub", "--as", "reviewer"), "Name a measurer first"),
        (("ci.pub", "--as", "measurer", "--valid-until", "soon"), "is no time"),
        (("--revoke", "0" * 12), "names 0 of the listed keys"),
    ],
)
def test_what_would_do_nothing_or_something_else(
    capsys: Capture, arguments: tuple[str, ...], why: str
) -> None:
    run(capsys, "new", "ci.pem")
    code, _, err = run(capsys, "trust", *arguments, "--trust", "trust.yaml")
    assert code == 2
    assert why in err
    assert not Path("trust.yaml").exists()


def test_each_has_help_with_examples(capsys: Capture) -> None:
    for command in ("new", "show", "trust"):
        code, out, _ = run(capsys, command, "--help")
        assert code == 0
        assert "Examples:" in out
