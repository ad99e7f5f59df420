"""All commands apply one rule to registered model names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gate import cli
from gate.errors import StorageError
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.registry.registered_model import RegisteredModel
from tests.small_project import create_project

WRONG = [
    "my model", "modèle", "50%", "a#b", "it's", 'say "so"', "it's \"so\"", "n" * 101, "", "-n",
    "../up", "a/b", "a\nb", "a\n", "example_model",
]  # fmt: skip

COMMANDS = {
    "promote": ["FILE", "--report", "report", "--name=NAME"],
    "check": ["FILE", "--reference", "small_models:build", "--inputs", "IMAGES", "--name=NAME"],
    "rollback": ["--yes", "--", "NAME"],
    "approve": ["--key=key.pem", "--", "NAME", "1"],
    "reject": ["--key=key.pem", "--", "NAME", "1"],
    "override": ["--champion=1", "--reason=meant", "--", "NAME"],
    "reconcile": ["--", "NAME"],
    "serve": ["--secret-file=secrets", "--model=NAME"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_invalid_name_is_refused_before_writing(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("report").mkdir()
    Path("secrets").write_text("0123456789abcdef\n")
    Path("secrets").chmod(0o600)
    replaced = {
        "FILE": str(create_project() / "good.onnx"),
        "IMAGES": str(create_project() / "images.npy"),
    }
    for name in WRONG:
        words = [replaced.get(word, word.replace("NAME", name)) for word in COMMANDS[command]]
        assert cli.main([command, "--json", *words]) == 2, name
        error = json.loads(capsys.readouterr().out)["error"]
        assert error["type"] == "StorageError", (name, error)
        assert error["message"].isprintable()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report", "secrets"]


def test_api_refuses_an_invalid_name(tmp_path: Path) -> None:
    registry, ledger = MlflowRegistry(f"sqlite:///{tmp_path}/m.db"), Ledger(tmp_path / "state.db")
    for name in WRONG:
        with pytest.raises(StorageError):
            RegisteredModel(registry, ledger, name)
    for name in ("digits", "a.b_c-D", "7", "n" * 100):
        assert RegisteredModel(registry, ledger, name).name == name
