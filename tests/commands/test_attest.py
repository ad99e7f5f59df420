"""`gate attest export` as its users call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gate.attestation.keys import SigningKey
from tests.attestation import signing
from tests.attestation.released import Released, release
from tests.commands.running import Capture, runner

run, as_json = runner("attest")


@pytest.fixture
def made(tmp_path: Path) -> Released:
    return release(tmp_path)


def test_slsa_is_the_statement_itself(made: Released, capsys: Capture) -> None:
    code, out, _ = run(capsys, "export", str(made.statement), "--format", "slsa")
    assert code == 0
    assert json.loads(out) == made.statements.decision.statement.to_plain()
    code, plain = as_json(capsys, "export", str(made.statement), "--format", "slsa")
    assert (code, plain["statement"]) == (0, json.loads(out))


def test_facts_are_written_to_a_file(made: Released, capsys: Capture) -> None:
    output = made.folder / "out" / "facts.json"
    code, out, _ = run(
        capsys, "export", str(made.statement), "--format", "json", "-o", str(output),
        "--trust", str(made.trust),
    )  # fmt: skip
    assert (code, out.split()) == (0, ["written", str(output)])
    facts = json.loads(output.read_text())
    assert (facts["verdict"], facts["signatures_verified"]) == ("PASSED", True)
    assert facts["trusted_key_ids"] == [signing.key().public.key_id]


@pytest.mark.parametrize("form", ["slsa", "json", "oms"])
def test_nothing_is_written_of_a_verdict_that_is_not_trusted(
    made: Released, capsys: Capture, form: str
) -> None:
    made.trust.write_text(f"{made.trust.read_text()}  revoked: [{signing.key().public.key_id}]\n")
    output = made.folder / "out.json"
    given = ("export", str(made.statement), "--format", form, "-o", str(output))
    assert run(capsys, *given)[0] == 0
    output.unlink()
    code, plain = as_json(capsys, *given, "--trust", str(made.trust))
    assert (code, plain["written"]) == (1, None)
    assert "is revoked" in plain["problem"]
    assert not output.exists()


def test_oms_is_signed_by_a_key_of_ecdsa(made: Released, capsys: Capture) -> None:
    SigningKey.make(made.folder / "ec.pem", scheme="ecdsa")
    SigningKey.make(made.folder / "ed.pem")
    given = ("export", str(made.statement), "--format", "oms", "--trust", str(made.trust))
    code, out, _ = run(capsys, *given, "--key", str(made.folder / "ec.pem"))
    assert code == 0
    assert json.loads(out)["dsseEnvelope"]["payloadType"] == "application/vnd.in-toto+json"
    code, out, _ = run(capsys, *given)
    assert json.loads(out)["predicateType"] == "https://model_signing/signature/v1.0"
    code, _, err = run(capsys, *given, "--key", str(made.folder / "ed.pem"))
    assert code == 2
    assert "--scheme ecdsa" in err


def test_a_rejected_file_gets_no_manifest(tmp_path: Path, capsys: Capture) -> None:
    made = release(tmp_path, runtimes=())
    code, out, _ = run(capsys, "export", str(made.statement), "--format", "oms")
    assert code == 1
    assert "the verdict is FAILED" in out
    assert run(capsys, "export", str(made.statement), "--format", "json")[0] == 0


@pytest.mark.parametrize("form", ["slsa", "json", "oms"])
def test_a_key_signs_only_what_was_checked_and_only_manifests(
    made: Released, capsys: Capture, form: str
) -> None:
    given = ("export", str(made.statement), "--format", form, "--key", "x.pem")
    given += () if form == "oms" else ("--trust", str(made.trust))
    code, _, err = run(capsys, *given)
    assert code == 2
    assert "--key signs the manifest" in err


def test_another_statement_is_no_verdict(made: Released, capsys: Capture) -> None:
    evidence = made.folder / "evidence.dsse.json"
    code, plain = as_json(capsys, "export", str(evidence), "--format", "slsa")
    assert code == 1
    assert "is of type urn:parity-gate:measurement:v1" in plain["problem"]
