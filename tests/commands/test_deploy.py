"""gate deploy and gate deployed."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gate import Digest, cli
from gate.deploy.store import ModelStore
from tests.deploy.models import assert_complete
from tests.golden_vectors import vectors
from tests.golden_vectors.test_verify import BLOCKER, CALL, REPOSITORY
from tests.registry.releases import onnx_file


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    vectors.write_model_and_vectors(tmp_path)
    vectors.write_model_and_vectors(tmp_path / "next", seed=1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


STORE = ["--store", "srv"]
DEPLOY = ["deploy", "digits", *STORE, "--file", "model.onnx", "--golden", "golden"]
NEXT = ["deploy", "digits", *STORE, "--file", "next/model.onnx", "--golden", "next/golden"]


def _json(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int) -> dict:
    assert cli.main([*arguments, "--json"]) == code
    plain: dict = json.loads(capsys.readouterr().out)
    assert plain.get("exit_code", code) == code
    return plain


def test_no_other_user_can_write_into_the_store(folder: Path) -> None:
    command = [sys.executable, "-m", "gate", *DEPLOY]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(command, env=environment, umask=0, check=True)
    paths = [path for path in (folder / "srv").rglob("*") if not path.is_symlink()]
    assert paths
    assert not [path for path in paths if path.stat().st_mode & stat.S_IWOTH]


@pytest.mark.further
def test_deploy_show_and_roll_back(folder: Path, capsys) -> None:
    first = _json(capsys, DEPLOY, 0)
    assert first["outcome"] == "deployed"
    assert first["manifest"]["slots"]["exact"]["sha256"] == str(
        Digest.from_file(Path("model.onnx"))
    )
    assert (
        Path(first["path"], "exact", "model.onnx").read_bytes() == Path("model.onnx").read_bytes()
    )
    assert _json(capsys, DEPLOY, 0)["outcome"] == "unchanged"
    assert _json(capsys, NEXT, 0)["manifest"]["release"] == 2
    shown = _json(capsys, ["deployed", "digits", *STORE], 0)
    assert [live["release"] for live in shown["deployed"]] == [2]
    back = _json(capsys, ["deploy", "digits", *STORE, "--rollback"], 0)
    assert (back["outcome"], back["manifest"]["rolled_back_to"]) == ("rolled_back", 1)
    assert _json(capsys, ["deploy", "digits", *STORE, "--rollback"], 1)["outcome"] == "refused"
    assert assert_complete(ModelStore(folder / "srv")).release == 3
    assert cli.main(["deployed", *STORE]) == 0
    assert "digits" in capsys.readouterr().out


@pytest.mark.proof
def test_refused_deployment_exits_with_1(folder: Path, capsys) -> None:
    assert cli.main([*DEPLOY, "--sha256", "0" * 64]) == 1
    assert "refused: model.onnx has digest" in capsys.readouterr().out
    wrong = ["deploy", "digits", *STORE, "--file", "model.onnx", "--golden", "next/golden"]
    assert cli.main(wrong) == 1
    assert not ModelStore(folder / "srv").names()
    good = str(Digest.from_file(Path("model.onnx")))
    assert cli.main([*DEPLOY, "--sha256", good]) == 0


def test_damaged_store_is_reported(folder: Path, capsys) -> None:
    assert cli.main(DEPLOY) == 0
    stored = (folder / "srv" / "live" / "digits" / "exact" / "model.onnx").resolve()
    stored.chmod(0o644)
    onnx_file(stored, seed=5)
    plain = _json(capsys, ["deployed", *STORE], 1) if capsys.readouterr() else {}
    assert "digits/exact" in plain["problems"]


@pytest.mark.parametrize(
    "arguments",
    [
        [*DEPLOY, "--rollback"],
        ["deploy", "digits", *STORE, "--rollback", "--sha256", "0" * 64],
        ["deploy", "../up", *STORE, "--file", "model.onnx"],
        ["deploy", "digits", *STORE, "--file", "model.onnx", "--golden", "nowhere"],
        ["deploy", "digits", "--file", "model.onnx"],
        ["deploy", "digits", *STORE, "--rollback", "--keep", "0"],
        ["deployed", "nobody", *STORE],
    ],
)
def test_invalid_deploy_commands_exit_with_2(folder: Path, capsys, arguments: list[str]) -> None:
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.proof
def test_deploy_works_without_torch(folder: Path) -> None:
    blocked = folder / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(BLOCKER)
    completed = subprocess.run(
        [sys.executable, "-c", CALL, *DEPLOY], cwd=folder, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": f"{blocked}{os.pathsep}{REPOSITORY}"}, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
