"""gate verify-verdict and gate verify-release --verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests import builders
from tests.commands.running import Capture, create_runner
from tests.signing import signing
from tests.signing.released import NAME, REGISTRY, ReleaseFolder, release

run, as_json = create_runner("verify-verdict")
run_release, release_as_json = create_runner("verify-release")


@pytest.fixture
def released(tmp_path: Path) -> ReleaseFolder:
    return release(tmp_path)


def minimal_arguments(released: ReleaseFolder) -> tuple[str, ...]:
    return (str(released.statement), "--model", str(released.model), "--trust", str(released.trust))


def all_arguments(released: ReleaseFolder) -> tuple[str, ...]:
    folder = released.folder
    return (
        *minimal_arguments(released), "--evidence", str(folder / "evidence.json"),
        "--policy", str(folder / "policy.json"), "--golden", str(folder / "golden"),
        "--name", NAME, "--registry", f"{REGISTRY.upper().replace('HTTPS', 'https')}/",
    )  # fmt: skip


def test_verdict_is_trusted_with_minimal_arguments(
    released: ReleaseFolder, capsys: Capture
) -> None:
    code, out, _ = run(capsys, *minimal_arguments(released))
    assert code == 0
    assert out.splitlines()[:2] == ["TRUSTED PASSED", "verdict   PASSED, PARITY_EXACT"]
    assert "claims" not in out
    assert "not verified, because no file was given: golden/golden.json, preprocessing" in out


def test_all_artifacts_are_checked(released: ReleaseFolder, capsys: Capture) -> None:
    code, plain = as_json(capsys, *all_arguments(released))
    assert (code, plain["exit_code"], plain["trusted"], plain["problems"]) == (0, 0, True, [])
    assert plain["checked"] == [
        "signature", "result", "model", "resource", "evidence", "measurement", "policy",
        "decision", "golden",
    ]  # fmt: skip
    assert plain["statement"]["verificationResult"] == "PASSED"
    assert plain["signers"] == [{"name": "key 0", "key_id": signing.key().public.key_id}]


def test_all_problems_are_printed(released: ReleaseFolder, capsys: Capture) -> None:
    released.model.write_bytes(b"another")
    evidence = released.folder / "evidence.json"
    evidence.write_text(evidence.read_text().replace('"samples": 400', '"samples": 401', 1))
    code, out, _ = run(capsys, *all_arguments(released))
    assert code == 1
    assert out.splitlines()[0] == "NOT TRUSTED (4 problems)"
    assert out.index("The statement claims, without proof:") < out.index("verdict   PASSED")
    for why in (
        "which the statement does not name",
        "The evidence was edited",
        "this evidence and policy lead to",
    ):
        assert why in out


@pytest.mark.parametrize("text", ["", '{"payload":"", "payloadType": "x", "signatures": []}'])
def test_invalid_statement_is_not_trusted(released: ReleaseFolder, capsys: Capture, text) -> None:
    released.statement.write_text(text)
    code, plain = as_json(capsys, *minimal_arguments(released))
    assert (code, plain["trusted"], plain["statement"]) == (1, False, None)
    assert "is not an in-toto statement" in plain["problems"][0]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--evidence", "none.json"), "--evidence: none.json does not exist"),
        (("--policy", "none.yaml"), "--policy: none.yaml does not exist"),
        (("--name", NAME), "--name and --registry go together"),
        (("--registry", REGISTRY), "--name and --registry go together"),
        (("--model", "none.onnx"), "none.onnx does not exist"),
        (("--trust", "none.yaml"), "none.yaml does not exist"),
    ],
)
def test_unreadable_file_is_an_error(
    released: ReleaseFolder, capsys: Capture, arguments, why
) -> None:
    code, _, err = run(capsys, *minimal_arguments(released), *arguments)
    assert code == 2
    assert why in err


def test_trusted_rejection_is_reported_as_rejection(tmp_path: Path, capsys: Capture) -> None:
    created = release(tmp_path, runtimes=(), now=datetime.now(UTC))
    code, out, _ = run(capsys, *minimal_arguments(created))
    assert (code, out.splitlines()[0]) == (1, "NOT TRUSTED: a trusted key signed FAILED")
    assert "claims" not in out
    assert "verdict   FAILED\n" in out


HEAVY = ("torch", "mlflow", "onnxruntime", "onnx", "sqlalchemy", "numpy", "scipy", "matplotlib",
         "fastapi", "requests", "boto3")  # fmt: skip


def test_verification_needs_files_only(released: ReleaseFolder) -> None:
    """Neither what measures nor what serves is imported, and nothing is connected to."""
    script = (
        "import socket, sys\n"
        "def refuse(*_): raise AssertionError('network')\n"
        "socket.socket.connect = refuse\n"
        "from gate import cli\n"
        f"code = cli.main({['verify-verdict', *minimal_arguments(released)]!r})\n"
        f"print(code, [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert completed.stdout.splitlines()[-1] == "0 []"


def arguments_with_verdict(released: ReleaseFolder) -> tuple[str, ...]:
    return (
        str(released.model), "--golden", str(released.folder / "golden"),
        "--verdict", str(released.statement), "--trust", str(released.trust),
    )  # fmt: skip


@pytest.mark.further
def test_trusted_release_is_executed(released: ReleaseFolder, capsys: Capture) -> None:
    code, plain = release_as_json(capsys, *arguments_with_verdict(released))
    assert (code, plain["verdict"], plain["statement"]["trusted"]) == (0, "PASS", True)
    assert plain["trusted"] is True
    code, out, _ = run_release(capsys, *arguments_with_verdict(released))
    assert code == 0
    assert "signed by key 0" in out
    assert out.splitlines()[0] == "PASS, TRUSTED PASSED"


def test_untrusted_release_is_not_executed(
    released: ReleaseFolder, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gate.golden.verify.verify_golden_in_sandbox", lambda *_, **__: pytest.fail("ran")
    )
    array = next((released.folder / "golden").glob("output-*.bin"))
    array.write_bytes(bytes(array.stat().st_size))
    code, plain = release_as_json(capsys, *arguments_with_verdict(released))
    assert (code, plain["verdict"], plain["statement"]["trusted"]) == (1, "FAIL", False)
    assert plain["trusted"] is False
    code, out, _ = run_release(capsys, *arguments_with_verdict(released))
    assert code == 1
    assert out.splitlines()[0] == "FAIL, NOT TRUSTED (1 problem): nothing was run"


def test_golden_vectors_missing_in_the_statement_are_refused(
    tmp_path: Path, capsys: Capture
) -> None:
    created = release(tmp_path)
    statements = signing.statements(
        created.evidence, created.decision, files={"model.onnx": created.decision.subject_sha256}
    )
    statements.write(tmp_path)
    code, plain = release_as_json(capsys, *arguments_with_verdict(created))
    assert code == 1
    assert "the statement names none" in json.dumps(plain["problems"])


@pytest.mark.parametrize("option", ["--verdict", "--trust"])
def test_verdict_and_trust_options_go_together(
    released: ReleaseFolder, capsys: Capture, option: str
) -> None:
    arguments = arguments_with_verdict(released)
    index = arguments.index(option)
    code, _, err = run_release(capsys, *arguments[:index], *arguments[index + 2 :])
    assert code == 2
    assert "go together" in err


def test_preprocessing_spec_is_verified(released: ReleaseFolder, capsys: Capture) -> None:
    from gate import PreprocessSpec

    spec = released.folder / "spec.json"
    PreprocessSpec.imagenet().save(spec)
    assert PreprocessSpec.imagenet().digest() != builders.digest("spec")
    code, plain = as_json(capsys, *minimal_arguments(released), "--preprocessing", str(spec))
    assert code == 1
    assert "preprocessing" in plain["problems"][0]
    files = {"model.onnx": released.decision.subject_sha256}
    files["preprocessing"] = PreprocessSpec.imagenet().digest()
    signing.statements(released.evidence, released.decision, files=files).write(released.folder)
    code, plain = as_json(capsys, *minimal_arguments(released), "--preprocessing", str(spec))
    assert (code, plain["unchecked"]) == (0, [])
